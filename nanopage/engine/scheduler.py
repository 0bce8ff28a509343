"""Scheduler: which sequences run in the next step, how many tokens of each, and what moves in memory first.

Requests are sequence groups in three queues, each ordered by (priority, arrival). `waiting` groups have no blocks,
`running` groups have blocks, `swapped` groups have theirs in host memory. Each step is one mixed batch under one token
budget: decodes and chunks of prompts together (Orca, OSDI 2022; chunked prefill: Sarathi-Serve, OSDI 2024).

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

Preemption (PagedAttention, SOSP 2023, section 4.5) is by recomputation or by swapping. Recomputation gives up the
blocks and computes their tokens again, except those that are still in the prefix cache. A group of several sequences
takes from the cache only what all of them have in common; a request with prompt_logprobs, or whose hidden states are
averaged, takes nothing. Swapping keeps the blocks in host memory. By default, a group with one live sequence is
recomputed. A group with several is swapped, because recomputation would have to rebuild what they share. When host
memory is full, any group is recomputed.

Progress is certain. No group can outgrow the pool (the engine refuses such requests), so the first in order can always
run by preempting the others. Within one priority, no group is admitted before an older one. A group of a lower priority
waits for as long as groups of a higher priority keep coming. The output does not depend on any of this, but for
near-ties in dtypes smaller than float64; the fuzz suite tests that.

After an exception, `restart` puts every request back into `waiting`. Groups that may have caused it become `suspects`,
which run one at a time, so that the next failure has one group to blame.

For a first reading, `schedule` and what it calls, `advance` and `update` are enough. Assume one sequence per group:
then `forked` is always true and the only sequence is the leader.
"""

import time
from bisect import insort
from typing import Any

from nanopage.adapters.slots import AdapterSlots
from nanopage.engine.admission import Admission
from nanopage.engine.block_manager import BlockManager, Prefix
from nanopage.engine.schedule import BatchWriter, Schedule, Wait, Work, missing_blocks, next_work
from nanopage.engine.sequence import Adapter, Sequence, SequenceGroup, Status, common_length
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
        preemption_mode: "recompute", "swap" or None, the rule above.
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
        self.suspects: list[SequenceGroup] = []  # run one at a time, each until it gets a token
        self.waiting: list[SequenceGroup] = []
        self.running: list[SequenceGroup] = []
        self.swapped: list[SequenceGroup] = []
        self.num_preemptions = 0
        self.events: list[RequestEvent] = []  # since `take_events`
        self._num_added = 0

    def add(self, group: SequenceGroup) -> None:
        self._number(group)
        insort(self.waiting, group, key=_order)
        self._record_added(group)

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running or self.swapped)

    def take_events(self) -> list[RequestEvent]:
        """What has happened to requests since the last call, in order."""
        events, self.events = self.events, []
        return events

    def schedule(self) -> Schedule:
        """Choose the next step's work and give it blocks. Computes nothing."""
        schedule = Schedule(budget=self.max_num_batched_tokens)
        schedule.batch.idle = not self._has_begun()
        if self.suspects:
            self._schedule_alone(self.suspects[0], schedule)
        else:
            self._schedule_together(schedule)
        drafted = drafts.choose_drafts(self, schedule) if self.drafter is not None else None
        if drafted:
            drafts.take_out(schedule, drafted)
        for seq, num_tokens in schedule.chunks:
            self.writer.add(schedule, seq, num_tokens)
        if drafted:
            drafts.add(self, schedule, drafted)
        schedule.batch.copies = self.block_manager.take_copies()
        schedule.evicted = self.block_manager.take_evicted()
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
                self._fork_siblings(seq)
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
            self._fail_adapter(schedule.loading[index], schedule.batch.loads[index].slot, cause)
        logprobs, num_samplers = result.logprobs, len(schedule.samplers)
        token_ids = result.token_ids[:num_samplers] if schedule.drafted else result.token_ids
        for i, (seq, token_id) in enumerate(zip(schedule.samplers, token_ids, strict=True)):
            if seq.finish_reason is not None:
                schedule.dropped.append(seq)
                continue
            group = seq.group
            if token_id == NO_TOKEN or seq in schedule.mask_errors:
                if seq not in schedule.mask_errors:
                    self._forget_prefixes(group)
                self.fail(group, schedule.mask_errors.get(seq, NOT_FINITE))
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
                self.finish(group, seq, *ending)
        if schedule.drafted:
            taken += drafts.accept(self, schedule, result, now)
        if any(seq.candidates for seq in taken):
            for group in schedule.groups:
                if group.beam_search is not None and not group.finished and all(seq.candidates for seq in group.live):
                    self._advance_beams(group, schedule)
        for group in schedule.groups if self.suspects else ():
            if group in self.suspects:
                self.suspects.remove(group)
        return taken

    # What runs

    def _schedule_together(self, schedule: Schedule) -> None:
        self._preempt_for_priority(schedule)
        budget = self.max_num_batched_tokens
        num_preempted = len(schedule.preempted)
        index = 0
        share = -(-len(self.running) // self.num_stages)
        while index < len(self.running) and budget > 0:
            group = self.running[index]
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
                victim = self.running.pop()
                self._preempt(victim, schedule, "blocks", group, needed)
                if victim is group:
                    break
            else:
                budget -= self._add_work(schedule, work)
                index += 1
        if len(schedule.preempted) == num_preempted:
            self._admit(schedule, budget)
        else:
            schedule.wait = Wait(self._first_queued(), "preemption")

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
        if not (self.swapped or self.waiting):
            return
        reserved = sum(map(self.admission.blocks_reserved, self.running)) if budget > 0 else 0
        while self.swapped or self.waiting:
            group = self._first_queued()
            if budget <= 0:
                schedule.wait = Wait(group, "budget")
                return
            swapped = group.status is Status.SWAPPED
            prefix = [] if swapped else self.admission.find_prefix(group)
            schedule.wait = self._find_wait(group, prefix, schedule, reserved)
            if schedule.wait is not None:
                return
            self._queue(group).pop(0)
            self._take_slot(group, schedule)
            if swapped:
                free = self.block_manager.num_free_blocks
                moved = self.block_manager.swap_in([seq.seq_id for seq in group.live])
                schedule.batch.swap_in += moved
                self._record("swapped in", group, needed=len(moved), free=free)
            else:
                self._start(group, prefix, schedule)
            insort(self.running, group, key=_order)
            group.status = Status.RUNNING
            work = next_work(group, budget)
            if missing_blocks(self.block_manager, work) > self.block_manager.num_free_blocks:
                # A swapped group has taken the last blocks: it runs in the next step.
                if self.swapped or self.waiting:
                    schedule.wait = Wait(self._first_queued(), "turn", other=group)
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
        return self.admission.find_lack(group, prefix, self.running, reserved)

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
        self._record(
            "started", group, needed=needed - len(prefix), free=free, tokens=group.shared_len, cached_tokens=cached
        )

    def _take_slot(self, group: SequenceGroup, schedule: Schedule) -> None:
        """Give a group that is about to run a slot for its adapter, if it has one."""
        if group.adapter is not None:
            others = [other for other in self.running if other is not group]
            group.adapter_slot, loads = self.adapter_slots.take(group.adapter, others)
            schedule.batch.loads += loads
            schedule.loading += [group.adapter] * len(loads)

    # Preemption

    def _preempt_for_priority(self, schedule: Schedule) -> None:
        """Preempt groups of lower priority than the first waiting group, if that admits it now."""
        if not self.waiting or (self.swapped and _order(self.swapped[0]) < _order(self.waiting[0])):
            return
        first = self.waiting[0]
        victims = self.admission.choose_victims(first, self.running, self.max_num_batched_tokens)
        if not victims:
            return
        reserved = sum(map(self.admission.blocks_reserved, self.running))
        lack = self.admission.find_lack(first, self.admission.find_prefix(first), self.running, reserved)
        assert lack is not None
        for victim in victims:
            self.running.pop()
            self._preempt(victim, schedule, f"priority, {lack.reason}", first, lack.needed, lack.free)

    def _preempt(
        self,
        group: SequenceGroup,
        schedule: Schedule,
        reason: str,
        cause: SequenceGroup,
        needed: int,
        free: int | None = None,
    ) -> None:
        """Take the blocks of a group that is no longer in `running`.

        Args: reason, cause, needed, free: as in RequestEvent; `free` is the number of free blocks by default.
        """
        free = self.block_manager.num_free_blocks if free is None else free
        why = {"reason": reason, "cause": cause.request_id, "needed": needed, "free": free}
        live = group.live
        ids = [seq.seq_id for seq in live]
        mode = self.preemption_mode or ("recompute" if len(live) == 1 else "swap")
        moved = self.block_manager.swap_out(ids) if mode == "swap" else None
        if moved is not None:
            schedule.batch.swap_out += moved
            group.status = Status.SWAPPED
            for seq in live:
                self.writer.leave(seq)
            insort(self.swapped, group, key=_order)
            self._record("swapped out", group, **why)
        else:
            self._give_up_blocks(group, **why, host_full=mode == "swap")
            insort(self.waiting, group, key=_order)
        group.metrics.num_preemptions += 1
        self.num_preemptions += 1
        schedule.preempted.append(group)

    def recompute(self, group: SequenceGroup) -> None:
        """Put a running group back into `waiting`, to compute its tokens again."""
        if group.status is Status.RUNNING:
            self.running.remove(group)
            self._give_up_blocks(group, reason="draft")
            insort(self.waiting, group, key=_order)

    def _give_up_blocks(self, group: SequenceGroup, **why: Any) -> None:
        """Free the group's blocks. Its tokens will be computed again.

        Args: why: fields of the RequestEvent.
        """
        for seq in group.live:
            self.block_manager.free(seq.seq_id)
            seq.num_computed_tokens = 0
            self.writer.leave(seq)
        group.status = Status.WAITING
        self._record("preempted", group, **why)

    # Endings

    def finish(
        self, group: SequenceGroup, seq: Sequence | None, finish_reason: str, stop_reason: int | str | None = None
    ) -> None:
        """End one sequence of a group, or all of them (None), and give back the blocks."""
        for ending in [seq] if seq is not None else [s for s in group.seqs if not s.finished]:
            ending.finish_reason, ending.stop_reason = finish_reason, stop_reason
            ending.num_in_flight = 0
            if not group.forked and group.live and not ending.dormant:
                # The leader computes blocks for its siblings, too: hand them to the next live sequence (the ending one
                # is not live any more). If it was not the leader, it has no table, and `rename` does nothing.
                next_leader = group.live[0]
                if self.block_manager.rename(ending.seq_id, next_leader.seq_id):
                    next_leader.num_computed_tokens = ending.num_computed_tokens
            self.block_manager.free(ending.seq_id)
            self.writer.leave(ending)
        self._end_if_finished(group)

    def fail(self, group: SequenceGroup, error: str) -> None:
        """End a group because of an error."""
        group.error = error
        self.finish(group, None, "error")

    def _fail_adapter(self, adapter: Adapter, slot: int, cause: str) -> None:
        """End the groups that run with an adapter that could not be loaded. A later request loads it again."""
        self.adapter_slots.drop(adapter, slot)
        for group in list(self.running):
            if group.adapter == adapter:
                self._forget_prefixes(group)
                self.fail(group, f"the adapter {adapter.path} could not be loaded: {cause}")

    def _forget_prefixes(self, group: SequenceGroup) -> None:
        """K and V of a group are not finite, or perhaps not: nothing may find them in the prefix cache."""
        for seq in group.seqs:
            self.block_manager.forget(seq.token_ids, seq.cache_salt)

    def _end_if_finished(self, group: SequenceGroup) -> None:
        if group.finished or group.num_unfinished:
            return
        self._queue(group).remove(group)
        if group in self.suspects:
            self.suspects.remove(group)
        group.status = Status.FINISHED
        if group.last_event != "finished":  # `restart` ends groups again
            group.metrics.finished_time = time.perf_counter()
            self._record("finished", group, reason=group.seqs[0].finish_reason or "")

    # Groups of several sequences (skip at a first reading)

    def _fork_siblings(self, leader: Sequence) -> None:
        """The leader has computed what all sequences of its group share: let the others share its blocks."""
        leader.group.forked = True
        for seq in leader.group.live:
            if seq is not leader:
                self.block_manager.fork(leader.seq_id, seq.seq_id)
                seq.num_computed_tokens = leader.num_computed_tokens

    def _advance_beams(self, group: SequenceGroup, schedule: Schedule) -> None:
        """All beams have their candidates: fork those that continue more than once, free those that end."""
        assert group.beam_search is not None
        ending, forks = group.choose_beams()
        schedule.beam_ends += ending
        schedule.beam_forks += forks
        for seq in ending:
            self.block_manager.free(seq.seq_id)
            self.writer.leave(seq)
        for parent, seq in forks:
            self.block_manager.fork(parent.seq_id, seq.seq_id)
            seq.num_computed_tokens = parent.num_computed_tokens
            seq.parent = parent
        group.take_beams()
        if group.beam_search.finished:
            self.finish(group, None, "stop")

    # After an exception (skip at a first reading)

    def restart(self, groups: list[SequenceGroup]) -> None:
        """After an exception, start all groups again from the tokens that are known. Takes back all blocks and forgets
        all prefixes.

        Args: groups: all unfinished groups. The queues are not read: the exception may have left them inconsistent.
        """
        self.block_manager.reset()
        self.writer.reset()
        self.adapter_slots.reset()
        self.running, self.swapped = [], []
        for group in groups:
            self._number(group)
            if group.next_beams is not None:
                group.take_beams()
            for seq in group.seqs:
                seq.restart()
                if not seq.finished and (ending := self._find_ending(group, seq)):
                    seq.finish_reason, seq.stop_reason = ending
            if group.last_event is None:
                self._record_added(group)
            elif group.last_event not in ("added", "preempted", "finished"):
                self._record("preempted", group, reason="restart")
            group.status = Status.WAITING
        self.waiting = sorted(groups, key=_order)
        for group in groups:
            self._end_if_finished(group)

    def _find_ending(self, group: SequenceGroup, seq: Sequence) -> tuple[str, int | None] | None:
        """(finish_reason, stop_reason) if the tokens that are known end a sequence."""
        if group.error is not None:
            return "error", None
        if group.beam_search is not None:
            return ("stop", None) if group.beam_search.finished else None
        return seq.find_ending() if seq.num_output_tokens else None

    def _schedule_alone(self, group: SequenceGroup, schedule: Schedule) -> None:
        """Run one group. The others give up their blocks."""
        if group.status is Status.WAITING:
            for other in self.running:
                self._give_up_blocks(other, reason="alone", cause=group.request_id)
            self.waiting = sorted([*self.waiting, *self.running], key=_order)
            self.waiting.remove(group)
            self.running, group.status = [group], Status.RUNNING
            self._take_slot(group, schedule)
            self._start(group, self.admission.find_prefix(group), schedule)
        if self.swapped or self.waiting:
            schedule.wait = Wait(self._first_queued(), "alone", other=group)
        self._add_work(schedule, next_work(group, self.max_num_batched_tokens))

    # Queues and events

    def _queue(self, group: SequenceGroup) -> list[SequenceGroup]:
        return {Status.WAITING: self.waiting, Status.RUNNING: self.running, Status.SWAPPED: self.swapped}[group.status]

    def _first_queued(self) -> SequenceGroup:
        """The swapped or waiting group that is admitted next."""
        return min(self.swapped[:1] + self.waiting[:1], key=_order)

    def _has_begun(self) -> bool:
        """Whether any request has begun. Preempted requests are waiting again, with the tokens that they have."""
        return bool(self.running or self.swapped) or any(
            seq.num_output_tokens for group in self.waiting for seq in group.seqs
        )

    def _number(self, group: SequenceGroup) -> None:
        if group.order < 0:
            group.order = self._num_added
            self._num_added += 1

    def _record_added(self, group: SequenceGroup) -> None:
        self._record("added", group, tokens=group.seqs[0].num_prompt_tokens)

    def _record(self, kind: str, group: SequenceGroup, **why: Any) -> None:
        event, end = RequestEvent(kind, group.request_id, **why), len(self.events)
        # One statement of plain assignments: no signal handler can run in the middle.
        self.events[end:], group.last_event = (event,), kind


def _order(group: SequenceGroup) -> tuple[int, int]:
    return group.priority, group.order
