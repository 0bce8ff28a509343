"""Exercise of chapter 2, solved."""

from dry import BlockManager, Sequence


class ForkingBlockManager(BlockManager):
    """The BlockManager of examples/minimal_engine.py, with forks."""

    def __init__(self, num_blocks: int, block_size: int):
        super().__init__(num_blocks, block_size)
        self.ref_counts = [0] * num_blocks
        self.copies: list[tuple[int, int]] = []

    def fork(self, parent: Sequence, child: Sequence) -> None:
        child.block_table = list(parent.block_table)
        for block in child.block_table:
            self.ref_counts[block] += 1

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        table = seq.block_table
        first = seq.num_computed // self.block_size
        shared = first < len(table) and self.ref_counts[table[first]] > 1
        missing = max(0, self.blocks_for(num_tokens) - len(table))
        if missing + shared > len(self.free_blocks):
            return False
        if shared:
            old, table[first] = table[first], self._take()
            self.ref_counts[old] -= 1
            self.copies.append((old, table[first]))
        table += [self._take() for _ in range(missing)]
        return True

    def free(self, seq: Sequence) -> None:
        for block in reversed(seq.block_table):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free_blocks.append(block)
        seq.block_table.clear()

    def _take(self) -> int:
        block = self.free_blocks.pop()
        self.ref_counts[block] = 1
        return block
