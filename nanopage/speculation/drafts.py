"""Drafts: guesses at the next tokens of sequences, of which one step checks several.

A decode with a draft is a row of a step with 1 + n tokens: the last known token, and the n tokens of the draft. A token
is sampled behind each of them. As long as the samples equal the draft, they are the sequence's next tokens. The first
sample that differs is its next token, too. What follows was computed with a wrong token: it is dropped, and later steps
overwrite its K and V. So the output does not depend on drafts, only the number of steps does.

A `Drafter` makes the guesses (see lookup.py and draft_model.py). `Drafts` says which of them a step tries, and what
follows from the samples. The scheduler acts on that (see engine/verdicts.py).
"""

from typing import Protocol

from nanopage.engine.queues import Queues
from nanopage.engine.schedule import Schedule
from nanopage.engine.sequence import Sequence
from nanopage.outputs import StepStats
from nanopage.step import NO_TOKEN

SAMPLES_IN_ANY_CASE = 16  # tokens that a step may sample if `max_num_seqs` is smaller: their logits take little memory


class Drafter(Protocol):
    """Guesses the next tokens of decodes."""

    def propose(self, decodes: list[Sequence], most: int, schedule: Schedule) -> dict[Sequence, list[int]]:
        """Draft the tokens that follow the known tokens of some of these sequences.

        Args:
            decodes: those of `schedule.singles` that may have drafts.
            most: how many tokens all drafts together may have. More are cut off.
            schedule: of the step, with `singles` and `chunks`.
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
    """What a scheduler asks about the guesses of a drafter (its `Drafts`, see engine/verdicts.py)."""

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
        self.learn, self.observe = drafter.learn, drafter.observe
        self.rest, self.restart = drafter.rest, drafter.restart

    def choose(self, queues: Queues, schedule: Schedule, max_num_seqs: int) -> dict[Sequence, list[int]]:
        """The drafts that a step tries, when its other work is scheduled.

        They take only what is left of the token budget and of the free blocks; those of refused drafts are given back
        before the next step is scheduled. There are none in a step that preempts a group, or runs a suspect alone.
        """
        drafts: dict[Sequence, list[int]] = {}
        if queues.suspects or schedule.preempted:
            return drafts
        samples = sum(1 if seq.group.forked else len(seq.group.live) for seq in schedule.singles) + len(schedule.chunks)
        budget = min(schedule.left, max(max_num_seqs, SAMPLES_IN_ANY_CASE) - samples)
        decodes = [seq for seq in schedule.singles if takes_drafts(seq)]
        if not decodes or budget <= 0:
            return drafts
        manager = queues.block_manager
        free = manager.num_free_blocks
        for seq, draft in self.drafter.propose(decodes, budget, schedule).items():
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

    def judge(self, draft: list[int], sampled: list[int]) -> list[int] | None:
        """The tokens that follow a sequence, by what was sampled behind its last known token and behind each token of
        its draft. None if it is to be computed again without a draft: no token could be sampled somewhere, and perhaps
        only because of the draft. K and V that are not finite change what other tokens attend to."""
        if NO_TOKEN in sampled:
            return None
        agreed = 0
        while agreed < len(draft) and draft[agreed] == sampled[agreed]:
            agreed += 1
        return sampled[: agreed + 1]


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
