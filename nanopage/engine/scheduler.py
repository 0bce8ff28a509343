"""Scheduler: which sequences run in the next step, how many tokens of each, and what moves in memory first.

Requests are sequence groups in three queues (see queues.py). Each step is one mixed batch under one token budget:
decodes and chunks of prompts together (Orca, OSDI 2022; chunked prefill: Sarathi-Serve, OSDI 2024).

  1. If the first waiting group has a higher priority than some running groups, preempt just enough of those, latest
     first. If even all of them would not free enough blocks, preempt none.
  2. Running groups come first, in order: one token for a decode, a chunk for an unfinished prompt. When blocks run
     out, preempt the last running group, whole.
  3. Then, unless blocks ran out, admit swapped and waiting groups in order, as long as they fit (see admission.py). If
     this step already computes a block that a waiting prompt needs, the prompt waits for it, and then finds it in the
     prefix cache. Everything behind it waits, too.
  4. Decodes may get drafts, out of the tokens and the blocks that are left (see speculation/drafts.py).

A running group whose sequences have masks (see `TokenMask`) waits for its tokens in flight: masks depend on them. A
group also waits if it would exceed `max_num_seqs`, when the budget is used up, behind an earlier group that does not
fit, and after a preemption until its tokens in flight have arrived. No group is swapped in during a step that swaps
another one out.

Progress is certain. No group can outgrow the pool (the engine refuses such requests), so the first in order can always
run by preempting the others. Without `arrange`, no group is admitted before an older one of its priority. A group of a
lower priority waits for as long as groups of a higher priority keep coming. The output does not depend on any of this,
except for near-ties in dtypes smaller than float64 without `batch_invariant`; the fuzz suite tests that.

The plain case is here. The others are in files that are called from here: preemption.py (also for groups that may have
caused an exception), forks.py (several sequences of a prompt, and beams) and stages.py (groups that sit a step out).

For a first reading, assume that each group has one sequence, its leader. There is nothing to fork, so `forked` is true.
"""

import time
from bisect import insort
from collections.abc import Callable

from nanopage.engine.admission import Admission
from nanopage.engine.attached import AdapterSlots, Drafts
from nanopage.engine.block_manager import BlockManager, Prefix
from nanopage.engine.forks import advance_searches, fork_siblings
from nanopage.engine.preemption import acquit, preempt, preempt_for_priority, run_only, swap_in
from nanopage.engine.queues import Queues, order
from nanopage.engine.schedule import BatchWriter, Schedule, Wait, missing_blocks, next_work
from nanopage.engine.sequence import Sequence, SequenceGroup, Status, common_length
from nanopage.engine.stages import find_held
from nanopage.engine.token_budget import TokenBudget
from nanopage.outputs import RequestEvent
from nanopage.step import NO_TOKEN, BatchResult


class Scheduler:
    """Continuous batching over a `BlockManager`.

    Args:
        block_manager: its pool must hold the largest group that is ever added.
        max_num_seqs: most sequences running at once.
        max_num_batched_tokens: most tokens in one step.
        preemption_mode: "recompute", "swap" or None (see preemption.py).
        num_stages: of pipeline parallelism. If there are several, a sequence in flight does not run again before its
            token has arrived, and a batch has at most its share of the running groups, so that each stage has work.
        sends_tokens: whether batches carry all sampled tokens (see `Batch.tokens`).
        adapter_slots: of the workers, if requests may have adapters.

    Attributes:
        token_budget: decides how many tokens each step may have; at first, `max_num_batched_tokens`.
        drafts: guesses at the next tokens of decodes, or None. They need the results of each step before the next step
            is scheduled.
        arrange: for a model whose prompts are not divided among steps: puts the waiting groups in order before each
            step. The budget of the step is then no less than the longest prompt (see pooling/requests.py). None:
            prompts are divided, and groups keep their order.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        preemption_mode: str | None = None,
        num_stages: int = 1,
        sends_tokens: bool = False,
        adapter_slots: AdapterSlots | None = None,
    ):
        self.block_manager, self.num_stages, self.adapter_slots = block_manager, num_stages, adapter_slots
        self.token_budget = TokenBudget(max_num_batched_tokens)  # build.py may replace it (`choose_budget`)
        self.preemption_mode = preemption_mode
        self.admission = Admission(block_manager, max_num_seqs, max_num_batched_tokens, adapter_slots)
        self.writer = BatchWriter(block_manager, max_num_seqs, sends_tokens)
        self.queues = Queues(block_manager, self.writer)
        self.drafts: Drafts | None = None
        self.arrange: Callable[[list[SequenceGroup]], None] | None = None

    def add(self, group: SequenceGroup) -> None:
        self.queues.number(group)
        insort(self.queues.waiting, group, key=order)
        self.queues.record("added", group, tokens=group.seqs[0].num_prompt_tokens)

    @property
    def waiting(self) -> list[SequenceGroup]:
        return self.queues.waiting

    @property
    def running(self) -> list[SequenceGroup]:
        return self.queues.running

    @property
    def swapped(self) -> list[SequenceGroup]:
        return self.queues.swapped

    def has_unfinished(self) -> bool:
        return bool(self.queues)

    def take_events(self) -> list[RequestEvent]:
        """What has happened to requests since the last call, in order."""
        events, self.queues.events = self.queues.events, []
        return events

    def schedule(self) -> Schedule:
        """Choose the next step's work and give it blocks. Computes nothing."""
        if self.arrange is not None:
            self.arrange(self.queues.waiting)
        budget = self.token_budget.tokens
        schedule = Schedule(budget=budget, left=budget)
        if self.queues.suspects:
            self._run_alone(self.queues.suspects[0], schedule)
        else:
            preempt_for_priority(self.queues, self.admission, schedule, self.preemption_mode)
            if self._continue(schedule):
                self._admit(schedule)
            else:
                schedule.wait = Wait(self.queues.first(), "preemption")
        if self.drafts is None:
            self.writer.write(schedule)
        else:
            self.drafts.write(self.queues, schedule, self.admission.max_num_seqs)
        schedule.batch.copies = self.block_manager.take_copies()
        if evicted := self.block_manager.prefixes.take_evicted():
            schedule.tell("evicted", evicted)
        return schedule

    def advance(self, schedule: Schedule) -> None:
        """Count the tokens of a batch as computed once it is submitted: later batches run after it. Register full
        blocks in the prefix cache, give back those behind a window, fork, and count a token in flight for each
        sequence that samples.

        Call `update` for the previous batch first: a block's hash needs its token ids, and the last one may come from
        the previous batch.
        """
        batch, manager = schedule.batch, self.block_manager
        for seq, start, count in zip(schedule.sequences, batch.starts, batch.counts, strict=True):
            if seq.finish_reason is not None:  # by the results of the previous batch
                continue
            end = start + count if count == 1 else min(start + count, seq.num_tokens)  # `accept` counts drafts
            seq.num_computed_tokens = end
            if end % manager.block_size == 0 or count > 1:
                manager.register(seq.seq_id, seq.keys, end, seq.cache_salt)
                manager.slide(seq.seq_id, end, seq.group.marks)
            if not seq.group.forked and end == seq.group.shared_len:
                fork_siblings(self.queues, seq)
                schedule.tell("forked", seq)
        for seq in schedule.samplers:
            if seq.finish_reason is None and seq.group.beam_search is None:
                seq.num_in_flight += 1
        for seq, _ in schedule.drafted:
            seq.num_in_flight = 1

    def update(self, schedule: Schedule, result: BatchResult) -> list[Sequence]:
        """Take in the results of a step. Returns the sequences that took their tokens.

        The token of a sequence that has ended since the batch was scheduled is dropped. A group for which no token
        could be sampled ends with an error.
        """
        taken, now = [], time.perf_counter()
        schedule.take_prompt_outputs(result)
        if self.adapter_slots is not None:
            self.adapter_slots.fail(self.queues, schedule, result.failed_loads)
        for i, (seq, token_id) in enumerate(zip(schedule.samplers, result.token_ids, strict=not schedule.drafted)):
            if self._drops(schedule, seq, token_id):
                continue
            taken.append(seq)
            seq.group.metrics.count_step(now)
            if ending := seq.take(token_id, result.logprobs.get(i)):
                self.queues.finish(seq.group, seq, *ending)
        if self.drafts is not None:
            taken += self.drafts.accept(self.queues, schedule, result, now)
        advance_searches(self.queues, schedule, taken)
        acquit(self.queues, schedule)
        return taken

    def _drops(self, schedule: Schedule, seq: Sequence, token_id: int) -> bool:
        """Whether a sequence takes no token, because it has ended or its group now ends with an error."""
        if seq.finish_reason is not None:
            schedule.tell("dropped", seq)
        elif seq in schedule.mask_errors:
            self.queues.fail(seq.group, schedule.mask_errors[seq])
        elif token_id == NO_TOKEN:
            self.queues.fail_not_finite(seq.group)
        else:
            return False
        return True

    def _continue(self, schedule: Schedule) -> bool:
        """Schedule running groups, in order. Returns False if blocks ran out."""
        queues, manager, index = self.queues, self.block_manager, 0
        held, enough = find_held(queues.running, self.num_stages), True
        while index < len(queues.running) and schedule.left > 0:
            group = queues.running[index]
            if group in held:
                schedule.tell("held", group, held[group])
            elif self.writer.take_decode(schedule, group):
                pass  # the common case: one token, no new block
            else:
                work = next_work(group, schedule.left)
                # The victims are at the end of the list, so none of them is in the batch yet.
                while (needed := missing_blocks(manager, work)) > manager.num_free_blocks:
                    enough, victim = False, queues.running.pop()
                    why = {"cause": group.request_id, "needed": needed, "free": manager.num_free_blocks}
                    preempt(queues, victim, schedule, self.preemption_mode, reason="blocks", **why)
                    if victim is group:
                        return False
                self.writer.take(schedule, work)
            index += 1
        return enough

    def _admit(self, schedule: Schedule) -> None:
        """Let swapped and waiting groups run, in order, as long as they fit."""
        queues, manager, admission = self.queues, self.block_manager, self.admission
        if not (queues.swapped or queues.waiting):
            return
        num_running = sum(group.num_unfinished for group in queues.running)
        reserved = sum(map(admission.blocks_reserved, queues.running)) if schedule.left > 0 else 0
        while queues.swapped or queues.waiting:
            group = queues.first()
            if schedule.left < (group.shared_len if self.arrange is not None else 1):
                whole = group.shared_len if schedule.left > 0 else 0
                schedule.wait = Wait(group, "budget", whole, schedule.left)
                return
            swapped = group.status is Status.SWAPPED
            prefix = [] if swapped else admission.find_prefix(group)
            schedule.wait = admission.find_wait(group, prefix, schedule, queues.running, num_running, reserved)
            if schedule.wait is not None:
                return
            queues.of(group).pop(0)
            if self.adapter_slots is not None:
                self.adapter_slots.take(group, queues.running, schedule)
            if swapped:
                swap_in(queues, group, schedule)
            else:
                self._start(group, prefix, schedule)
            insort(queues.running, group, key=order)
            work = next_work(group, schedule.left)
            if missing_blocks(manager, work) > manager.num_free_blocks:
                # A swapped group has taken the last blocks: it runs in the next step.
                if queues.swapped or queues.waiting:
                    schedule.wait = Wait(queues.first(), "turn", other=group)
                return
            self.writer.take(schedule, work)
            num_running += group.num_unfinished
            reserved += admission.blocks_reserved(group)

    def _start(self, group: SequenceGroup, prefix: list[Prefix], schedule: Schedule) -> None:
        """Start a waiting group: give its leader a block table with the cached prefix."""
        live, manager = group.live, self.block_manager
        group.status, group.forked, group.shared_len = Status.RUNNING, len(live) == 1, common_length(live)
        leader = live[0]
        if manager.num_states:
            known = leader.keys[: group.shared_len]
            group.marks = manager.prefixes.marks(known, leader.cache_salt, leader.block_hashes)
        needed, free = self.admission.blocks_wanted(group), manager.num_free_blocks
        cached = manager.allocate(leader.seq_id, prefix, group.shared_len)
        leader.num_computed_tokens = max([cached, *(item.length for item in group.items if item.given)])
        schedule.num_cached_tokens += cached
        if group.metrics.first_scheduled_time is None:
            group.metrics.first_scheduled_time = time.perf_counter()
            group.num_cached_tokens = cached
        self.queues.record(
            "started", group, needed=needed - len(prefix), free=free, tokens=group.shared_len, cached_tokens=cached
        )

    def _run_alone(self, group: SequenceGroup, schedule: Schedule) -> None:
        """Run one group that may have caused an exception (see preemption.py)."""
        if group.status is Status.WAITING:
            run_only(self.queues, group)
            if self.adapter_slots is not None:
                self.adapter_slots.take(group, self.queues.running, schedule)
            self._start(group, self.admission.find_prefix(group), schedule)
        if self.queues.swapped or self.queues.waiting:
            schedule.wait = Wait(self.queues.first(), "alone", other=group)
        self.writer.take(schedule, next_work(group, schedule.left))
