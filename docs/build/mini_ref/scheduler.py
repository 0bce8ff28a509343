"""Which sequences run in the next step, and how many tokens of each (milestones 6 and 7)."""

from collections import deque

from .blocks import BlockManager, Sequence


class Scheduler:
    """Continuous batching: each step is chosen anew (Orca, 2022). Decodes and chunks of prompts are computed together,
    under one budget of tokens (Sarathi-Serve, 2024).

    Args: max_num_seqs: most sequences running at once, forks included. max_num_batched_tokens: most tokens in a step.
    """

    def __init__(self, blocks: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        self.blocks, self.max_num_seqs, self.max_num_batched_tokens = blocks, max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()  # have no blocks
        self.running: list[Sequence] = []  # have blocks; oldest first
        self.num_preemptions = 0

    def schedule(self) -> list[tuple[Sequence, int]]:
        """The sequences of the next step, and how many tokens of each to compute. They have blocks for these tokens.

        Running sequences come first, in order. Each computes all that it has left, as far as the budget goes. If blocks
        run out, the last running sequence is preempted: it is not in the step, because only those before it can be.
        Then, unless blocks ran out, waiting sequences are admitted, as long as the first of them fits.
        """
        batch: list[tuple[Sequence, int]] = []
        budget, preempted = self.max_num_batched_tokens, False
        while budget > 0 and (len(batch) < len(self.running) or (not preempted and self.admit())):
            seq = self.running[len(batch)]
            num_tokens = min(len(seq.token_ids) - seq.num_computed, budget)
            if self.blocks.grow(seq, seq.num_computed + num_tokens):
                batch.append((seq, num_tokens))
                budget -= num_tokens
            else:
                self.preempt(self.running.pop())
                preempted = True
        return batch

    def admit(self) -> bool:
        """Let the first waiting sequence run, if there are places for it and its forks, and free blocks for all its
        tokens: otherwise, a long prompt would start only to be preempted. Known blocks of its prefix that are in use
        cost nothing. Returns: whether it runs."""
        if not self.waiting:
            return False
        seq = self.waiting[0]
        prefix = self.blocks.find_prefix(seq)
        places = sum(1 + len(each.forks) for each in [*self.running, seq])
        needed = self.blocks.blocks_for(len(seq.token_ids)) - sum(block in self.blocks.ref_counts for block in prefix)
        if places > self.max_num_seqs or needed > self.blocks.num_free:
            return False
        self.running.append(self.waiting.popleft())
        self.blocks.share(seq, prefix, len(prefix) * self.blocks.block_size)
        return True

    def preempt(self, seq: Sequence) -> None:
        """Take a sequence's blocks. It keeps its tokens, waits first in line, and computes their K and V again later.
        Nobody can see the difference in its answer."""
        self.blocks.free(seq)
        seq.num_computed = 0
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def fork(self, seq: Sequence) -> list[Sequence]:
        """Let the forks of a sequence run, with its blocks. Returns: the forks."""
        forks, seq.forks = seq.forks, []
        for child in forks:
            self.blocks.share(child, seq.block_table, seq.num_computed)
        self.running += forks
        return forks

    def finish(self, seq: Sequence) -> None:
        self.blocks.free(seq)
        self.running.remove(seq)
