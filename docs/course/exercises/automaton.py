"""Exercise of chapter 12: the masks of a finite automaton.

    pytest -x docs/course/exercises/test_automaton.py

A regular expression is a finite automaton: states, and characters that lead from one to another. A model does not write
characters but tokens of several of them. So a mask needs, for a state, all tokens whose characters lead to another
state, one after the other. There are only so many states, so all of that can be found in advance, once for each grammar
(Willard and Louf, 2023: Outlines). A mask is then a lookup.

There is a trap. Not every state is worth reaching: if the vocabulary has no tokens for the rest of the text, the model
would get stuck in the middle of it, with nothing allowed. So a token is allowed only if some tokens after it, or none,
lead to a final state.

Fill in three functions.
"""

from dataclasses import dataclass


@dataclass
class Automaton:
    """A deterministic automaton whose first state is 0.

    moves: (state, character) -> the next state. Missing: the text is not allowed.
    final: the states in which the text may end.
    """

    moves: dict[tuple[int, str], int]
    final: set[int]


def walk(automaton: Automaton, state: int, text: str) -> int | None:
    """The state after a text that begins in `state`; None if the text is not allowed."""
    raise NotImplementedError("exercise 12")


def index(automaton: Automaton, tokens: list[str]) -> dict[int, dict[int, int]]:
    """What may follow: state -> {token id: the state after it}.

    It has every state that the tokens can reach from state 0, state 0 included, and from which they can reach a final
    state. A token is allowed if the state after it is one of these. A token without a text is never allowed.

    Args: tokens: the text of each token id.
    """
    raise NotImplementedError("exercise 12")


def mask(allowed: dict[int, int], ends: bool, end_token: int, vocab_size: int) -> bytes:
    """The mask that nanopage sends to its workers: token i is bit i % 8 of byte i // 8, and a set bit allows it.

    Args:
        allowed: an entry of `index`.
        ends: whether the state is final. Then `end_token` is allowed as well.
        vocab_size: the number of bits, rounded up to full bytes.
    """
    raise NotImplementedError("exercise 12")
