"""Schedule: what the scheduler has decided for a step. BatchWriter puts it into the message to the workers.

A worker keeps a table with a row for each running sequence (see step.py). BatchWriter gives each sequence a row when it
starts to run, takes the row back when the sequence leaves, and sends only what the workers do not know yet.
"""

from dataclasses import dataclass, field
from typing import Any, cast

from nanopage.engine.block_manager import BlockManager
from nanopage.engine.sequence import Adapter, Sequence, SequenceGroup
from nanopage.step import NO_BLOCK, Batch, BatchResult, BlockUpdate, Fork, NewSequence

Work = list[tuple[Sequence, int]]
"""Sequences, and how many tokens of each to compute."""


@dataclass(slots=True)
class Wait:
    """Why a waiting or swapped group is not admitted in a step. Everything behind it waits, too.

    reason: "blocks", "sequences" (max_num_seqs), "adapter" (all slots are in use), "budget" (of tokens), "prefix"
        (`other` computes a block that it can share in the next step), "swap" (the step swaps another group out),
        "tokens" (its tokens in flight have not arrived), "preemption" (blocks ran out in this step), "alone" (`other`
        runs alone, after a failed step), "turn" (`other` has been swapped in and has taken the last blocks).
    needed, free: blocks or sequences: how many it needs, and how many it may take.
    kept: of the free blocks, those that it may not take: reserved for running groups, and the watermark.
    """

    group: SequenceGroup
    reason: str
    needed: int = 0
    free: int = 0
    kept: int = 0
    other: SequenceGroup | None = None


@dataclass(slots=True)
class Schedule:
    """One step: the message to the workers, and the sequences it is about.

    sequences     the sequences of `batch.rows`, in the same order
    samplers      the sequences of `batch.sampled_rows`, in the same order, but without those in `drafted`
    budget, left  tokens that the step may have: in all, and in addition to the work so far
    encoder_used  costs of the items that begin in the work so far (see `within_encoder_budget`)
    singles       work of one token; `BatchWriter.write` writes it before `chunks`, work of several tokens
    drafted       decodes with their drafts, at the end of the batch (see speculation/drafts.py)
    num_accepted  for each of `drafted`, how many tokens of its draft were appended; from `Scheduler.update` on
    masked        index in `batch.sampled_rows` -> a sequence whose next token depends on its mask (see `find_masks`)
    mask_errors   the sequences of `masked` that have no mask, and why
    loading       the adapters of the batch's `loads`
    wait          why the first group that is not admitted waits
    preempted     groups that have given up their blocks
    num_cached_tokens  that admitted sequences found in the prefix cache
    events        what else was decided, and happened: tuples that begin with a kind. The engine reads none of them.
                  view/explain.py lists the kinds, and makes sentences of them.
    """

    batch: Batch = field(default_factory=Batch)
    sequences: list[Sequence] = field(default_factory=list)
    samplers: list[Sequence] = field(default_factory=list)
    budget: int = field(default=0, compare=False)
    left: int = field(default=0, compare=False)
    encoder_used: int = field(default=0, compare=False)
    singles: list[Sequence] = field(default_factory=list)
    chunks: Work = field(default_factory=list)
    drafted: list[tuple[Sequence, list[int]]] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)
    masked: dict[int, Sequence] = field(default_factory=dict)
    mask_errors: dict[Sequence, str] = field(default_factory=dict)
    loading: list[Adapter] = field(default_factory=list)
    wait: Wait | None = None
    preempted: list[SequenceGroup] = field(default_factory=list)
    num_cached_tokens: int = 0
    events: list[tuple] = field(default_factory=list, compare=False)

    def tell(self, kind: str, *about: Any) -> None:
        """Add an event."""
        self.events.append((kind, *about))

    @property
    def must_be_awaited(self) -> bool:
        """Whether the next step depends on this step's results: a beam search chooses its beams by them."""
        return any(seq.group.beam_search is not None for seq in self.samplers)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing for the workers to do."""
        batch = self.batch
        return not (batch.rows or batch.swap_out or batch.swap_in or batch.copies or batch.loads)

    def group_of(self, row: int) -> SequenceGroup:
        """The group whose sequence computes tokens in a row."""
        return self.sequences[self.batch.rows.index(row)].group

    def take_prompt_outputs(self, result: BatchResult) -> None:
        """Give the groups what the workers return for their prompts, in addition to tokens."""
        for prompt in result.prompt_logprobs:
            self.group_of(prompt.row).add_prompt_logprobs(prompt.start, prompt.tables)
        for pooled in result.pooled:
            self.group_of(pooled.row).add_pooled(pooled.start, pooled.values)

    @property
    def groups(self) -> list[SequenceGroup]:
        """The groups that get a token."""
        groups = dict.fromkeys(seq.group for seq in self.samplers)
        return list(groups | dict.fromkeys(seq.group for seq, _ in self.drafted))

    def find_masks(self) -> dict[int, bytes]:
        """Find the masks that the batch awaits. A sequence without one is in `mask_errors`; what is sampled for it is
        dropped."""
        masks = {}
        for index, seq in self.masked.items():
            assert seq.token_mask is not None
            try:
                mask = seq.token_mask.allowed(seq.output_token_ids)
                if mask:
                    masks[index] = mask
                elif mask is None:
                    seq.token_mask = None
            except ValueError as error:
                self.mask_errors[seq] = str(error)
        return masks


class BatchWriter:
    """Writes sequences into batches, and gives out the rows of the workers' tables.

    Args:
        num_rows: how many rows there are to give out.
        sends_tokens: whether batches carry all sampled tokens (see `Batch.tokens`).
    """

    def __init__(self, block_manager: BlockManager, num_rows: int, sends_tokens: bool = False):
        self.block_manager, self.num_rows, self.sends_tokens = block_manager, num_rows, sends_tokens
        self.reset()

    def reset(self) -> None:
        """Take back all rows."""
        self.free_rows = list(range(self.num_rows - 1, -1, -1))

    def take_decode(self, schedule: Schedule, group: SequenceGroup) -> bool:
        """Schedule the common case: a single sequence with one more token in a block that it has already. A shortcut of
        `next_work` and `take`, which would do the same.

        Returns: False, changing nothing, if the group is not such a case.
        """
        seq = group.seqs[0]
        start = len(seq.token_ids) + seq.num_in_flight - 1
        if (
            len(group.seqs) > 1
            or seq.num_computed_tokens != start  # its prompt is not computed yet
            or seq.row is None
            or start % self.block_manager.block_size == 0  # it needs a new block
            or start + 1 >= seq.max_total_tokens  # its tokens in flight complete it
            or group.beam_search is not None
        ):
            return False
        if self.sends_tokens:
            schedule.batch.tokens.append((seq.row, start, seq.token_ids[start]))
        schedule.singles.append(seq)
        schedule.left -= 1
        return True

    def take(self, schedule: Schedule, work: Work) -> None:
        """Schedule work for which there are enough free blocks."""
        for seq, most in work:
            num_tokens = within_encoder_budget(schedule, seq, most) if seq.group.items else most
            if num_tokens == 0:
                continue
            self.grow(schedule.batch, seq, num_tokens)
            if num_tokens > 1:
                schedule.chunks.append((seq, num_tokens))
            else:
                schedule.singles.append(seq)
            schedule.left -= num_tokens

    def grow(self, batch: Batch, seq: Sequence, num_tokens: int, num_drafted: int = 0) -> None:
        """Give a sequence the blocks for its next tokens, and send what the workers do not know of it yet.

        Args: num_drafted: how many of the tokens, the last ones, are a draft.
        """
        manager, start, end = self.block_manager, seq.num_computed_tokens, seq.num_computed_tokens + num_tokens
        num_copies, table = len(manager.copies), manager.block_tables[seq.seq_id]
        num_blocks = len(table)
        if not manager.grow(seq.seq_id, start, end, num_drafted):
            raise RuntimeError(f"no free blocks for {seq}, although they were counted before")
        if len(table) > num_blocks and end % manager.block_size:
            # Only the last new block stays partly unwritten.
            batch.cleared += [block for block in table[-manager.num_kinds :] if block != NO_BLOCK]
        self._enter(batch, seq, start)
        assert seq.row is not None
        first = seq.num_sent_blocks
        if len(manager.copies) > num_copies or manager.num_states:  # blocks that were sent may have been replaced
            first = min(first, start // manager.block_size * manager.num_kinds)
        if first < len(table):
            batch.blocks.append(BlockUpdate(seq.row, first, table[first:]))
            seq.num_sent_blocks = len(table)
        if start >= seq.num_prompt_tokens and (seq.group.beam_search is not None or self.sends_tokens):
            known = range(start, min(end, len(seq.token_ids)))
            batch.tokens += [(seq.row, position, seq.token_ids[position]) for position in known]

    def write(self, schedule: Schedule) -> None:
        """Write the work of a step into its batch (`step.Batch` has an example).

        If the work reaches the last token of a sequence, the next token of the sequence is sampled.
        """
        batch, samplers = schedule.batch, schedule.samplers
        schedule.sequences = [*schedule.singles, *(seq for seq, _ in schedule.chunks)]
        batch.rows = rows_of(schedule.sequences)
        batch.starts = [seq.num_computed_tokens for seq in schedule.sequences]
        batch.counts = [1] * len(schedule.singles) + [num_tokens for _, num_tokens in schedule.chunks]
        last = -1  # token of a row, in the batch
        for seq, start, count in zip(schedule.sequences, batch.starts, batch.counts, strict=True):
            last, end = last + count, start + count
            for sampler in samplers_of(seq, end):
                if sampler is not seq:
                    sampler.parent = seq
                    self._enter(batch, sampler, end)
                if sampler.token_mask is not None:
                    self._add_mask(schedule, sampler)
                samplers.append(sampler)
                batch.sampled_from.append(last)
        batch.sampled_rows = rows_of(samplers)
        batch.awaits_masks = bool(schedule.masked)

    def leave(self, seq: Sequence) -> None:
        """Take back the row of a sequence, if it has one."""
        if seq.row is not None:
            self.free_rows.append(seq.row)
        seq.leave_table()

    def _add_mask(self, schedule: Schedule, seq: Sequence) -> None:
        """Have the token that is to be sampled next depend on a mask."""
        if seq.awaits_tokens:
            raise RuntimeError(f"{seq} has a mask and a token in flight, on which its mask depends")
        schedule.masked[len(schedule.samplers)] = seq

    def _enter(self, batch: Batch, seq: Sequence, num_shared: int) -> None:
        """Make sure that a sequence has a row.

        Args: num_shared: tokens that the row of its parent has already, if it has a parent. A beam also has the
            token that has been chosen for it: `grow` sends it.
        """
        if seq.row is not None:
            return
        seq.row = self.free_rows.pop()
        if seq.parent is not None and seq.parent.row is not None:
            batch.forks.append(Fork(seq.parent.row, seq.row, num_shared, seq.seed))
        else:
            new = NewSequence(seq.row, list(seq.token_ids), seq.num_prompt_tokens, seq.seed, seq.settings)
            new.adapter_slot, new.items = seq.group.adapter_slot, seq.group.items
            batch.new.append(new)
        seq.parent = None


def within_encoder_budget(schedule: Schedule, seq: Sequence, num_tokens: int) -> int:
    """How many of the next tokens of a sequence can run in a step, without an item that would make the encoders' costs
    exceed `schedule.budget`. The first item of a step may have any cost. Counts the costs."""
    start = seq.num_computed_tokens
    for item in seq.group.items:
        if item.cost and start <= item.position < start + num_tokens:
            if schedule.encoder_used and schedule.encoder_used + item.cost > schedule.budget:
                return item.position - start
            schedule.encoder_used += item.cost
    return num_tokens


def samplers_of(seq: Sequence, end: int) -> list[Sequence]:
    """The sequences whose next tokens are sampled once `seq` has computed its tokens up to `end`: `seq` itself, if that
    is all it has, and siblings that are about to fork from it."""
    group = seq.group
    if not group.forked and end < group.shared_len:
        return []
    seqs = [seq] if group.forked else group.live
    return [each for each in seqs if len(each.token_ids) + each.num_in_flight == end and not each.candidates]


def rows_of(seqs: list[Sequence]) -> list[int]:
    """The rows of running sequences."""
    return cast(list[int], [seq.row for seq in seqs])


def next_work(group: SequenceGroup, budget: int) -> Work:
    """The sequences of a running group that have tokens to compute, and how many of them the budget allows."""
    work = []
    for seq in group.live if group.forked else group.live[:1]:
        end = seq.num_tokens if group.forked else group.shared_len
        num_tokens = 0 if group.forked and seq.full else min(end - seq.num_computed_tokens, budget)
        if group.marks and num_tokens > 1:
            left = [mark - seq.num_computed_tokens for mark in group.marks if mark > seq.num_computed_tokens]
            num_tokens = min([num_tokens, *left])
        for item in group.items:
            before = item.position - seq.num_computed_tokens
            if item.whole and before < num_tokens < before + item.length:
                num_tokens = before if before > 0 else before + item.length
        if num_tokens > 0:  # a beam may have to wait for the others
            work.append((seq, num_tokens))
            budget -= num_tokens
    return work


def missing_blocks(manager: BlockManager, work: Work) -> int:
    """How many free blocks this work takes."""
    return manager.blocks_to_grow(
        [(seq.seq_id, seq.num_computed_tokens, seq.num_computed_tokens + num_tokens) for seq, num_tokens in work]
    )
