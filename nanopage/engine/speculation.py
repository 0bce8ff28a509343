"""Speculative decoding: NgramDrafter guesses the next tokens of sequences from their own tokens. DraftGains decides
which drafts pay, also for those of a draft model (draft_model.py).

A text often repeats parts of itself: an answer quotes the document it is about, an edit copies most of the code. If the
last few tokens of a sequence have occurred in it before, the draft is what followed them there (prompt lookup; Saxena
2023). A step computes the draft beside the last known token and samples a token behind each of them. As long as the
samples equal the draft, they are what one step after the other would have sampled, and one step yields several tokens.
The first sample that differs is still right, because it depends only on the tokens before it. What follows is dropped.

So the output is exactly that without drafts, with seeds as well, because the noise of a token depends only on the seed,
the position and the token id. (In 16-bit types, rounding depends on the number of rows of a step, as without drafts.)

A draft costs time whether it is right or not. `DraftGains.choose` takes the drafts that promise the most tokens per
second, and none if that is no more than without:

    tokens     a sequence that accepts a share p of its drafts' tokens yields 1 + p + p^2 + ... + p^n tokens
    seconds    what steps with as many rows, and as many tokens of drafts, have taken (`StepCosts`)
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from nanopage.config import SpeculativeConfig
from nanopage.engine.schedule import Schedule
from nanopage.engine.sequence import Sequence
from nanopage.outputs import StepStats

MOST_ROWS = 32  # With more sequences, a step computes so much that drafts do not pay: do not even look for them.
LEAST_SPEEDUP = 1.15  # that drafts must promise: both the times and the shares are rough
EXPECTED_SHARE = 0.5  # of the tokens of drafts that is accepted, before anything is known
FIXED_COST = 32  # of a step, in rows, until steps with drafts are measured: a high guess, so that a draft is tried
FORGET_AFTER = 256  # steps, after which a measured time is measured again


class DraftGains:
    """Which drafts pay: learns from the steps of an engine what they take, and how often drafts are right."""

    def __init__(self) -> None:
        self.costs, self.acceptance = StepCosts(), Acceptance()

    def choose(
        self,
        drafts: dict[Sequence, int],
        most: int,
        num_rows: int,
        seconds_to_make: Callable[[int], float] = lambda length: 0.0,
    ) -> dict[Sequence, int]:
        """How many tokens of each draft promise the most tokens per second.

        Args:
            drafts: how long each could be.
            most: tokens of all drafts together.
            num_rows: of the step.
            seconds_to_make: the time in which drafts of up to so many tokens are made.
        """
        everywhere = self.acceptance.share(EXPECTED_SHARE)
        gains = []  # (probability that the token is accepted, its number in its draft, the sequence)
        for seq, length in drafts.items():
            share = state_of(seq).acceptance.share(everywhere)
            gains += [(share ** (i + 1), i + 1, seq) for i in range(length)]
        gains.sort(key=lambda gain: -gain[0])  # the tokens of a draft stay in order
        plain = self.costs.estimate(num_rows, 0)
        best, best_speedup, tokens, longest = 0, LEAST_SPEEDUP, float(num_rows), 0
        for number, (probability, place, _) in enumerate(gains[:most], 1):
            tokens, longest = tokens + probability, max(longest, place)
            seconds = self.costs.estimate(num_rows, number)
            if plain and seconds:
                speedup = tokens / num_rows * plain / (seconds + seconds_to_make(longest))
                if speedup > best_speedup:
                    best, best_speedup = number, speedup
        lengths: dict[Sequence, int] = {}
        for _, place, seq in gains[:best]:
            lengths[seq] = place
        for seq in drafts.keys() - lengths.keys():
            state_of(seq).acceptance.fade(0.98)  # so that it is tried again some day
        if drafts and not lengths:
            self.acceptance.fade(0.99)
        return lengths

    def learn(self, seq: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Take in how many tokens of a draft were sampled."""
        state_of(seq).acceptance.add(num_drafted, num_accepted, 0.9)
        self.acceptance.add(num_drafted, num_accepted, 0.99)

    def observe(self, stats: StepStats, seconds: float) -> None:
        """Take in a step and its time, without that of making its drafts."""
        if not (stats.prefill_tokens or stats.swapped_in or stats.swapped_out):
            self.costs.add(stats.decode_tokens - stats.draft_tokens, stats.draft_tokens, seconds)


class NgramDrafter:
    """Proposes drafts from the sequences' own tokens (a `Drafter`, see drafts.py)."""

    def __init__(self, config: SpeculativeConfig):
        self.config, self.gains = config, DraftGains()

    def propose(self, decodes: list[Sequence], most: int, schedule: Schedule) -> dict[Sequence, list[int]]:
        num_rows = len(schedule.sequences)
        if schedule.chunks or num_rows > MOST_ROWS or self.gains.costs.estimate(num_rows, 0) is None:
            return {}
        drafts = {seq: draft for seq in decodes if (draft := self._draft(seq))}
        lengths = self.gains.choose({seq: len(draft) for seq, draft in drafts.items()}, most, num_rows)
        return {seq: drafts[seq][:length] for seq, length in lengths.items()}

    def learn(self, seq: Sequence, num_drafted: int, num_accepted: int) -> None:
        self.gains.learn(seq, num_drafted, num_accepted)

    def observe(self, stats: StepStats) -> None:
        self.gains.observe(stats, stats.seconds)

    def rest(self) -> None:
        """What it knows of a sequence goes with the sequence."""

    def restart(self) -> None:
        """What it knows of a sequence depends on nothing but its tokens."""

    def _draft(self, seq: Sequence) -> list[int]:
        state = state_of(seq)
        if state.index is None:
            state.index = NgramIndex(self.config.prompt_lookup_max, self.config.prompt_lookup_min)
        return state.index.draft(seq.token_ids, self.config.num_speculative_tokens)


class NgramIndex:
    """Where the n-grams of a sequence have last occurred, for all n from `shortest` to `longest`.

    `followers` has, for each n-gram, the position of the token that followed it there. It is extended when a draft is
    asked for, by the tokens that have come since: a microsecond for each.
    """

    def __init__(self, longest: int, shortest: int):
        self.longest, self.shortest = longest, shortest
        self.followers: dict[tuple[int, ...], int] = {}
        self.num_indexed = 0  # tokens

    def draft(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """What followed the longest n-gram at the end of `token_ids` when it last occurred; an empty list if none has
        occurred. Where this reaches the end, it is repeated from its beginning.

        Args: token_ids: those of the previous call, and more.
        """
        self._extend(token_ids)
        end = len(token_ids)
        for n in range(min(self.longest, end), self.shortest - 1, -1):
            start = self.followers.get(tuple(token_ids[end - n :]))
            if start is not None:
                return [token_ids[start + i % (end - start)] for i in range(num_tokens)]
        return []

    def _extend(self, token_ids: list[int]) -> None:
        followers = self.followers
        for position in range(max(self.num_indexed, self.shortest), len(token_ids)):
            for n in range(self.shortest, min(self.longest, position) + 1):
                followers[tuple(token_ids[position - n : position])] = position
        self.num_indexed = len(token_ids)


@dataclass(slots=True)
class Acceptance:
    """Which share of the tokens of drafts is accepted. Later drafts count more than earlier ones."""

    accepted: float = 0.0
    tried: float = 0.0  # accepted tokens, and the first of each draft that was not

    def add(self, num_drafted: int, num_accepted: int, kept: float) -> None:
        """Count a draft. kept: how much of the present counts stays."""
        self.fade(kept)
        self.accepted += num_accepted
        self.tried += min(num_accepted + 1, num_drafted)

    def fade(self, kept: float) -> None:
        self.accepted *= kept
        self.tried *= kept

    def share(self, expected: float) -> float:
        """The share, which is `expected` as long as nothing is known."""
        return (self.accepted + expected) / (self.tried + 1)


@dataclass(slots=True)
class DraftState:
    """What a drafter keeps of a sequence."""

    index: NgramIndex | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)


def state_of(seq: Sequence) -> DraftState:
    if seq.draft_state is None:
        seq.draft_state = DraftState()
    return seq.draft_state


@dataclass(slots=True)
class Measured:
    """The mean time of some steps. Later steps count more than earlier ones, up to a point.

    last: the number of the last of them.
    """

    seconds: float
    last: int
    count: int = 1

    def add(self, seconds: float, number: int) -> None:
        self.count += 1
        seconds = min(seconds, 2 * self.seconds)  # so that one interruption does not count for long
        self.seconds += (seconds - self.seconds) * max(1 / self.count, 0.2)
        self.last = number


class StepCosts:
    """How long steps of decodes take, by their number of rows and of tokens of drafts. Old times are forgotten, because
    contexts grow, and because a machine may be busy for a while."""

    def __init__(self) -> None:
        self.measured: dict[int, dict[int, Measured]] = {}  # rows -> tokens of drafts -> time
        self.num_steps = 0

    def add(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        """Count a step."""
        if num_rows <= 0:
            return
        self.num_steps += 1
        times, key = self.measured.setdefault(rounded(num_rows), {}), rounded(num_drafted)
        if key in times and self.num_steps - times[key].last <= FORGET_AFTER:
            times[key].add(seconds, self.num_steps)
        else:
            times[key] = Measured(seconds, self.num_steps)

    def estimate(self, num_rows: int, num_drafted: int) -> float | None:
        """The seconds of a step; None if steps without drafts have not been measured twice.

        Between two measured numbers of tokens, and beyond the largest, the time is taken to grow evenly. If no step
        with drafts has been measured, most of a step's time is taken to depend on neither rows nor drafts.
        """
        times = self.measured.get(rounded(num_rows), {})
        known = {n: each for n, each in times.items() if self.num_steps - each.last <= FORGET_AFTER}
        if 0 not in known or known[0].count < 2:
            return None
        number = rounded(num_drafted)
        below = max(n for n in known if n <= number)
        above = min((n for n in known if n >= number), default=None)
        start, seconds = known[0].seconds, known[below].seconds
        if above is not None and above > below:
            return seconds + (known[above].seconds - seconds) * (number - below) / (above - below)
        if below == 0:
            return seconds * (1 + number / (num_rows + FIXED_COST))
        return max(seconds, start + (seconds - start) * number / below)


def rounded(number: int) -> int:
    """A number to three binary digits, rounded down: 0, 1, ..., 7, 8, 10, 12, 14, 16, 20, ..."""
    digits = max(0, number.bit_length() - 3)
    return number >> digits << digits
