"""Scheduler: which sequences run in the next step, and how many tokens of each.

Two queues. `waiting` holds sequences without blocks, in order of arrival; `running` holds those with blocks, oldest
first. Each step is one mixed batch under one token budget: decodes and pieces of prompts together (Orca, OSDI 2022;
chunked prefill: Sarathi-Serve, OSDI 2024).

  1. Running sequences come first, oldest first: one token for a decode, a chunk for an unfinished prompt. When blocks
     run out the youngest running sequence is preempted: it gives up its blocks and goes back to the front of
     `waiting`, to be recomputed from its tokens (mostly prefix-cache hits, if its blocks survive).
  2. Then waiting sequences are admitted in order, unless this step preempted. A sequence is admitted when the whole
     of its present tokens fits the free blocks, so that a long prompt does not start only to be preempted.

Progress is certain: no sequence can outgrow the pool (the engine refuses those), so the oldest can always run by
preempting the others. Output does not depend on any of this; that is tested.

Pure Python: no torch here.
"""

import time
from collections import deque
from dataclasses import dataclass, field

from nanopage.block_manager import BlockManager
from nanopage.request import SampledToken, Sequence, SequenceStatus


@dataclass(slots=True)
class ScheduledSequence:
    """`num_tokens` tokens of `seq` from position `start` run in this step; `block_table` covers them.

    `samples` is True when they reach the end of the sequence, so that the next token is to be sampled.
    """

    seq: Sequence
    start: int
    num_tokens: int
    block_table: list[int]
    samples: bool


@dataclass(slots=True)
class Batch:
    """One step's work: single-token sequences first (attention treats them together), longest first, then chunks.

    `new_blocks` were handed out for it and are to be cleared before it runs.
    """

    sequences: list[ScheduledSequence] = field(default_factory=list)
    new_blocks: list[int] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.sequences)


class Scheduler:
    """Continuous batching over a `BlockManager`.

    Args:
        block_manager: whose pool must hold the longest sequence that is ever added.
        max_num_seqs: most sequences running at once.
        max_num_batched_tokens: most tokens in one step.
    """

    def __init__(self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> Batch:
        """Choose the next step's work and give it blocks. Computes nothing."""
        batch = Batch()
        budget = self.max_num_batched_tokens

        index = 0
        while index < len(self.running) and budget > 0:
            seq = self.running[index]
            num_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget)
            # The victims are at the end of the list, so none of them is in the batch yet.
            while not self.block_manager.grow(seq.seq_id, seq.num_computed_tokens + num_tokens):
                victim = self.running.pop()
                self._preempt(victim)
                batch.preempted.append(victim)
                if victim is seq:
                    break
            else:
                self._schedule(batch, seq, num_tokens)
                budget -= num_tokens
                index += 1

        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs and not batch.preempted:
            seq = self.waiting[0]
            # Prompt log-probabilities need every prompt position computed.
            wants_whole_prompt = seq.params.prompt_logprobs is not None
            prefix = [] if wants_whole_prompt else self.block_manager.lookup(seq.token_ids, seq.cache_salt)
            in_use = sum(1 for entry in prefix if self.block_manager.ref_counts[entry.block])
            if self.block_manager.blocks_for(seq.num_tokens) - in_use > self.block_manager.num_free_blocks:
                break
            self.waiting.popleft()
            self.running.append(seq)
            seq.status = SequenceStatus.RUNNING
            seq.num_computed_tokens = self.block_manager.allocate(seq.seq_id, prefix)
            if seq.metrics.first_scheduled_time is None:
                seq.metrics.first_scheduled_time = time.perf_counter()
                seq.num_cached_tokens = seq.num_computed_tokens
            num_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget)
            grown = self.block_manager.grow(seq.seq_id, seq.num_computed_tokens + num_tokens)
            assert grown, "admission counted the blocks"
            self._schedule(batch, seq, num_tokens)
            budget -= num_tokens

        # Decodes first, longest first (attention pads neighbours to one length), then chunks in their order.
        batch.sequences.sort(key=lambda s: (1, 0) if s.num_tokens > 1 else (0, -s.start))
        batch.new_blocks = self.block_manager.take_new_blocks()
        return batch

    def update(self, batch: Batch, sampled: list[SampledToken]) -> None:
        """Take in one step's results: `sampled` has one token for each sequence of the batch that samples, in order."""
        tokens = iter(sampled)
        now = time.perf_counter()
        for scheduled in batch.sequences:
            seq = scheduled.seq
            token = next(tokens) if scheduled.samples else None
            if seq.finished:  # aborted while the step ran
                continue
            seq.num_computed_tokens = scheduled.start + scheduled.num_tokens
            self.block_manager.register(seq.seq_id, seq.token_ids, seq.num_computed_tokens, seq.cache_salt)
            if token is not None:
                seq.append(token)
                seq.metrics.token_times.append(now)
                if ending := seq.stop_by_last_token():
                    self.finish(seq, *ending)

    def finish(self, seq: Sequence, finish_reason: str, stop_reason: int | str | None = None) -> None:
        """End a waiting or running sequence and give back its blocks."""
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
            self.block_manager.free(seq.seq_id)
        else:
            self.waiting.remove(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason, seq.stop_reason = finish_reason, stop_reason
        seq.metrics.finished_time = time.perf_counter()

    def _schedule(self, batch: Batch, seq: Sequence, num_tokens: int) -> None:
        start = seq.num_computed_tokens
        table = self.block_manager.block_tables[seq.seq_id]
        batch.sequences.append(ScheduledSequence(seq, start, num_tokens, table, start + num_tokens == seq.num_tokens))

    def _preempt(self, seq: Sequence) -> None:
        self.block_manager.free(seq.seq_id)
        seq.status = SequenceStatus.WAITING
        seq.num_computed_tokens = 0
        seq.metrics.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(seq)
