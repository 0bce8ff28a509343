"""Beam search: which continuations become the next beams, and which completed hypotheses are kept.

The rules are those of transformers' `generate(num_beams=...)` (5.x), so that both return the same sequences with the
same scores. The scheduler updates block tables by forking and freeing sequences (`advance_searches`).
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Hypothesis:
    """A beam that has ended. `score` is cumulative_logprob / len(token_ids) ** length_penalty; None if aborted."""

    token_ids: list[int]
    cumulative_logprob: float
    score: float | None
    finish_reason: str


@dataclass(slots=True)
class Beam:
    """A live beam, and its candidates for the next token: token id -> log-probability."""

    token_ids: list[int]
    cumulative_logprob: float
    candidates: dict[int, float]


@dataclass(slots=True)
class BeamStep:
    """What one step of a search decides.

    live        the next live beams: (index into the beams, token id, cumulative log-probability)
    hypotheses  the hypotheses to keep, best first
    finished    whether the search is over; `live` then has no meaning
    """

    live: list[tuple[int, int, float]]
    hypotheses: list[Hypothesis]
    finished: bool


@dataclass(slots=True)
class BeamSearch:
    """The state of one request's search, without its live beams.

    Args:
        width: live beams, and hypotheses returned.
        max_tokens: most output tokens, including end-of-sequence.
        length_penalty: the exponent of the length in a hypothesis' score. Above 0 it favors longer hypotheses.
        early_stopping: when to stop once there are `width` hypotheses. True: at once. False: if the best live beam's
            score at its present length is not better than the worst hypothesis. "never": if its score could not be
            better at any length.
        eos_token_ids: end a beam.
    """

    width: int
    max_tokens: int
    length_penalty: float
    early_stopping: bool | str
    eos_token_ids: frozenset[int]
    hypotheses: list[Hypothesis] = field(default_factory=list)  # best first, at most `width`
    finished: bool = False

    @property
    def num_candidates(self) -> int:
        """The number of candidates of each beam: enough for `width` beams to continue even if the candidates include
        every end-of-sequence token of every beam."""
        return max(2, 1 + len(self.eos_token_ids)) * self.width

    def choose(self, beams: list[Beam]) -> BeamStep:
        """Decide one step. Changes nothing until `accept`."""
        continuations = [
            (beam.cumulative_logprob + logprob, index, token_id)
            for index, beam in enumerate(beams)
            for token_id, logprob in beam.candidates.items()
        ]
        continuations.sort(key=lambda c: (-c[0], c[1], c[2]))
        del continuations[self.num_candidates :]
        length = len(beams[0].token_ids) + 1
        full = len(self.hypotheses) == self.width
        live, hypotheses = [], list(self.hypotheses)
        for place, (cumulative, index, token_id) in enumerate(continuations):
            if token_id not in self.eos_token_ids and length < self.max_tokens:
                live.append((index, token_id, cumulative))
            elif place < self.width and not (full and self.early_stopping is True):
                reason = "stop" if token_id in self.eos_token_ids else "length"
                token_ids = [*beams[index].token_ids, token_id]
                score = cumulative / length**self.length_penalty
                hypotheses.append(Hypothesis(token_ids, cumulative, score, reason))
        del live[self.width :]
        hypotheses.sort(key=_score, reverse=True)
        del hypotheses[self.width :]
        complete = len(hypotheses) == self.width
        finished = not live or (complete and not self._could_improve(live[0][2], length, _score(hypotheses[-1])))
        return BeamStep(live, hypotheses, finished)

    def accept(self, step: BeamStep) -> None:
        """Make a step's decision the state of the search."""
        self.hypotheses, self.finished = step.hypotheses, step.finished

    def _could_improve(self, best_live: float, length: int, worst_kept: float) -> bool:
        if self.early_stopping is True:
            return False
        if self.early_stopping == "never" and self.length_penalty > 0:
            length = self.max_tokens
        return best_live / length**self.length_penalty > worst_kept


def _score(hypothesis: Hypothesis) -> float:
    assert hypothesis.score is not None
    return hypothesis.score
