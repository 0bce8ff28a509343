"""Exercise of chapter 2, solved."""

from dry import Sequence


class ForkingBlockManager:
    """A pool of `num_blocks` blocks of `block_size` tokens each, for sequences that fork. `blocks_for` and `slots` are
    given."""

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.free_blocks = list(range(num_blocks - 1, -1, -1))
        self.ref_counts = [0] * num_blocks  # in how many tables each block is; 0 if it is in free_blocks
        self.copies: list[tuple[int, int]] = []  # (from, to) of blocks to copy, appended by `grow`

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)  # rounded up

    def slots(self, seq: Sequence, start: int, end: int) -> list[int]:
        """Where in the cache the K and V of the tokens from `start` to `end` are: block * block_size + offset."""
        size = self.block_size
        return [seq.block_table[position // size] * size + position % size for position in range(start, end)]

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
