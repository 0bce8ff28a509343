"""Exercise of chapter 4, solved."""

from nanopage.engine.block_manager import BlockManager, Prefix


def choose(cached: list[Prefix], hits: dict[bytes, int]) -> Prefix:
    """The block to evict. Rules as in the exercise.

    Parents are compared by their hashes: a parent may have been evicted and registered anew.
    """
    parents = {prefix.parent.hash for prefix in cached if prefix.parent is not None}
    leaves = [prefix for prefix in cached if prefix.hash not in parents]
    return min(leaves, key=lambda prefix: hits.get(prefix.hash, 0))  # the first of those with the fewest


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
