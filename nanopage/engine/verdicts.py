"""Verdicts on drafts: what the scheduler does with decodes that try several tokens in one step.

`Drafts` chooses the tokens to try, and judges what was sampled behind each of them (see speculation/drafts.py).
"""

from typing import Protocol

from nanopage.engine.preemption import recompute
from nanopage.engine.queues import Queues
from nanopage.engine.schedule import Schedule
from nanopage.engine.sequence import Sequence, Status
from nanopage.outputs import StepStats
from nanopage.step import BatchResult, LogprobTable


class Drafts(Protocol):
    """Guesses at the next tokens of decodes. speculation/drafts.py says what the methods do."""

    def choose(self, queues: Queues, schedule: Schedule, max_num_seqs: int) -> dict[Sequence, list[int]]: ...
    def judge(self, draft: list[int], sampled: list[int]) -> list[int] | None: ...
    def learn(self, seq: Sequence, num_drafted: int, num_accepted: int) -> None: ...
    def observe(self, stats: StepStats) -> None: ...
    def rest(self) -> None: ...
    def restart(self) -> None: ...


def accept(queues: Queues, drafts: Drafts, schedule: Schedule, result: BatchResult, now: float) -> list[Sequence]:
    """Take in the samples of the decodes with drafts. Returns the sequence of each token that was appended.

    Args: result: of the step; the samples of decodes with drafts are its last ones. now: when it came.
    """
    taken: list[Sequence] = []
    end = len(schedule.samplers)
    for seq, draft in schedule.drafted:
        first, end = end, end + 1 + len(draft)
        accepted, ends_early = 0, seq.finish_reason is not None
        token_ids = None if ends_early else drafts.judge(draft, result.token_ids[first:end])
        if token_ids is not None:
            tables = [result.logprobs.get(index) for index in range(first, end)]
            appended = _append(queues, seq, token_ids, tables, now)
            taken += [seq] * appended
            accepted = min(len(token_ids) - 1, appended)
            ends_early = appended < len(token_ids) and appended < len(draft)  # nothing is known of the draft's rest
            drafts.learn(seq, accepted if ends_early else len(draft), accepted)
        elif not ends_early:
            seq.takes_drafts, seq.num_in_flight = False, 0
            recompute(queues, seq.group)
        schedule.num_accepted.append(accepted)
        schedule.tell("draft", seq, len(draft), accepted, ends_early)
    return taken


def _append(
    queues: Queues, seq: Sequence, token_ids: list[int], logprobs: list[LogprobTable | None], now: float
) -> int:
    """Append tokens to a sequence up to one that ends it. Returns how many were appended."""
    group, manager, number, ending = seq.group, queues.block_manager, 0, None
    group.metrics.count_step(now)
    seq.num_in_flight = len(token_ids)
    while ending is None and number < len(token_ids):
        ending = seq.take(token_ids[number], logprobs[number])
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
