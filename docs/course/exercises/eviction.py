"""Exercise of chapter 4: an eviction policy for the prefix cache.

    pytest -x docs/course/exercises/test_eviction.py

nanopage evicts the block that was used least recently. Its weakness: somebody sends a hundred long documents once, and
the beginning of all chats, which a thousand requests shared before, is gone. So evict a block that few requests have
found in the cache.

But whatever the policy, a block must not go before the blocks that continue it: a lookup walks a prefix from its
beginning and stops at the first block that is missing, so those after it could not be found any more.

A `Prefix` is what the cache knows of a block: `hash` is computed from its tokens and all before them, and `parent` is
the `Prefix` of the block before it, or None for the first block of a prompt.

Compare `Prefix.hash`, not objects: a block that was evicted and computed again has another `Prefix` with the same hash,
and those that continue it may still have the old one as their `parent`.

Fill in `choose`. The BlockManager below asks it whenever no free block is left.
"""

from nanopage.engine.block_manager import BlockManager, Prefix


def choose(cached: list[Prefix], hits: dict[bytes, int]) -> Prefix:
    """The block to evict:

    1. Only one that no other block in `cached` continues (is the `parent` of none of them).
    2. Of these, one with the fewest hits.
    3. Of these, the one that was used least recently.

    Args:
        cached: all blocks that may be evicted, at least one, least recently used first.
        hits: `Prefix.hash` -> how many requests have found this block in the cache. A block without hits
            is not in it.
    """
    raise NotImplementedError("exercise 4")


class FrequencyBlockManager(BlockManager):
    """A BlockManager that counts hits, and evicts by `choose`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.hits: dict[bytes, int] = {}

    def allocate(self, seq_id: int, prefix: list[Prefix] | None = None, num_tokens: int = 0) -> int:
        for entry in prefix or []:
            self.hits[entry.hash] = self.hits.get(entry.hash, 0) + 1
        return super().allocate(seq_id, prefix, num_tokens)

    def _take_block(self) -> int:
        if not self._free:
            victim = choose(list(self.prefixes.cached.values()), self.hits)
            (block,) = victim.blocks  # one for each kind of layers: here all are alike
            self.prefixes.cached.move_to_end(block, last=False)  # the next one that BlockManager evicts
        return super()._take_block()
