"""Exercise of chapter 2: sequences that share blocks, and copy a block before they write to it.

    pytest -x docs/course/exercises/test_fork.py

Eight completions of one prompt need the prompt's K and V only once. A fork starts a sequence whose block table is a
copy of its parent's: both read the same blocks. Each block has a reference count, the number of tables that it is in.

A full block is never written again, so it can be shared for good. The last block, partly filled, cannot: if both
sequences append a token, they would write to the same slot. So before a sequence writes to a block that is in several
tables, it takes a new block for itself, and the contents are copied. (`copies` says what to copy; whoever has the
tensors does it before the next step.) The last sequence that has a block writes in place: nobody else reads it.

`BlockManager` in docs/build/mini_ref/blocks.py has all this and more. Try it alone first.
"""

from dry import Sequence  # docs/course/experiments/dry.py has it from docs/build/mini_ref


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
        """Start the child's table, which is empty, as a copy of the parent's. The caller copies the tokens."""
        raise NotImplementedError("exercise 2")

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Make the table of a sequence ready for writing its tokens from `seq.num_computed` up to `num_tokens`.

        Of the blocks that it will write to, only the first can be shared, that of the token `seq.num_computed`.

        Returns: False, changing nothing, if there are too few free blocks, the block of a copy included.
        """
        raise NotImplementedError("exercise 2")

    def free(self, seq: Sequence) -> None:
        """Drop the table of a sequence. A block that is in no other table becomes free."""
        raise NotImplementedError("exercise 2")
