"""HostPool: blocks in host memory for the tables of swapped sequences, sharing included.

Tables neither grow nor fork here, and nothing is cached. The workers copy the blocks, before the next forward pass.
"""

from collections import Counter
from collections.abc import Iterable

from nanopage.step import NO_BLOCK

Tables = dict[int, list[int]]
"""seq_id -> the blocks of the sequence."""


class HostPool:
    """The tables of the swapped sequences. Args: num_blocks: size of the pool."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.reset()

    def reset(self) -> None:
        """Take back all blocks. Works in any state."""
        self.tables: Tables = {}
        self.ref_counts = [0] * self.num_blocks
        self.free_blocks = list(range(self.num_blocks - 1, -1, -1))

    def blocks_of(self, seq_ids: list[int]) -> Counter[int]:
        """The blocks in these sequences' tables, each with the number of tables that contain it."""
        return count_blocks(self.tables, seq_ids)

    def fits(self, tables: Tables) -> bool:
        """Whether there are enough free blocks for tables of the device."""
        return len(count_blocks(tables, tables)) <= len(self.free_blocks)

    def add(self, tables: Tables) -> list[tuple[int, int]]:
        """Add tables of the device, which must fit. Returns (block, host block) of every block to copy."""
        counts = count_blocks(tables, tables)
        moved = {block: self.free_blocks.pop() for block in sorted(counts)}
        for block, host_block in moved.items():
            self.ref_counts[host_block] = counts[block]
        for seq_id, table in tables.items():
            self.tables[seq_id] = [moved.get(block, NO_BLOCK) for block in table]
        return list(moved.items())

    def drop(self, seq_id: int) -> None:
        """Drop the table of a sequence, if it has one here."""
        for block in reversed(self.tables.pop(seq_id, [])):
            if block != NO_BLOCK:
                self.ref_counts[block] -= 1
                if self.ref_counts[block] == 0:
                    self.free_blocks.append(block)


def count_blocks(tables: Tables, seq_ids: Iterable[int]) -> Counter[int]:
    """The blocks in the tables of these sequences, each with the number of tables that contain it."""
    blocks = Counter(block for seq_id in seq_ids for block in tables.get(seq_id, ()))
    del blocks[NO_BLOCK]
    return blocks
