"""Scheduler: which sequences run in the next step, how many tokens of each, and what moves in memory first.

Requests are sequence groups in three queues (see queues.py). Each step is one mixed batch under one token budget:
decodes and chunks of prompts together (Orca, OSDI 2022; chunked prefill: Sarathi-Serve, OSDI 2024).

  1. If the first waiting group has a higher priority than some running groups, preempt just enough of those, latest
     first. If even all of them would not free enough blocks, preempt none.
  2. Running groups come first, in order: one token for a decode, a chunk for an unfinished prompt. When blocks run
     out, preempt the last running group, whole.
  3. Then, unless blocks ran out, admit swapped and waiting groups in order, as long as they fit (see admission.py). A
     prompt whose next block another group computes in this step waits until it can share that block. Everything behind
     it waits too.
  4. Decodes may get drafts, out of the tokens and the blocks that are left (see drafts.py).

A running group whose sequences have masks (see `TokenMask`) waits for its tokens in flight, on which they depend. A
group also waits if it would exceed `max_num_seqs`, when the budget is used up, behind an earlier group that does not
fit, and after a preemption until its tokens in flight have arrived. No group is swapped in during a step that swaps
another one out.

Progress is certain. No group can outgrow the pool (the engine refuses such requests), so the first in order can always
run by preempting the others. Within one priority, no group is admitted before an older one. A group of a lower priority
waits for as long as groups of a higher priority keep coming. The output does not depend on any of this, but for
near-ties in dtypes smaller than float64; the fuzz suite tests that.

Everything beside the plain case is in a file of its own, called in one line: preemption.py, forks.py (several sequences
of a prompt, and beams), recovery.py (after an exception) and drafts.py.

For a first reading, assume one sequence per group: then `forked` is always true and the only sequence is the leader.
"""

import time
from bisect import insort

from nanopage.adapters.slots import AdapterSlots
from nanopage.engine.admission import Admission
from nanopage.engine.block_manager import BlockManager, Prefix
from nanopage.engine.forks import advance_beams, fork_siblings
from nanopage.engine.preemption import preempt, preempt_for_priority
from nanopage.engine.queues import Queues, order
from nanopage.engine.recovery import isolate
from nanopage.engine.schedule import BatchWriter, Schedule, Wait, Work, missing_blocks, next_work
from nanopage.engine.sequence import Sequence, SequenceGroup, Status, common_length
from nanopage.outputs import RequestEvent
from nanopage.speculation import drafts
from nanopage.step import NO_TOKEN, BatchResult

NOT_FINITE = (
    "the logits of its next token are not finite: weights that are NaN or infinite, an overflow in float16, or "
    "constraints that forbid every token"
)


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
        drafter: guesses the next tokens of decodes (see drafts.py). It needs the results of each step before the next
            step is scheduled.
        num_adapter_slots: how many adapters the workers can hold.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        preemption_mode: str | None = None,
        num_stages: int = 1,
        sends_tokens: bool = False,
        drafter: drafts.Drafter | None = None,
        num_adapter_slots: int = 0,
    ):
        self.block_manager, self.num_stages, self.drafter = block_manager, num_stages, drafter
        self.max_num_batched_tokens = max_num_batched_tokens
        self.preemption_mode = preemption_mode
        self.adapter_slots = AdapterSlots(num_adapter_slots)
        self.admission = Admission(block_manager, max_num_seqs, self.adapter_slots, max_num_batched_tokens)
        self.writer = BatchWriter(block_manager, max_num_seqs, sends_tokens)
        self.queues = Queues(block_manager, self.writer, self.adapter_slots)

    def add(self, group: SequenceGroup) -> None:
        self.queues.number(group)
        insort(self.queues.waiting, group, key=order)
        self.queues.record_added(group)

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
        schedule = Schedule(budget=self.max_num_batched_tokens)
        schedule.batch.idle = not self._has_begun()
        if self.queues.suspects:
            self._schedule_alone(self.queues.suspects[0], schedule)
        else:
            self._schedule_together(schedule)
        drafted = self._choose_drafts(schedule)
        if drafted:
            drafts.take_out(schedule, drafted)
        for seq, num_tokens in schedule.chunks:
            self.writer.add(schedule, seq, num_tokens)
        if drafted:
            drafts.add(self.writer, schedule, drafted)
        schedule.batch.copies = self.block_manager.take_copies()
        schedule.evicted = self.block_manager.prefixes.take_evicted()
        schedule.batch.awaits_masks = bool(schedule.masked)
        return schedule

    def advance(self, schedule: Schedule) -> None:
        """Treat a submitted batch as done: anything submitted later runs after it. Register full blocks in the prefix
        cache, give back those behind a window, fork, and count a token in flight for each sequence that samples.

        Call `update` for the previous batch first: a block's hash needs its token ids, and the last one may come from
        the previous batch.
        """
        batch, manager = schedule.batch, self.block_manager
        for seq, start, count in zip(schedule.sequences, batch.starts, batch.counts, strict=True):
            if seq.finish_reason is not None:  # by the results of the previous batch
                continue
            end = start + count if count == 1 else min(start + count, seq.num_tokens)  # drafts count when accepted
            seq.num_computed_tokens = end
            if end % manager.block_size == 0 or count > 1:
                manager.register(seq.seq_id, seq.token_ids, end, seq.cache_salt)
                manager.slide(seq.seq_id, end)
            if not seq.group.forked and end == seq.group.shared_len:
                fork_siblings(self.queues, seq)
                schedule.forked.append(seq)
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
        taken = []
        now = time.perf_counter()
        for prompt in result.prompt_logprobs:
            group = schedule.sequences[schedule.batch.rows.index(prompt.row)].group
            if not group.finished:
                known = len(group.prompt_logprobs) - (prompt.start - 1)  # above 0 after a preemption
                group.prompt_logprobs += prompt.tables[known:]
        for pooled in result.pooled:
            schedule.sequences[schedule.batch.rows.index(pooled.row)].group.add_pooled(pooled.start, pooled.values)
        for index, cause in result.failed_loads.items():
            self.queues.fail_adapter(schedule.loading[index], schedule.batch.loads[index].slot, cause)
        logprobs, num_samplers = result.logprobs, len(schedule.samplers)
        token_ids = result.token_ids[:num_samplers] if schedule.drafted else result.token_ids
        for i, (seq, token_id) in enumerate(zip(schedule.samplers, token_ids, strict=True)):
            if seq.finish_reason is not None:
                schedule.dropped.append(seq)
                continue
            group = seq.group
            if token_id == NO_TOKEN or seq in schedule.mask_errors:
                if seq not in schedule.mask_errors:
                    self.queues.forget_prefixes(group)
                self.queues.fail(group, schedule.mask_errors.get(seq, NOT_FINITE))
                continue
            taken.append(seq)
            times = group.metrics.token_times
            if not times or times[-1] != now:
                times.append(now)
            if group.beam_search is not None:
                seq.candidates = {candidate: logprob for candidate, (logprob, _) in logprobs[i].items()}
                continue
            seq.append(token_id, logprobs.get(i) if logprobs else None)
            if ending := seq.find_ending():
                self.queues.finish(group, seq, *ending)
        if schedule.drafted:
            assert self.drafter is not None
            taken += drafts.accept(self.queues, self.drafter, schedule, result, now)
        if any(seq.candidates for seq in taken):
            for group in schedule.groups:
                if group.beam_search is not None and not group.finished and all(seq.candidates for seq in group.live):
                    advance_beams(self.queues, group, schedule)
        for group in schedule.groups if self.queues.suspects else ():
            if group in self.queues.suspects:
                self.queues.suspects.remove(group)
        return taken

    # What runs

    def _schedule_together(self, schedule: Schedule) -> None:
        queues = self.queues
        preempt_for_priority(queues, self.admission, schedule, self.preemption_mode)
        budget = self.max_num_batched_tokens
        num_preempted = len(schedule.preempted)
        index = 0
        share = -(-len(queues.running) // self.num_stages)
        while index < len(queues.running) and budget > 0:
            group = queues.running[index]
            if reason := "share" if self.num_stages > 1 and share == 0 else self._waits_for_tokens(group):
                schedule.skipped.append((group, reason))
                index += 1
                continue
            share -= 1
            if self.writer.add_decode(schedule, group):
                budget -= 1
                index += 1
                continue
            work = next_work(group, budget)
            # The victims are at the end of the list, so none of them is in the batch yet.
            while (needed := missing_blocks(self.block_manager, work)) > self.block_manager.num_free_blocks:
                victim = queues.running.pop()
                self._preempt(victim, schedule, group, needed)
                if victim is group:
                    break
            else:
                budget -= self._add_work(schedule, work)
                index += 1
        if len(schedule.preempted) == num_preempted:
            self._admit(schedule, budget)
        else:
            schedule.wait = Wait(queues.first(), "preemption")

    def _waits_for_tokens(self, group: SequenceGroup) -> str | None:
        """Why the next step of a running group depends on tokens that are in flight, if it does (see
        `Schedule.skipped`)."""
        if not (self.num_stages > 1 or group.masked) or not any(seq.num_in_flight for seq in group.live):
            return None
        return "stage" if self.num_stages > 1 else "mask"

    def _add_work(self, schedule: Schedule, work: Work) -> int:
        """Schedule work whose blocks are known to be free. Returns the number of tokens."""
        for seq, num_tokens in work:
            self.writer.grow(schedule.batch, seq, num_tokens)
            if num_tokens > 1:
                schedule.chunks.append((seq, num_tokens))
            else:
                self.writer.add(schedule, seq, num_tokens)
        return sum(num_tokens for _, num_tokens in work)

    # Admission

    def _admit(self, schedule: Schedule, budget: int) -> None:
        queues = self.queues
        if not (queues.swapped or queues.waiting):
            return
        reserved = sum(map(self.admission.blocks_reserved, queues.running)) if budget > 0 else 0
        while queues.swapped or queues.waiting:
            group = queues.first()
            if budget <= 0:
                schedule.wait = Wait(group, "budget")
                return
            swapped = group.status is Status.SWAPPED
            prefix = [] if swapped else self.admission.find_prefix(group)
            schedule.wait = self._find_wait(group, prefix, schedule, reserved)
            if schedule.wait is not None:
                return
            queues.of(group).pop(0)
            self._take_slot(group, schedule)
            if swapped:
                free = self.block_manager.num_free_blocks
                moved = self.block_manager.swap_in([seq.seq_id for seq in group.live])
                schedule.batch.swap_in += moved
                queues.record("swapped in", group, needed=len(moved), free=free)
            else:
                self._start(group, prefix, schedule)
            insort(queues.running, group, key=order)
            group.status = Status.RUNNING
            work = next_work(group, budget)
            if missing_blocks(self.block_manager, work) > self.block_manager.num_free_blocks:
                # A swapped group has taken the last blocks: it runs in the next step.
                if queues.swapped or queues.waiting:
                    schedule.wait = Wait(queues.first(), "turn", other=group)
                return
            budget -= self._add_work(schedule, work)
            reserved += self.admission.blocks_reserved(group)

    def _find_wait(self, group: SequenceGroup, prefix: list[Prefix], schedule: Schedule, reserved: int) -> Wait | None:
        """Why the first group of the queues cannot be admitted in this step, if it cannot."""
        if group.status is Status.SWAPPED:
            if schedule.batch.swap_out:  # blocks that this step swaps out cannot come back in the same step
                return Wait(group, "swap")
        elif computing := self.admission.find_computing(group, prefix, schedule.chunks):
            return Wait(group, "prefix", other=computing)
        elif any(seq.num_in_flight for seq in group.live):  # it has just been preempted
            return Wait(group, "tokens")
        return self.admission.find_lack(group, prefix, self.queues.running, reserved)

    def _start(self, group: SequenceGroup, prefix: list[Prefix], schedule: Schedule) -> None:
        """Start a waiting group: give its leader a block table with the cached prefix."""
        live = group.live
        group.forked = len(live) == 1
        group.shared_len = common_length(live)
        leader, manager = live[0], self.block_manager
        needed, free = self.admission.blocks_wanted(group), manager.num_free_blocks
        leader.num_computed_tokens = cached = manager.allocate(leader.seq_id, prefix, group.shared_len)
        schedule.num_cached_tokens += leader.num_computed_tokens
        if group.metrics.first_scheduled_time is None:
            group.metrics.first_scheduled_time = time.perf_counter()
            group.num_cached_tokens = leader.num_computed_tokens
        self.queues.record(
            "started", group, needed=needed - len(prefix), free=free, tokens=group.shared_len, cached_tokens=cached
        )

    def _take_slot(self, group: SequenceGroup, schedule: Schedule) -> None:
        """Give a group that is about to run a slot for its adapter, if it has one."""
        if group.adapter is not None:
            others = [other for other in self.queues.running if other is not group]
            group.adapter_slot, loads = self.adapter_slots.take(group.adapter, others)
            schedule.batch.loads += loads
            schedule.loading += [group.adapter] * len(loads)

    # Beside the plain case

    def _choose_drafts(self, schedule: Schedule) -> drafts.Drafts:
        if self.drafter is None or self.queues.suspects or schedule.preempted:
            return {}
        return drafts.choose_drafts(self.block_manager, self.drafter, schedule, self.admission.max_num_seqs)

    def _preempt(self, victim: SequenceGroup, schedule: Schedule, cause: SequenceGroup, needed: int) -> None:
        why = {"cause": cause.request_id, "needed": needed, "free": self.block_manager.num_free_blocks}
        preempt(self.queues, victim, schedule, self.preemption_mode, reason="blocks", **why)

    def _schedule_alone(self, group: SequenceGroup, schedule: Schedule) -> None:
        """Run one group that may have caused an exception."""
        if group.status is Status.WAITING:
            isolate(self.queues, group)
            self._take_slot(group, schedule)
            self._start(group, self.admission.find_prefix(group), schedule)
        if self.queues.swapped or self.queues.waiting:
            schedule.wait = Wait(self.queues.first(), "alone", other=group)
        self._add_work(schedule, next_work(group, self.max_num_batched_tokens))

    def _has_begun(self) -> bool:
        """Whether any request has begun. Preempted requests are waiting again, with the tokens that they have."""
        queues = self.queues
        return bool(queues.running or queues.swapped) or any(
            seq.num_output_tokens for group in queues.waiting for seq in group.seqs
        )
