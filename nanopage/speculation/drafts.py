"""Drafts: guesses at the next tokens of sequences. One step checks several of them.

A decode with a draft is a row of a step with 1 + n tokens: the last known token, and the n tokens of the draft. A token
is sampled after each of them. As long as the samples equal the draft, they are the sequence's next tokens. The first
sample that differs is also a next token. The samples after it were computed with a wrong token: they are dropped, and
later steps overwrite their K and V. So the output does not depend on drafts; only the number of steps does.

Layers with a state (see state/layer_kinds.py) keep the state before the draft, because it is not known yet which tokens
are accepted. The next step computes the accepted tokens again, together with those that follow.

A `Drafter` makes the guesses (see lookup.py, draft_model.py and head_drafter.py). `Drafts` decides which guesses a step
tries, and which tokens follow from the samples.
"""

from bisect import insort
from typing import Protocol

from nanopage.engine.preemption import give_up_blocks
from nanopage.engine.queues import Queues, order
from nanopage.engine.schedule import BatchWriter, Schedule
from nanopage.engine.sequence import Sequence, SequenceGroup, Status
from nanopage.outputs import StepStats
from nanopage.step import NO_TOKEN, BatchResult, LogprobTable

SAMPLES_IN_ANY_CASE = 16  # tokens that a step may sample if `max_num_seqs` is smaller: their logits take little memory


class Drafter(Protocol):
    """Guesses the next tokens of decodes."""

    def propose(self, decodes: list[Sequence], most: int, schedule: Schedule) -> dict[Sequence, list[int]]:
        """Draft the tokens that follow the known tokens of some of these sequences.

        Args:
            decodes: the sequences of `schedule.singles` that may have drafts.
            most: how many tokens all drafts together may have. More are cut off.
            schedule: the step's schedule, with `singles` and `chunks`.
        """

    def learn(self, seq: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Learn how many tokens of a draft were accepted."""

    def observe(self, stats: StepStats) -> None:
        """Take in what a step did, and how long it took."""

    def rest(self) -> None:
        """No request is left."""

    def restart(self) -> None:
        """An exception or Ctrl-C has ended a step, perhaps within `propose`."""


class Drafts:
    """Applies the guesses of a drafter in a scheduler (the `Drafts` of engine/attached.py)."""

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
        self.learn, self.observe = drafter.learn, drafter.observe
        self.rest, self.restart = drafter.rest, drafter.restart

    def write(self, queues: Queues, schedule: Schedule, max_num_seqs: int) -> None:
        """Write the work of a step into its batch. Decodes with drafts come last."""
        drafts = self.choose(queues, schedule, max_num_seqs)
        schedule.singles = [seq for seq in schedule.singles if seq not in drafts]
        schedule.chunks = [(seq, num_tokens) for seq, num_tokens in schedule.chunks if seq not in drafts]
        queues.writer.write(schedule)
        for seq, (draft, masks) in drafts.items():
            _add_draft(queues.writer, schedule, seq, draft, masks)

    def choose(
        self, queues: Queues, schedule: Schedule, max_num_seqs: int
    ) -> dict[Sequence, tuple[list[int], list[bytes]]]:
        """The drafts that a step tries, when its other work is scheduled.

        Drafts take only what is left of the token budget and of the free blocks. The blocks of refused drafts are given
        back before the next step is scheduled. A step that preempts a group, or runs a suspect alone, has no drafts.

        Returns: each draft, and the mask of each token that its sequence samples, if the sequence has masks.
        """
        drafts: dict[Sequence, tuple[list[int], list[bytes]]] = {}
        if queues.suspects or schedule.preempted:
            return drafts
        samples = sum(1 if seq.group.forked else len(seq.group.live) for seq in schedule.singles) + len(schedule.chunks)
        budget = min(schedule.left, max(max_num_seqs, SAMPLES_IN_ANY_CASE) - samples)
        manager = queues.block_manager
        decodes = [seq for seq in schedule.singles if takes_drafts(seq, 1)]
        if manager.num_states:
            decodes += [seq for seq, num_tokens in schedule.chunks if takes_drafts(seq, num_tokens)]
        if not decodes or budget <= 0:
            return drafts
        free = manager.num_free_blocks
        for seq, draft in self.drafter.propose(decodes, budget, schedule).items():
            held, known = len(manager.block_tables[seq.seq_id]), len(seq.token_ids)
            room = min((held + free) // manager.num_kinds * manager.block_size, seq.max_total_tokens - 1) - known
            draft, masks = draft[: max(0, min(budget, room))], []
            if draft and seq.token_mask is not None:
                try:
                    masks = seq.token_mask.follow(seq.output_token_ids, draft)
                except ValueError:  # even without the draft there is no mask, which ends the request (see find_masks)
                    continue
                draft = draft[: len(masks) - 1]
            if draft:
                drafts[seq] = draft, masks
                budget -= len(draft)
                free -= max(0, manager.blocks_for(known + len(draft)) - held)
        return drafts

    def accept(self, queues: Queues, schedule: Schedule, result: BatchResult, now: float) -> list[Sequence]:
        """Take in the samples of the decodes with drafts. Returns the sequence of each token that was appended.

        Args: result: the step's result; samples of decodes with drafts come last. now: the time when it came.
        """
        taken: list[Sequence] = []
        end = len(schedule.samplers)
        for seq, draft in schedule.drafted:
            first, end = end, end + 1 + len(draft)
            accepted, ends_early = 0, seq.finish_reason is not None
            token_ids = None if ends_early else self.judge(draft, result.token_ids[first:end])
            if token_ids is not None:
                tables = [result.logprobs.get(index) for index in range(first, end)]
                appended = _append(queues, seq, token_ids, tables, now)
                taken += [seq] * appended
                accepted = min(len(token_ids) - 1, appended)
                ends_early = appended < len(token_ids) and appended < len(draft)  # nothing is known of the draft's rest
                self.learn(seq, accepted if ends_early else len(draft), accepted)
            elif not ends_early:
                seq.takes_drafts, seq.num_in_flight = False, 0
                _recompute(queues, seq.group)
            schedule.num_accepted.append(accepted)
            schedule.tell("draft", seq, len(draft), accepted, ends_early)
        return taken

    def judge(self, draft: list[int], sampled: list[int]) -> list[int] | None:
        """The next tokens of a sequence, given the samples after its last known token and after each token of its
        draft. None if it must be computed again without a draft, because no token could be sampled somewhere: perhaps
        the draft is the cause. K and V that are not finite change what other tokens attend to."""
        if NO_TOKEN in sampled:
            return None
        agreed = 0
        while agreed < len(draft) and draft[agreed] == sampled[agreed]:
            agreed += 1
        return sampled[: agreed + 1]


def takes_drafts(seq: Sequence, num_tokens: int) -> bool:
    """Whether a sequence may have a draft in a step that computes `num_tokens` of it. It must be a decode, not a beam.
    It must not compete with other completions by log-probabilities that are not kept: those after a stop string could
    not be taken back."""
    group = seq.group
    return (
        seq.takes_drafts
        and group.forked
        and group.beam_search is None
        and (num_tokens == 1 or seq.num_computed_tokens >= seq.num_prompt_tokens)
        and seq.num_computed_tokens + num_tokens == len(seq.token_ids)
        and (seq.settings.logprobs is None or seq.num_logprobs is not None)
    )


def _add_draft(writer: BatchWriter, schedule: Schedule, seq: Sequence, draft: list[int], masks: list[bytes]) -> None:
    """Add a decode with a draft: a token is sampled after its last known token and after each token of the draft."""
    batch, start, end = schedule.batch, seq.num_computed_tokens, len(seq.token_ids)
    count = end - start + len(draft)
    last = batch.num_tokens + end - start - 1  # the last known token, in the batch
    writer.grow(batch, seq, count, len(draft))
    assert seq.row is not None
    batch.tokens += [(seq.row, position, token_id) for position, token_id in enumerate(draft, end)]
    batch.rows.append(seq.row)
    batch.starts.append(start)
    batch.counts.append(count)
    batch.masks |= {index: mask for index, mask in enumerate(masks, len(batch.sampled_rows)) if mask}
    batch.sampled_from += range(last, last + 1 + len(draft))
    batch.sampled_rows += [seq.row] * (1 + len(draft))
    schedule.sequences.append(seq)
    schedule.drafted.append((seq, draft))


def _append(
    queues: Queues, seq: Sequence, token_ids: list[int], logprobs: list[LogprobTable | None], now: float
) -> int:
    """Append tokens to a sequence until one ends it. Returns how many were appended."""
    group, manager, number, ending = seq.group, queues.block_manager, 0, None
    group.metrics.count_step(now)
    seq.num_in_flight = len(token_ids)
    while ending is None and number < len(token_ids):
        ending = seq.take(token_ids[number], logprobs[number])
        number += 1
    if group.status is Status.RUNNING:  # it still has its blocks
        if not manager.num_states:
            seq.num_computed_tokens = len(seq.token_ids) - 1
        manager.register(seq.seq_id, seq.keys, seq.num_computed_tokens, seq.cache_salt)
        manager.slide(seq.seq_id, seq.num_computed_tokens, group.marks)
        manager.shrink(seq.seq_id, len(seq.token_ids))
        seq.num_sent_blocks = min(seq.num_sent_blocks, len(manager.block_tables[seq.seq_id]))
    if ending is not None:
        queues.finish(group, seq, *ending)
    return number


def _recompute(queues: Queues, group: SequenceGroup) -> None:
    """Put a running group back into `waiting`, to compute its tokens again."""
    if group.status is Status.RUNNING:
        queues.running.remove(group)
        give_up_blocks(queues, group, reason="draft")
        insort(queues.waiting, group, key=order)
