"""Scheduler: which sequences run in the next step, how many tokens of each, and what moves in memory first.

Requests are sequence groups in three queues, each ordered by (priority, arrival). `waiting` groups have no blocks,
`running` ones have, `swapped` ones have theirs in host memory. Each step is one mixed batch under one token budget:
decodes and pieces of prompts together (Orca, OSDI 2022; chunked prefill: Sarathi-Serve, OSDI 2024).

  1. The first waiting group, if its priority is higher than that of some that run, takes the place of as few of them
     as will do, the last first; none if all of them would not.
  2. Running groups come first, in order: one token for a decode, a chunk for an unfinished prompt. When blocks run out
     the last running group is preempted, whole.
  3. Then, unless blocks ran out, swapped and waiting groups are admitted in order, while they fit: if blocks for the
     whole of their present tokens are free, one of its own for each sequence of several, so that a long prompt does
     not start only to be preempted. What admitted groups have yet to take is reserved for them, and one percent of the
     pool stays free (the watermark), so that those that run can grow. With nothing running the watermark is waived.
     A prompt whose next block the step is computing for another one waits for it, and those behind it do, too: in the
     next step the prefix cache has it.

Preemption (PagedAttention, SOSP 2023, section 4.5) is by recomputation, which gives up the blocks and computes them
again (but for what all its sequences begin with and the prefix cache still has), or by swapping, which keeps them in
the host pool. Unless one is asked for, a group with one sequence is recomputed, and one with several, whose sharing
recomputation would have to rebuild, is swapped. When the host pool is full, any is recomputed.

Progress is certain: no group can outgrow the pool (the engine refuses those), so the first in order can always run by
preempting the others; within one priority nobody is admitted before an older one. Output does not depend on any of
this; that is tested.

After an exception, whatever the cause and wherever it struck, `restart` puts everything in order again. Groups that
may have caused it run one at a time then (`suspects`), so that the next failure has one group to blame.

Pure Python: no torch here.
"""

import time
from bisect import insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from nanopage.engine.beam_search import Beam
from nanopage.engine.block_manager import BlockManager, Prefix
from nanopage.request import NO_TOKEN, SampledToken, Sequence, SequenceGroup, Status

NOT_FINITE = (
    "the logits of its next token are not finite: weights that are NaN or infinite, an overflow in float16, or "
    "constraints that forbid every token"
)


@dataclass(slots=True)
class ScheduledSequence:
    """`num_tokens` tokens of `seq` from position `start` run in this step; `block_table` covers them.

    `samplers` are the sequences whose next token is to be sampled from the last of them: `seq` itself, if they reach
    its end, and others of its group that are about to fork from it.
    """

    group: SequenceGroup
    seq: Sequence
    start: int
    num_tokens: int
    block_table: list[int]
    samplers: list[Sequence]


@dataclass(slots=True)
class Batch:
    """One step's work: single-token sequences first (attention treats them together), longest first, then chunks.

    Before it runs, blocks move in this order: `swap_out` [(block, host block)], `swap_in` [(host block, block)],
    `copies` [(from, to)], all of each read before any is written; then `new_blocks` are cleared.
    """

    sequences: list[ScheduledSequence] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    new_blocks: list[int] = field(default_factory=list)
    preempted: list[SequenceGroup] = field(default_factory=list)
    num_cached_tokens: int = 0  # that admitted sequences found in the prefix cache

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.sequences)

    @property
    def groups(self) -> list[SequenceGroup]:
        """Those that get a token."""
        return list({id(s.group): s.group for s in self.sequences if s.samplers}.values())


class Scheduler:
    """Continuous batching over a `BlockManager`.

    Args:
        block_manager: whose pool must hold the largest group that is ever added.
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
        self._num_added = 0

    def add(self, group: SequenceGroup) -> None:
        group.order = self._num_added
        self._num_added += 1
        insort(self.waiting, group, key=_place)

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running or self.swapped)

    def schedule(self) -> Batch:
        """Choose the next step's work and give it blocks. Computes nothing."""
        batch = Batch()
        if self.suspects:
            self._schedule_alone(self.suspects[0], batch)
        else:
            self._schedule_together(batch)
        # Decodes first, longest first (attention pads neighbours to one length), then chunks in their order.
        batch.sequences.sort(key=lambda s: (1, 0) if s.num_tokens > 1 else (0, -s.start))
        batch.copies = self.block_manager.take_copies()
        batch.new_blocks = self.block_manager.take_new_blocks()
        return batch

    def _schedule_together(self, batch: Batch) -> None:
        self._make_way(batch)
        budget = self.max_num_batched_tokens
        num_preempted = len(batch.preempted)
        index = 0
        while index < len(self.running) and budget > 0:
            group = self.running[index]
            work = self._work(group, budget)
            # The victims are at the end of the list, so none of them is in the batch yet.
            while self.block_manager.blocks_to_grow(_growth(work)) > self.block_manager.num_free_blocks:
                victim = self.running.pop()
                self._preempt(victim, batch)
                if victim is group:
                    break
            else:
                budget -= self._schedule(batch, group, work)
                index += 1
        if len(batch.preempted) == num_preempted:
            self._admit(batch, budget)

    def _schedule_alone(self, group: SequenceGroup, batch: Batch) -> None:
        """Run one group; the others give up their blocks."""
        if group.status is Status.WAITING:
            for other in self.running:
                self._begin_again(other)
            self.waiting = sorted([*self.waiting, *self.running], key=_place)
            self.waiting.remove(group)
            self.running, group.status = [group], Status.RUNNING
            self._start(group, self._cached_prefix(group), batch)
        self._schedule(batch, group, self._work(group, self.max_num_batched_tokens))

    def advance(self, batch: Batch) -> None:
        """The batch is on its way, and whatever the device does next comes after it: count its tokens as computed,
        enter full blocks into the prefix cache, fork, and give each sampler a placeholder for its next token.

        The tokens that the batch itself reads must be known by now: `update` of the batch before comes first.
        """
        manager = self.block_manager
        row = 0
        for scheduled in batch.sequences:
            group, seq = scheduled.group, scheduled.seq
            computed = scheduled.start + scheduled.num_tokens
            if not seq.finished:  # by what the batch before brought
                seq.num_computed_tokens = computed
                manager.register(seq.seq_id, seq.token_ids, computed, seq.cache_salt)
                if not group.forked and computed == group.shared_len:
                    group.forked = True
                    for sibling in group.live:
                        if sibling is not seq:
                            manager.fork(seq.seq_id, sibling.seq_id)
                            sibling.num_computed_tokens = computed
            for sampler in scheduled.samplers:
                row += 1
                if not sampler.finished and group.beam_search is None:
                    sampler.expect(row)

    def update(self, batch: Batch, sampled: list[SampledToken]) -> list[Sequence]:
        """Take in one step's results: `sampled` has one token for each of the batch's samplers, in order. Returns the
        sequences that took theirs; the token of a sequence that has ended since the batch was scheduled is dropped. A
        group for which no token could be sampled ends with an error."""
        taken = []
        tokens = iter(sampled)
        now = time.perf_counter()
        for scheduled in batch.sequences:
            group = scheduled.group
            for sampler in scheduled.samplers:
                token = next(tokens)
                if sampler.finished:
                    continue
                if token.token_id == NO_TOKEN:
                    self.fail(group, NOT_FINITE)
                    continue
                taken.append(sampler)
                if group.metrics.token_times[-1:] != [now]:
                    group.metrics.token_times.append(now)
                if group.beam_search is not None:
                    assert token.logprobs is not None
                    sampler.candidates = {token_id: logprob for token_id, (logprob, _) in token.logprobs.items()}
                    continue
                sampler.receive(token)
                if ending := sampler.stop_by_last_token():
                    self.finish(group, sampler, *ending)
        for group in batch.groups:
            if group.beam_search is not None and not group.finished and all(seq.candidates for seq in group.live):
                self._advance_beams(group)
            if group in self.suspects:
                self.suspects.remove(group)
        return taken

    def restart(self, groups: list[SequenceGroup]) -> None:
        """Begin these groups, which are all there are, again from the tokens that are known. All blocks are taken back
        and all prefixes forgotten. For use after an exception, in whatever state it left the queues and the books."""
        self.block_manager.reset()
        self.running, self.swapped = [], []
        for group in groups:
            if group.order < 0:  # it was about to be added
                group.order = self._num_added
                self._num_added += 1
            if group.next_beams is not None:
                self._take_beams(group)
            for seq in group.seqs:
                seq.restart()
                if not seq.finished and (ending := self._ending(group, seq)):
                    seq.finish_reason, seq.stop_reason = ending
            group.status = Status.WAITING
        self.waiting = sorted(groups, key=_place)
        for group in groups:
            self._end_if_finished(group)

    def _ending(self, group: SequenceGroup, seq: Sequence) -> tuple[str, int | None] | None:
        """(finish_reason, stop_reason) if the tokens that are known end a sequence."""
        if group.error is not None:
            return "error", None
        if group.beam_search is not None:
            return ("stop", None) if group.beam_search.finished else None
        return seq.stop_by_last_token() if seq.num_output_tokens else None

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
            ending.forget()
            if not group.forked and group.live and not ending.dormant:
                # The leader's blocks are for its siblings, too: whoever is next leads. If it did not lead, it has none.
                heir = group.live[0]
                if self.block_manager.rename(ending.seq_id, heir.seq_id):
                    heir.num_computed_tokens = ending.num_computed_tokens
            self.block_manager.free(ending.seq_id)
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

    # What runs

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

    def _schedule(self, batch: Batch, group: SequenceGroup, work: list[tuple[Sequence, int]]) -> int:
        """Put the work into the batch, with blocks that are known to be there. Returns its number of tokens."""
        for seq, num_tokens in work:
            start, end = seq.num_computed_tokens, seq.num_computed_tokens + num_tokens
            grown = self.block_manager.grow(seq.seq_id, start, end)
            assert grown, "the blocks were counted before"
            siblings = [seq] if group.forked else group.live
            forks = group.forked or end == group.shared_len
            samplers = [s for s in siblings if forks and s.num_tokens == end and not s.candidates]
            table = self.block_manager.block_tables[seq.seq_id]
            batch.sequences.append(ScheduledSequence(group, seq, start, num_tokens, table, samplers))
        return sum(num_tokens for _, num_tokens in work)

    # Who comes in

    def _admit(self, batch: Batch, budget: int) -> None:
        while budget > 0 and (self.swapped or self.waiting):
            group = min(self.swapped[:1] + self.waiting[:1], key=_place)
            swapped = group.status is Status.SWAPPED
            prefix = [] if swapped else self._cached_prefix(group)
            if not swapped and self._is_being_computed(group, prefix, batch):
                return
            # What goes out of the host pool in this step is not there to come in.
            if (swapped and batch.swap_out) or not self._fits(group, prefix):
                return
            self._queue(group).pop(0)
            if swapped:
                batch.swap_in += self.block_manager.swap_in([seq.seq_id for seq in group.live])
            else:
                self._start(group, prefix, batch)
            insort(self.running, group, key=_place)
            group.status = Status.RUNNING
            work = self._work(group, budget)
            if self.block_manager.blocks_to_grow(_growth(work)) > self.block_manager.num_free_blocks:
                return  # a swapped group that came back to an empty pool's last blocks grows when it is its turn
            budget -= self._schedule(batch, group, work)

    def _start(self, group: SequenceGroup, prefix: list[Prefix], batch: Batch) -> None:
        """Give the leader of a waiting group its prefix that is cached."""
        live = group.live
        group.forked = len(live) == 1
        group.shared_len = _common_length(live)
        leader = live[0]
        leader.num_computed_tokens = self.block_manager.allocate(leader.seq_id, prefix, group.shared_len)
        batch.num_cached_tokens += leader.num_computed_tokens
        if group.metrics.first_scheduled_time is None:
            group.metrics.first_scheduled_time = time.perf_counter()
            group.num_cached_tokens = leader.num_computed_tokens

    def _cached_prefix(self, group: SequenceGroup) -> list[Prefix]:
        # Prompt log-probabilities need every prompt position computed.
        if group.params.prompt_logprobs is not None:
            return []
        live = group.live
        return self.block_manager.lookup(live[0].token_ids[: _common_length(live)], live[0].cache_salt)

    def _is_being_computed(self, group: SequenceGroup, prefix: list[Prefix], batch: Batch) -> bool:
        """Whether this step computes the block that follows a waiting group's cached prefix: in the next step it will
        be in the cache, and need not be computed twice."""
        leader, size = group.live[0], self.block_manager.block_size
        end = (len(prefix) + 1) * size
        if not self.block_manager.enable_prefix_caching or group.params.prompt_logprobs is not None:
            return False
        if end >= _common_length(group.live):  # its last token has to be computed anyway
            return False
        return any(
            s.start < end <= s.start + s.num_tokens
            and s.num_tokens > 1
            and s.seq.cache_salt == leader.cache_salt
            and s.seq.token_ids[:end] == leader.token_ids[:end]
            for s in batch.sequences
        )

    def _fits(
        self, group: SequenceGroup, prefix: list[Prefix], victims: Iterable[SequenceGroup] = (), growth: int = 0
    ) -> bool:
        """Whether a swapped group, or a waiting one with this cached prefix, can be admitted, were the victims
        preempted and did those left take `growth` more blocks."""
        manager = self.block_manager
        others = [other for other in self.running if other not in victims]
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
            free -= self.watermark + sum(map(self._reserved, others))
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
        leader = group.live[0]
        if group.forked and leader.num_tokens - leader.num_computed_tokens <= 1:
            return 0
        held = self.block_manager.blocks_of([seq.seq_id for seq in group.live])
        return max(0, self._wanted(group) - len(held))

    # Who goes out

    def _make_way(self, batch: Batch) -> None:
        """Preempt running groups of lower priority than the first waiting one, if that lets it in now."""
        if not self.waiting or (self.swapped and _place(self.swapped[0]) < _place(self.waiting[0])):
            return
        first = self.waiting[0]
        num_lower = sum(group.priority > first.priority for group in self.running)
        if not num_lower:
            return
        prefix = self._cached_prefix(first)
        if self._fits(first, prefix):
            return
        for num_victims in range(1, num_lower + 1):
            kept, victims = self.running[:-num_victims], self.running[-num_victims:]
            growth, budget = 0, self.max_num_batched_tokens
            for group in kept:
                work = self._work(group, budget)
                growth += self.block_manager.blocks_to_grow(_growth(work))
                budget -= sum(num_tokens for _, num_tokens in work)
            if budget > 0 and self._fits(first, prefix, victims, growth):
                self.running = kept
                for victim in reversed(victims):
                    self._preempt(victim, batch)
                return

    def _preempt(self, group: SequenceGroup, batch: Batch) -> None:
        """Take the blocks of a group that has left `running`."""
        live = group.live
        ids = [seq.seq_id for seq in live]
        mode = self.preemption_mode or ("recompute" if len(live) == 1 else "swap")
        moved = self.block_manager.swap_out(ids) if mode == "swap" else None
        if moved is not None:
            batch.swap_out += moved
            group.status = Status.SWAPPED
            insort(self.swapped, group, key=_place)
        else:
            self._begin_again(group)
            insort(self.waiting, group, key=_place)
        group.metrics.num_preemptions += 1
        self.num_preemptions += 1
        batch.preempted.append(group)

    def _begin_again(self, group: SequenceGroup) -> None:
        """Give up the group's blocks, for all its tokens to be computed again."""
        for seq in group.live:
            self.block_manager.free(seq.seq_id)
            seq.num_computed_tokens = 0
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
        for parent, seq in forks:
            manager.fork(parent.seq_id, seq.seq_id)
            seq.num_computed_tokens = parent.num_computed_tokens
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
            seq.token_ids, seq.cumulative_logprob = token_ids, cumulative_logprob
        group.next_beams = None


def _place(group: SequenceGroup) -> tuple[int, int]:
    return group.priority, group.order


def _growth(work: list[tuple[Sequence, int]]) -> list[tuple[int, int, int]]:
    return [(seq.seq_id, seq.num_computed_tokens, seq.num_computed_tokens + n) for seq, n in work]


def _common_length(seqs: list[Sequence]) -> int:
    """How many tokens all the sequences begin with."""
    shortest = min(seq.num_tokens for seq in seqs)
    if len(seqs) == 1:
        return shortest
    for i in range(seqs[0].num_prompt_tokens, shortest):
        if len({seq.token_ids[i] for seq in seqs}) > 1:
            return i
    return shortest
