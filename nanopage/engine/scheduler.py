"""Scheduler: which sequences run in the next step, how many tokens of each, and what moves in memory first.

Requests are sequence groups in three queues, each ordered by (priority, arrival). `waiting` groups have no blocks,
`running` ones have, `swapped` ones have theirs in host memory. Each step is one mixed batch under one token budget:
decodes and chunks of prompts together (Orca, OSDI 2022; chunked prefill: Sarathi-Serve, OSDI 2024).

  1. If the first waiting group has a higher priority than some that run, preempt just enough of those, latest first.
     If even all of them would not free enough blocks, preempt none.
  2. Running groups come first, in order: one token for a decode, a chunk for an unfinished prompt. When blocks run
     out, preempt the last running group, whole.
  3. Then, unless blocks ran out, admit swapped and waiting groups in order, while they fit: if blocks for the whole
     of their present tokens are free, and one more for each sequence of several. So a long prompt does not start only
     to be preempted. What admitted groups have yet to take is reserved for them, and one percent of the pool stays
     free (the watermark) so that running groups can grow. With nothing running there is no watermark. If a prompt's
     next block is being computed in this step for another group, it waits, and so do those behind it: in the next
     step the block is in the prefix cache.

Preemption (PagedAttention, SOSP 2023, section 4.5) is by recomputation or by swapping. Recomputation gives up the
blocks and computes their tokens again, except for those that all its sequences begin with and that the prefix cache
still has. Swapping keeps the blocks in host memory. Unless a mode is asked for, a group with one sequence is
recomputed. A group with several is swapped, because recomputation would have to rebuild what they share. When host
memory is full, any group is recomputed.

Progress is certain: no group can outgrow the pool (the engine refuses such requests), so the first in order can always
run by preempting the others, and within one priority no group is admitted before an older one. The output does not
depend on any of this; that is tested.

After an exception, wherever it struck, `restart` puts everything in order again. Groups that may have caused it then
run one at a time (`suspects`), so that the next failure has one group to blame.
"""

import time
from bisect import insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from nanopage.engine.beam_search import Beam
from nanopage.engine.block_manager import BlockManager, Prefix
from nanopage.engine.sequence import Sequence, SequenceGroup, Status
from nanopage.step import NO_TOKEN, Batch, BatchResult, BlockUpdate, Fork, NewSequence

NOT_FINITE = (
    "the logits of its next token are not finite: weights that are NaN or infinite, an overflow in float16, or "
    "constraints that forbid every token"
)


@dataclass(slots=True)
class Schedule:
    """What the scheduler has decided for a step: the message to the workers, and whom it is about.

    sequences  those of `batch.rows`, in that order
    samplers   those of `batch.sampled_rows`, in that order
    """

    batch: Batch = field(default_factory=Batch)
    sequences: list[Sequence] = field(default_factory=list)
    samplers: list[Sequence] = field(default_factory=list)
    preempted: list[SequenceGroup] = field(default_factory=list)
    num_cached_tokens: int = 0  # that admitted sequences found in the prefix cache

    @property
    def must_be_awaited(self) -> bool:
        """Whether the next step cannot be scheduled before this one's results: a beam search chooses by them."""
        return any(seq.group.beam_search is not None for seq in self.samplers)

    @property
    def groups(self) -> list[SequenceGroup]:
        """Those that get a token."""
        return list(dict.fromkeys(seq.group for seq in self.samplers))


class Scheduler:
    """Continuous batching over a `BlockManager`.

    Args:
        block_manager: its pool must hold the largest group that is ever added.
        max_num_seqs: most sequences running at once.
        max_num_batched_tokens: most tokens in one step.
        preemption_mode: "recompute", "swap" or None, the rule above.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        preemption_mode: str | None = None,
    ):
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.preemption_mode = preemption_mode
        self.watermark = block_manager.num_blocks // 100
        self.suspects: list[SequenceGroup] = []  # to be run one at a time, each until it gets a token
        self.waiting: list[SequenceGroup] = []
        self.running: list[SequenceGroup] = []
        self.swapped: list[SequenceGroup] = []
        self.num_preemptions = 0
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))  # of the workers' sequence table
        self._num_added = 0

    def add(self, group: SequenceGroup) -> None:
        self._number(group)
        insort(self.waiting, group, key=_order)

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running or self.swapped)

    def schedule(self) -> Schedule:
        """Choose the next step's work and give it blocks. Computes nothing."""
        schedule = Schedule()
        schedule.batch.idle = not self._has_begun()
        if self.suspects:
            self._schedule_alone(self.suspects[0], schedule)
        else:
            self._schedule_together(schedule)
        schedule.batch.copies = self.block_manager.take_copies()
        return schedule

    def advance(self, schedule: Schedule) -> None:
        """The batch has been submitted, and whatever the worker does next comes after it. Count its tokens as computed,
        enter full blocks into the prefix cache, fork, and expect a token for each sampler.

        The tokens that the batch reads must be known by now: `update` of the previous batch comes first.
        """
        batch, manager = schedule.batch, self.block_manager
        for seq, start, count in zip(schedule.sequences, batch.starts, batch.counts, strict=True):
            if seq.finish_reason is not None:  # by the results of the previous batch
                continue
            end = start + count
            seq.num_computed_tokens = end
            if end % manager.block_size == 0 or count > 1:
                manager.register(seq.seq_id, seq.token_ids, end, seq.cache_salt)
            group = seq.group
            if not group.forked and end == group.shared_len:
                group.forked = True
                for sibling in group.live:
                    if sibling is not seq:
                        manager.fork(seq.seq_id, sibling.seq_id)
                        sibling.num_computed_tokens = end
        for seq in schedule.samplers:
            if seq.finish_reason is None and seq.group.beam_search is None:
                seq.num_in_flight += 1

    def update(self, schedule: Schedule, result: BatchResult) -> list[Sequence]:
        """Take in the results of a step. Returns the sequences that took their tokens.

        The token of a sequence that has ended since the batch was scheduled is dropped. A group for which no token
        could be sampled ends with an error.
        """
        taken = []
        now = time.perf_counter()
        for prompt in result.prompt_logprobs:
            group = schedule.sequences[schedule.batch.rows.index(prompt.row)].group
            if not group.finished:  # after a preemption positions come again
                del group.prompt_logprobs[prompt.start - 1 :]
                group.prompt_logprobs += prompt.tables
        logprobs = result.logprobs
        for i, (seq, token_id) in enumerate(zip(schedule.samplers, result.token_ids, strict=True)):
            if seq.finish_reason is not None:
                continue
            group = seq.group
            if token_id == NO_TOKEN:
                self.fail(group, NOT_FINITE)
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
        if self.suspects or any(seq.candidates for seq in taken):
            for group in schedule.groups:
                if group.beam_search is not None and not group.finished and all(seq.candidates for seq in group.live):
                    self._advance_beams(group)
                if group in self.suspects:
                    self.suspects.remove(group)
        return taken

    def restart(self, groups: list[SequenceGroup]) -> None:
        """Begin these groups, which are all there are, again from the tokens that are known. All blocks are taken back
        and all prefixes forgotten. For use after an exception, in whatever state it left the queues and the books."""
        self.block_manager.reset()
        self._free_rows = list(range(self.max_num_seqs - 1, -1, -1))
        self.running, self.swapped = [], []
        for group in groups:
            self._number(group)
            if group.next_beams is not None:
                self._take_beams(group)
            for seq in group.seqs:
                seq.restart()
                if not seq.finished and (ending := self._find_ending(group, seq)):
                    seq.finish_reason, seq.stop_reason = ending
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

    def fail(self, group: SequenceGroup, error: str) -> None:
        """End a group because of an error."""
        group.error = error
        self.finish(group, None, "error")

    def finish(
        self, group: SequenceGroup, seq: Sequence | None, finish_reason: str, stop_reason: int | str | None = None
    ) -> None:
        """End one sequence of a group, or all of them (None), and give back the blocks."""
        for ending in [seq] if seq is not None else [s for s in group.seqs if not s.finished]:
            ending.finish_reason, ending.stop_reason = finish_reason, stop_reason
            ending.num_in_flight = 0
            if not group.forked and group.live and not ending.dormant:
                # The leader's blocks are for its siblings, too: the next live sequence leads. If this one did not lead,
                # it has none.
                leader = group.live[0]
                if self.block_manager.rename(ending.seq_id, leader.seq_id):
                    leader.num_computed_tokens = ending.num_computed_tokens
            self.block_manager.free(ending.seq_id)
            self._leave_table(ending)
        self._end_if_finished(group)

    def _end_if_finished(self, group: SequenceGroup) -> None:
        if group.finished or group.num_unfinished:
            return
        self._queue(group).remove(group)
        if group in self.suspects:
            self.suspects.remove(group)
        group.status = Status.FINISHED
        group.metrics.finished_time = time.perf_counter()

    def _queue(self, group: SequenceGroup) -> list[SequenceGroup]:
        return {Status.WAITING: self.waiting, Status.RUNNING: self.running, Status.SWAPPED: self.swapped}[group.status]

    def _has_begun(self) -> bool:
        """Whether any request has; one that was preempted is waiting again, with the tokens that it has."""
        return bool(self.running or self.swapped) or any(
            seq.num_output_tokens for group in self.waiting for seq in group.seqs
        )

    def _number(self, group: SequenceGroup) -> None:
        if group.order < 0:
            group.order = self._num_added
            self._num_added += 1

    # What runs

    def _schedule_together(self, schedule: Schedule) -> None:
        self._preempt_for_priority(schedule)
        budget = self.max_num_batched_tokens
        num_preempted = len(schedule.preempted)
        chunks: list[tuple[Sequence, int]] = []
        index = 0
        while index < len(self.running) and budget > 0:
            group = self.running[index]
            if self._schedule_decode(group, schedule):
                budget -= 1
                index += 1
                continue
            work = self._work(group, budget)
            # The victims are at the end of the list, so none of them is in the batch yet.
            while self.block_manager.blocks_to_grow(_growth(work)) > self.block_manager.num_free_blocks:
                victim = self.running.pop()
                self._preempt(victim, schedule)
                if victim is group:
                    break
            else:
                budget -= self._schedule(schedule, work, chunks)
                index += 1
        if len(schedule.preempted) == num_preempted:
            self._admit(schedule, budget, chunks)
        self._add_chunks(schedule, chunks)

    def _schedule_alone(self, group: SequenceGroup, schedule: Schedule) -> None:
        """Run one group; the others give up their blocks."""
        if group.status is Status.WAITING:
            for other in self.running:
                self._begin_again(other)
            self.waiting = sorted([*self.waiting, *self.running], key=_order)
            self.waiting.remove(group)
            self.running, group.status = [group], Status.RUNNING
            self._start(group, self._cached_prefix(group), schedule)
        chunks: list[tuple[Sequence, int]] = []
        self._schedule(schedule, self._work(group, self.max_num_batched_tokens), chunks)
        self._add_chunks(schedule, chunks)

    def _schedule_decode(self, group: SequenceGroup, schedule: Schedule) -> bool:
        """The common case: a single sequence with one more token in a block that it has. Returns whether it was."""
        seq = group.seqs[0]
        start = len(seq.token_ids) + seq.num_in_flight - 1
        if (
            len(group.seqs) > 1
            or seq.num_computed_tokens != start
            or seq.row is None
            or start % self.block_manager.block_size == 0
            or start + 1 >= seq.max_total_tokens
            or group.beam_search is not None
        ):
            return False
        batch = schedule.batch
        index = len(batch.rows)
        batch.rows.append(seq.row)
        batch.starts.append(start)
        batch.counts.append(1)
        batch.sampled_from.append(index)
        batch.sampled_rows.append(seq.row)
        schedule.sequences.append(seq)
        schedule.samplers.append(seq)
        return True

    def _work(self, group: SequenceGroup, budget: int) -> list[tuple[Sequence, int]]:
        """The group's sequences that have tokens to compute, and how many of them the budget allows."""
        work = []
        for seq in group.live if group.forked else group.live[:1]:
            end = seq.num_tokens if group.forked else group.shared_len
            num_tokens = 0 if group.forked and seq.full else min(end - seq.num_computed_tokens, budget)
            if num_tokens > 0:  # a beam may have to wait for the others
                work.append((seq, num_tokens))
                budget -= num_tokens
        return work

    def _schedule(
        self, schedule: Schedule, work: list[tuple[Sequence, int]], chunks: list[tuple[Sequence, int]]
    ) -> int:
        """Put single tokens into the batch, and longer work into `chunks`, with blocks that are known to be there.
        Returns the number of tokens."""
        for seq, num_tokens in work:
            self._grow(schedule.batch, seq, num_tokens)
            if num_tokens > 1:
                chunks.append((seq, num_tokens))
            else:
                self._add(schedule, seq, num_tokens)
        return sum(num_tokens for _, num_tokens in work)

    def _add_chunks(self, schedule: Schedule, chunks: list[tuple[Sequence, int]]) -> None:
        for seq, num_tokens in chunks:
            self._add(schedule, seq, num_tokens)

    def _grow(self, batch: Batch, seq: Sequence, num_tokens: int) -> None:
        """Give a sequence the blocks for its next tokens, and tell the worker what it has to know of it."""
        manager, start, end = self.block_manager, seq.num_computed_tokens, seq.num_computed_tokens + num_tokens
        num_copies, table = len(manager.copies), manager.block_tables[seq.seq_id]
        num_blocks = len(table)
        if not manager.grow(seq.seq_id, start, end):
            raise RuntimeError(f"{seq} has not been given its blocks, which were counted before")
        if len(table) > num_blocks and end % manager.block_size:
            batch.cleared.append(table[-1])  # the other new ones are filled by this step
        self._enter_table(batch, seq, start)
        first = start // manager.block_size if len(manager.copies) > num_copies else seq.num_sent_blocks
        first = min(first, seq.num_sent_blocks)
        assert seq.row is not None
        if first < len(table):
            batch.blocks.append(BlockUpdate(seq.row, first, table[first:]))
            seq.num_sent_blocks = len(table)
        if seq.group.beam_search is not None and seq.num_output_tokens and num_tokens == 1:
            batch.tokens.append((seq.row, start, seq.token_ids[start]))  # the search has chosen it, not the sampler

    def _enter_table(self, batch: Batch, seq: Sequence, num_shared: int) -> None:
        """Make sure that the worker has a row for a sequence. With `parent`, `num_shared` of its tokens are in that
        one's row already, and there is at most one more, which `_grow` sends."""
        if seq.row is not None:
            return
        seq.row = self._free_rows.pop()
        if seq.parent is not None and seq.parent.row is not None:
            batch.forks.append(Fork(seq.parent.row, seq.row, num_shared, seq.seed))
        else:
            new = NewSequence(seq.row, list(seq.token_ids), seq.num_prompt_tokens, seq.seed, seq.settings)
            batch.new.append(new)
        seq.parent = None

    def _leave_table(self, seq: Sequence) -> None:
        if seq.row is not None:
            self._free_rows.append(seq.row)
        seq.leave_table()

    def _add(self, schedule: Schedule, seq: Sequence, num_tokens: int) -> None:
        """Put a sequence into the batch. If this reaches the end of its tokens, its next one is sampled, and that of
        its siblings that are about to fork from it."""
        batch, group = schedule.batch, seq.group
        end = seq.num_computed_tokens + num_tokens
        assert seq.row is not None
        schedule.sequences.append(seq)
        batch.rows.append(seq.row)
        batch.starts.append(seq.num_computed_tokens)
        batch.counts.append(num_tokens)
        if not (group.forked or end == group.shared_len):
            return
        for sampler in [seq] if group.forked else group.live:
            if sampler.num_tokens == end and not sampler.candidates:
                if sampler is not seq:
                    sampler.parent = seq
                    self._enter_table(batch, sampler, end)
                assert sampler.row is not None
                schedule.samplers.append(sampler)
                batch.sampled_from.append(len(batch.rows) - 1)
                batch.sampled_rows.append(sampler.row)

    # Who comes in

    def _admit(self, schedule: Schedule, budget: int, chunks: list[tuple[Sequence, int]]) -> None:
        if budget <= 0 or not (self.swapped or self.waiting):
            return
        reserved = sum(map(self._reserved, self.running))
        while budget > 0 and (self.swapped or self.waiting):
            group = min(self.swapped[:1] + self.waiting[:1], key=_order)
            swapped = group.status is Status.SWAPPED
            prefix = [] if swapped else self._cached_prefix(group)
            if not swapped and self._is_being_computed(group, prefix, chunks):
                return
            # What goes out to the host pool in this step is not there to come in, and a group that has just been
            # preempted waits for its tokens that are in flight.
            out = bool(schedule.batch.swap_out) if swapped else any(seq.num_in_flight for seq in group.live)
            if out or not self._fits(group, prefix, reserved):
                return
            self._queue(group).pop(0)
            if swapped:
                schedule.batch.swap_in += self.block_manager.swap_in([seq.seq_id for seq in group.live])
            else:
                self._start(group, prefix, schedule)
            insort(self.running, group, key=_order)
            group.status = Status.RUNNING
            work = self._work(group, budget)
            if self.block_manager.blocks_to_grow(_growth(work)) > self.block_manager.num_free_blocks:
                return  # a swapped group that came back to an empty pool's last blocks grows when it is its turn
            budget -= self._schedule(schedule, work, chunks)
            reserved += self._reserved(group)

    def _start(self, group: SequenceGroup, prefix: list[Prefix], schedule: Schedule) -> None:
        """Give the leader of a waiting group its prefix that is cached."""
        live = group.live
        group.forked = len(live) == 1
        group.shared_len = _common_length(live)
        leader = live[0]
        leader.num_computed_tokens = self.block_manager.allocate(leader.seq_id, prefix, group.shared_len)
        schedule.num_cached_tokens += leader.num_computed_tokens
        if group.metrics.first_scheduled_time is None:
            group.metrics.first_scheduled_time = time.perf_counter()
            group.num_cached_tokens = leader.num_computed_tokens

    def _cached_prefix(self, group: SequenceGroup) -> list[Prefix]:
        # Prompt log-probabilities need every prompt position computed.
        live = group.live
        if live[0].settings.prompt_logprobs is not None:
            return []
        known = live[0].token_ids[: _common_length(live)]
        return self.block_manager.lookup(known, live[0].cache_salt, live[0].block_hashes)

    def _is_being_computed(
        self, group: SequenceGroup, prefix: list[Prefix], chunks: list[tuple[Sequence, int]]
    ) -> bool:
        """Whether this step computes the block that follows a waiting group's cached prefix: in the next step it will
        be in the cache, and need not be computed twice."""
        leader, size = group.live[0], self.block_manager.block_size
        end = (len(prefix) + 1) * size
        if not self.block_manager.enable_prefix_caching or leader.settings.prompt_logprobs is not None:
            return False
        if end >= _common_length(group.live):  # its last token has to be computed anyway
            return False
        return any(
            seq.num_computed_tokens < end <= seq.num_computed_tokens + num_tokens
            and seq.cache_salt == leader.cache_salt
            and seq.token_ids[:end] == leader.token_ids[:end]
            for seq, num_tokens in chunks
        )

    def _fits(
        self,
        group: SequenceGroup,
        prefix: list[Prefix],
        reserved: int,
        victims: Iterable[SequenceGroup] = (),
        growth: int = 0,
    ) -> bool:
        """Whether a swapped group, or a waiting one with this cached prefix, can be admitted, if the victims were
        preempted and the other running groups, for which `reserved` blocks are reserved, took `growth` more blocks."""
        manager = self.block_manager
        others = [other for other in self.running if other not in victims] if victims else self.running
        if sum(other.num_unfinished for other in others) + group.num_unfinished > self.max_num_seqs:
            return False
        given_up = Counter(
            block
            for victim in victims
            for seq in victim.live
            for block in manager.block_tables.get(seq.seq_id, ())
        )  # fmt: skip
        free = manager.num_free_blocks - growth
        free += sum(count == manager.ref_counts[block] for block, count in given_up.items())
        if others:
            free -= self.watermark + reserved
        wanted = self._wanted(group)
        if group.status is Status.SWAPPED:
            present = len(manager.host_blocks_of([seq.seq_id for seq in group.live]))
            # With room to grow, so that it does not come in only to go out again; alone, it need not.
            return (max(wanted, present + len(group.live)) if others else present) <= free
        in_use = sum(manager.ref_counts[p.block] > given_up[p.block] for p in prefix)
        return wanted - in_use <= free

    def _wanted(self, group: SequenceGroup) -> int:
        """Blocks for all present tokens of a group, one of its own for each sequence of several."""
        live, manager = group.live, self.block_manager
        if len(live) == 1:
            return manager.blocks_for(live[0].num_tokens)
        shared = _common_length(live) // manager.block_size
        return shared + sum(max(1, manager.blocks_for(seq.num_tokens) - shared) for seq in live)

    def _reserved(self, group: SequenceGroup) -> int:
        """Blocks that a running group was admitted with and has not taken yet."""
        live = group.live
        leader = live[0]
        if group.forked and len(leader.token_ids) + leader.num_in_flight - leader.num_computed_tokens <= 1:
            return 0
        held = self.block_manager.blocks_of([seq.seq_id for seq in live])
        return max(0, self._wanted(group) - len(held))

    # Who goes out

    def _preempt_for_priority(self, schedule: Schedule) -> None:
        """Preempt running groups of lower priority than the first waiting one, if that lets it in now."""
        if not self.waiting or (self.swapped and _order(self.swapped[0]) < _order(self.waiting[0])):
            return
        first = self.waiting[0]
        if not self.running or self.running[-1].priority <= first.priority:
            return
        num_lower = sum(group.priority > first.priority for group in self.running)
        prefix = self._cached_prefix(first)
        reserved = [self._reserved(group) for group in self.running]
        if self._fits(first, prefix, sum(reserved)):
            return
        for num_victims in range(1, num_lower + 1):
            kept, victims = self.running[:-num_victims], self.running[-num_victims:]
            growth, budget = 0, self.max_num_batched_tokens
            for group in kept:
                work = self._work(group, budget)
                growth += self.block_manager.blocks_to_grow(_growth(work))
                budget -= sum(num_tokens for _, num_tokens in work)
            if budget > 0 and self._fits(first, prefix, sum(reserved[:-num_victims]), victims, growth):
                self.running = kept
                for victim in reversed(victims):
                    self._preempt(victim, schedule)
                return

    def _preempt(self, group: SequenceGroup, schedule: Schedule) -> None:
        """Take the blocks of a group that has left `running`."""
        live = group.live
        ids = [seq.seq_id for seq in live]
        mode = self.preemption_mode or ("recompute" if len(live) == 1 else "swap")
        moved = self.block_manager.swap_out(ids) if mode == "swap" else None
        if moved is not None:
            schedule.batch.swap_out += moved
            group.status = Status.SWAPPED
            for seq in live:
                self._leave_table(seq)
            insort(self.swapped, group, key=_order)
        else:
            self._begin_again(group)
            insort(self.waiting, group, key=_order)
        group.metrics.num_preemptions += 1
        self.num_preemptions += 1
        schedule.preempted.append(group)

    def _begin_again(self, group: SequenceGroup) -> None:
        """Give up the group's blocks, for all its tokens to be computed again."""
        for seq in group.live:
            self.block_manager.free(seq.seq_id)
            seq.num_computed_tokens = 0
            self._leave_table(seq)
        group.status = Status.WAITING

    # Beam search

    def _advance_beams(self, group: SequenceGroup) -> None:
        """All beams have their candidates: the best go on, by fork and free."""
        manager, search, parents = self.block_manager, group.beam_search, group.live
        assert search is not None
        beams = [Beam(seq.output_token_ids, seq.cumulative_logprob, seq.candidates) for seq in parents]
        step = search.choose(beams)
        survivors = set() if step.finished else {index for index, _, _ in step.live}
        ending = [seq for index, seq in enumerate(parents) if index not in survivors]
        spare = [seq for seq in group.seqs if seq.dormant] + ending
        forks, live = [], []
        for index, token_id, cumulative_logprob in [] if step.finished else step.live:
            seq = parent = parents[index]
            if index in survivors:  # its first successor takes its place
                survivors.remove(index)
            else:
                seq = spare.pop()
                forks.append((parent, seq))
            live.append((seq, [*parent.token_ids, token_id], cumulative_logprob))
        group.next_beams = step, live
        for seq in ending:
            manager.free(seq.seq_id)
            self._leave_table(seq)
        for parent, seq in forks:
            manager.fork(parent.seq_id, seq.seq_id)
            seq.num_computed_tokens = parent.num_computed_tokens
            seq.parent = parent
        self._take_beams(group)
        if search.finished:
            self.finish(group, None, "stop")

    def _take_beams(self, group: SequenceGroup) -> None:
        """Make `next_beams` the state of the group. Called again, if an exception came in between, it goes on."""
        assert group.beam_search is not None and group.next_beams is not None
        step, live = group.next_beams
        group.beam_search.accept(step)
        for seq in group.seqs:
            seq.candidates = {}
            seq.dormant = not step.finished and all(seq is not other for other, _, _ in live)
        for seq, token_ids, cumulative_logprob in live:
            seq.token_ids, seq.cumulative_logprob, seq.block_hashes = token_ids, cumulative_logprob, []
        group.next_beams = None


def _order(group: SequenceGroup) -> tuple[int, int]:
    return group.priority, group.order


def _growth(work: list[tuple[Sequence, int]]) -> list[tuple[int, int, int]]:
    return [(seq.seq_id, seq.num_computed_tokens, seq.num_computed_tokens + n) for seq, n in work]


def _common_length(seqs: list[Sequence]) -> int:
    """How many tokens all the sequences begin with. Tokens in flight count for a single one only."""
    if len(seqs) == 1:
        return seqs[0].num_tokens
    shortest = min(len(seq.token_ids) for seq in seqs)
    for i in range(seqs[0].num_prompt_tokens, shortest):
        if len({seq.token_ids[i] for seq in seqs}) > 1:
            return i
    return shortest
