"""Drafts: guesses at the next tokens of sequences, of which one step checks several.

A decode with a draft is a row of a step with 1 + n tokens: the last known token, and the n tokens of the draft. A token
is sampled behind each of them. As long as the samples equal the draft, they are the sequence's next tokens. The first
sample that differs is its next token, too. What follows was computed with a wrong token: it is dropped, and later steps
overwrite its K and V. So the output does not depend on drafts, only the number of steps does.

A `Drafter` makes the guesses (see lookup.py and draft_model.py). The rest of the engine only knows the rows.
"""

from typing import Protocol

from nanopage.engine.block_manager import BlockManager
from nanopage.engine.preemption import recompute
from nanopage.engine.queues import Queues
from nanopage.engine.schedule import BatchWriter, Schedule
from nanopage.engine.sequence import Sequence, Status
from nanopage.outputs import StepStats
from nanopage.step import NO_TOKEN, BatchResult, LogprobTable

SAMPLES_IN_ANY_CASE = 16  # tokens that a step may sample if `max_num_seqs` is smaller: their logits take little memory

Drafts = dict[Sequence, list[int]]


class Drafter(Protocol):
    """Guesses the next tokens of decodes."""

    def propose(self, decodes: list[Sequence], most: int, schedule: Schedule) -> Drafts:
        """Draft the tokens that follow the known tokens of some of these sequences.

        Args:
            decodes: rows of the step that may have drafts.
            most: how many tokens all drafts together may have. More are cut off.
            schedule: of the step, with `chunks`, but without the drafts.
        """

    def learn(self, seq: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Take in how many tokens of a draft were sampled."""

    def observe(self, stats: StepStats) -> None:
        """Take in what a step did, and how long it took."""

    def rest(self) -> None:
        """No request is left."""

    def restart(self) -> None:
        """An exception or Ctrl-C has ended a step, perhaps within `propose`."""


def choose_drafts(manager: BlockManager, drafter: Drafter, schedule: Schedule, max_num_seqs: int) -> Drafts:
    """Draft further tokens for decodes of a step that has only rows with one token so far, and chunks.

    Drafts take only what is left of the token budget and of the free blocks. `accept` gives back the blocks of refused
    drafts before the next step is scheduled.
    """
    batch = schedule.batch
    num_tokens = len(batch.rows) + sum(num_tokens for _, num_tokens in schedule.chunks)
    num_samples = len(batch.sampled_rows) + len(schedule.chunks)
    most_samples = max(max_num_seqs, SAMPLES_IN_ANY_CASE)
    budget = min(schedule.budget - num_tokens, most_samples - num_samples)
    drafts: Drafts = {}
    decodes = [seq for seq in schedule.sequences if takes_drafts(seq)]
    if not decodes or budget <= 0:
        return drafts
    free = manager.num_free_blocks
    for seq, draft in drafter.propose(decodes, budget, schedule).items():
        held, known = len(manager.block_tables[seq.seq_id]), len(seq.token_ids)
        room = min((held + free) // manager.num_kinds * manager.block_size, seq.max_total_tokens - 1) - known
        draft = draft[: max(0, min(budget, room))]
        if draft and seq.token_mask is not None:
            try:
                masks = seq.token_mask.follow(seq.output_token_ids, draft)
            except ValueError:  # there is no mask even without the draft, which ends the request (see find_masks)
                continue
            draft, schedule.draft_masks[seq] = draft[: len(masks) - 1], masks
        if draft:
            drafts[seq] = draft
            budget -= len(draft)
            free -= max(0, manager.blocks_for(known + len(draft)) - held)
    return drafts


def takes_drafts(seq: Sequence) -> bool:
    """Whether a row of a step may have a draft: a decode, but not of a beam, and not where completions compete by
    log-probabilities that are not kept: those behind a stop string could not be taken back."""
    group = seq.group
    return (
        seq.takes_drafts
        and group.forked
        and group.beam_search is None
        and seq.num_computed_tokens == len(seq.token_ids) - 1
        and (seq.settings.logprobs is None or seq.num_logprobs is not None)
    )


def take_out(schedule: Schedule, drafts: Drafts) -> None:
    """Take the decodes that have drafts out of a batch that has only rows with one token so far."""
    batch = schedule.batch
    kept = [index for index, seq in enumerate(schedule.sequences) if seq not in drafts]
    places = {index: place for place, index in enumerate(kept)}
    samples = [number for number, index in enumerate(batch.sampled_from) if index in places]
    schedule.masked = {new: schedule.masked[old] for new, old in enumerate(samples) if old in schedule.masked}
    batch.sampled_from = [places[batch.sampled_from[number]] for number in samples]
    batch.sampled_rows = [batch.sampled_rows[number] for number in samples]
    schedule.samplers = [schedule.samplers[number] for number in samples]
    batch.rows, batch.starts = [batch.rows[i] for i in kept], [batch.starts[i] for i in kept]
    batch.counts = [1] * len(kept)
    schedule.sequences = [schedule.sequences[i] for i in kept]


def add(writer: BatchWriter, schedule: Schedule, drafts: Drafts) -> None:
    """Add decodes with drafts at the end of a batch. The blocks of their last known tokens have been prepared."""
    batch = schedule.batch
    for seq, draft in drafts.items():
        start, count, first = seq.num_computed_tokens, 1 + len(draft), batch.num_tokens
        writer.grow(batch, seq, count)
        assert seq.row is not None
        batch.tokens += [(seq.row, start + i, token_id) for i, token_id in enumerate(draft, 1)]
        batch.rows.append(seq.row)
        batch.starts.append(start)
        batch.counts.append(count)
        if seq.token_mask is not None:
            batch.masks |= dict(enumerate(schedule.draft_masks[seq], len(batch.sampled_rows)))
        batch.sampled_from += range(first, first + count)
        batch.sampled_rows += [seq.row] * count
        schedule.sequences.append(seq)
        schedule.drafted.append((seq, draft))


def accept(queues: Queues, drafter: Drafter, schedule: Schedule, result: BatchResult, now: float) -> list[Sequence]:
    """Take in the samples of the decodes with drafts. Returns the sequence of each token that was appended.

    Args: result: of the step; the samples of decodes with drafts are its last ones. now: when it came.
    """
    taken: list[Sequence] = []
    end = len(schedule.samplers)
    for seq, draft in schedule.drafted:
        first, end = end, end + 1 + len(draft)
        sampled, accepted = result.token_ids[first:end], 0
        if seq.finish_reason is None and NO_TOKEN in sampled:
            # Perhaps only because of the draft: K and V that are not finite change what other tokens attend to.
            seq.takes_drafts, seq.num_in_flight = False, 0
            recompute(queues, seq.group)
        elif seq.finish_reason is None:
            while accepted < len(draft) and draft[accepted] == sampled[accepted]:
                accepted += 1
            tables = [result.logprobs.get(index) for index in range(first, end)]
            appended = _append(queues, seq, sampled[: accepted + 1], tables, now)
            taken += [seq] * appended
            ends_early = appended <= accepted and appended < len(draft)  # nothing is known of the rest of the draft
            accepted = min(accepted, appended)
            if ends_early:
                schedule.cut.append(seq)
            drafter.learn(seq, accepted if ends_early else len(draft), accepted)
        else:
            schedule.cut.append(seq)
        schedule.num_accepted.append(accepted)
    return taken


def _append(
    queues: Queues, seq: Sequence, token_ids: list[int], logprobs: list[LogprobTable | None], now: float
) -> int:
    """Append tokens to a sequence up to one that ends it. Returns how many were appended."""
    group, manager, number, ending = seq.group, queues.block_manager, 0, None
    if group.metrics.token_times[-1:] != [now]:
        group.metrics.token_times.append(now)
    seq.num_in_flight = len(token_ids)
    while ending is None and number < len(token_ids):
        seq.append(token_ids[number], logprobs[number])
        ending = seq.find_ending()
        number += 1
    if group.status is Status.RUNNING:  # it has its blocks
        seq.num_computed_tokens = len(seq.token_ids) - 1
        manager.register(seq.seq_id, seq.token_ids, seq.num_computed_tokens, seq.cache_salt)
        manager.slide(seq.seq_id, seq.num_computed_tokens)
        manager.shrink(seq.seq_id, len(seq.token_ids))
        seq.num_sent_blocks = min(seq.num_sent_blocks, len(manager.block_tables[seq.seq_id]))
    if ending is not None:
        queues.finish(group, seq, *ending)
    return number
