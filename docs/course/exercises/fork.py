"""Exercise of chapter 2: sequences that share blocks, and copy a block before they write to it.

    pytest -x docs/course/exercises/test_fork.py

Eight completions of one prompt need the prompt's K and V only once. A fork starts a sequence whose block table is a
copy of its parent's: both read the same blocks. Each block has a reference count, the number of tables that it is in.

A full block is never written again, so it can be shared for good. The last block, partly filled, cannot: if both
sequences append a token, they would write to the same slot. So before a sequence writes to a block that is in several
tables, it takes a new block for itself, and the contents are copied. (`copies` says what to copy; whoever has the
tensors does it before the next step.) The last sequence that has a block writes in place: nobody else reads it.

`BlockManager` in nanopage/engine/block_manager.py has all this and more. Try it alone first.
"""

from dry import BlockManager, Sequence  # docs/course/experiments/dry.py has them from examples/minimal_engine.py


class ForkingBlockManager(BlockManager):
    """The BlockManager of examples/minimal_engine.py, with forks. `blocks_for` and `slots` stay as they are."""

    def __init__(self, num_blocks: int, block_size: int):
        super().__init__(num_blocks, block_size)
        self.ref_counts = [0] * num_blocks  # in how many tables each block is; 0 if it is in free_blocks
        self.copies: list[tuple[int, int]] = []  # (from, to) of blocks to copy, appended by `grow`

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
