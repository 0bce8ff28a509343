"""Exercise of chapter 11: what a prefix cache compares, and where a chunk of a prompt may end.

    pytest -x docs/course/exercises/test_placeholders.py

An `Item` (nanopage/step.py) takes the place of `length` tokens of a prompt, from `position` on. The token ids
there are placeholders, the same for all pictures. So a prefix cache must not compare token ids: it would take a cat for
a dog. And an encoder has a budget, as steps have; some pictures must not be cut at all.

Fill in both functions. nanopage has them, too (`keys_of` in nanopage/text/prompts.py, `next_work` and
`within_encoder_budget` in nanopage/engine/schedule.py), in other forms: try first.
"""

from nanopage.step import Item


def keys_of(token_ids: list[int], items: list[Item]) -> list[int]:
    """What the prefix cache compares in place of the token ids.

    1. For text, the token id.
    2. For a token of an item, a number below 0. So it is never the token id of a text.
    3. It depends on `item.hash` and on how many tokens of the item come before it, and on nothing else. So the same
       picture has the same numbers in another prompt, in another process and at another position.
    4. Different hashes have different numbers, at each of the tokens, except by a chance of 1 in 2^60 or less.

    Python's `hash` differs from process to process. hashlib's functions do not, and int.from_bytes makes a
    number from bytes. The numbers in the list must fit into 64 bits.
    """
    raise NotImplementedError("exercise 11")


def chunk(start: int, most: int, items: list[Item], budget: int) -> int:
    """How many of a prompt's tokens, from `start` on, the next step computes: `most`, except that

    1. it does not cut an item with `item.whole`. The chunk ends before such an item, or, if it begins with the item,
       with its last token, even if that is more than `most`.
    2. the items that begin in the chunk have a cost of at most `budget` together. The chunk ends before the first one
       that would exceed it. But the first item of a chunk may have any cost, because it would never run otherwise.

    An item begins in the chunk if its first token is in it. `start` is never within an item with `whole`.

    Args: items: of the prompt, by their positions. They do not overlap, and each costs at least 1.
    """
    raise NotImplementedError("exercise 11")
