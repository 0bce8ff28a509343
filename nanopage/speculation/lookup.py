"""Speculative decoding: NgramDrafter guesses the next tokens of sequences from their own tokens. DraftGains decides
which drafts pay, including those of a draft model (draft_model.py) and of a head (head_drafter.py).

A text often repeats parts of itself: an answer quotes the document it is about, an edit copies most of the code. If the
last few tokens of a sequence have occurred in it before, the draft is what followed them there (prompt lookup; Saxena
2023). A step computes the draft together with the last known token, and samples a token after each of them. As long as
the samples equal the draft, single steps would have sampled the same tokens, and one step yields several of them. The
first sample that differs is still right, because it depends only on the tokens before it. Later samples are dropped.

So the output is exactly the output without drafts, even with seeds, because the noise of a token depends only on the
seed, the position and the token id. (In dtypes smaller than float64, rounding depends on the number of rows of a step,
as it does without drafts, and near-ties can fall either way, unless the engine has `batch_invariant`.)

A draft costs time whether it is right or not. `DraftGains.choose` takes the drafts that promise to save the most time:

    tokens     a draft of n tokens yields p + p^2 + ... + p^n tokens if each is accepted with probability p. p comes
               from the sequence's earlier drafts, and from all drafts after an n-gram of this length (`Acceptance`)
    worth      an accepted token saves a step for all sequences together, which share this gain (`worths_of`)
    seconds    a line gives a step's time by its tokens of drafts, fitted to steps with as many rows (`StepTimes`)

Estimates can be wrong, so `DraftGains` keeps an account, which begins with the time of three steps. Drafts pay what
they lose, and each step adds a 200th of a step. While the account is empty, there are no drafts.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from nanopage.checks.speculation import MOST_ROWS, SpeculativeConfig
from nanopage.engine.schedule import Schedule
from nanopage.engine.sequence import Sequence
from nanopage.outputs import StepStats

LEAST_SPEEDUP = 1.08  # drafts must promise at least this, because times and shares are only estimates
EXPECTED_SHARE = 0.5  # accepted share of the tokens of drafts, before anything is known
OTHERS_COUNT = 2  # The accepted share of other sequences' drafts counts like this many tokens of the sequence's own.
MOST_LOSS = 3.0  # steps that drafts may lose before they are given up for a while
LOSS_PER_STEP = 0.005  # added to this limit after each step
FIXED_COST = 32  # a step's cost besides its rows, in rows, before drafts are measured: high, so that one is tried
FORGET_AFTER = 256  # steps after which a time is measured again


class DraftGains:
    """Decides which drafts pay. Learns from an engine's steps how long they take and how often drafts are right."""

    def __init__(self) -> None:
        self.costs = StepCosts()
        self.acceptance: dict[int, Acceptance] = {}  # reason -> acceptance of all drafts with this reason
        self.may_lose = MOST_LOSS  # time that drafts may still lose, in steps
        self.saved = 0.0  # time that the drafts of this step have saved, in steps

    def choose(
        self,
        drafts: dict[Sequence, int],
        most: int,
        schedule: Schedule,
        seconds_to_make: Callable[[int], float] = lambda length: 0.0,
    ) -> dict[Sequence, int]:
        """How many tokens of each draft promise to save the most time.

        Args:
            drafts: how long each draft could be. The state of the sequence has the draft's `reason`.
            most: tokens of all drafts together.
            schedule: the schedule of the step.
            seconds_to_make: number of tokens -> the time for making drafts of up to this length.
        """
        times = self.times_of(schedule)
        if times is None or self.may_lose <= 0:
            return {}
        a, b = times.line()
        worths = worths_of(schedule, b)
        gains = []  # (time that the token is expected to save, its number in its draft, the sequence)
        for seq, length in drafts.items():
            state = state_of(seq)
            state.worth = worths[seq]
            share = state.acceptance.share(self._acceptance(state.reason).share(EXPECTED_SHARE), OTHERS_COUNT)
            gains += [(share ** (i + 1) * state.worth, i + 1, seq) for i in range(length)]
        gains.sort(key=lambda gain: -gain[0])  # the tokens of a draft stay in order
        best, best_speedup, steps, longest = 0, LEAST_SPEEDUP, 1.0, 0
        for number, (gain, place, _) in enumerate(gains[:most], 1):
            steps, longest = steps + gain, max(longest, place)
            seconds = times.plain * (1 + max(0.0, a + b * number)) + seconds_to_make(longest)
            speedup = steps * times.plain / seconds
            if speedup > best_speedup:
                best, best_speedup = number, speedup
        lengths: dict[Sequence, int] = {}
        for _, place, seq in gains[:best]:
            lengths[seq] = place
        refused = [state_of(seq) for seq in drafts.keys() - lengths.keys()]
        for state in refused:  # so that their sequences get drafts again some day
            state.acceptance.fade(0.98)
        if not lengths:
            for reason in {state.reason for state in refused}:
                self._acceptance(reason).fade(0.99)
        return lengths

    def times_of(self, schedule: Schedule) -> "StepTimes | None":
        """The times of steps with as many rows as this one. None if they have not been measured, or are too many."""
        # Decodes have several rows if layers with a state compute accepted tokens again.
        num_rows = len(schedule.singles) + sum(num_tokens for _, num_tokens in schedule.chunks)
        return None if num_rows > MOST_ROWS else self.costs.of(num_rows)

    def learn(self, seq: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Take in how many tokens of a draft were sampled."""
        state = state_of(seq)
        self.saved += num_accepted * state.worth
        state.acceptance.add(num_drafted, num_accepted, 0.9)
        self._acceptance(state.reason).add(num_drafted, num_accepted, 0.99)

    def observe(self, stats: StepStats, seconds: float, seconds_to_make: float = 0.0) -> None:
        """Take in a step and its time, without the time for making its drafts."""
        num_rows, saved, self.saved = stats.decode_tokens - stats.draft_tokens, self.saved, 0.0
        if stats.prefill_tokens or stats.swapped_in or stats.swapped_out or num_rows <= 0:
            return
        times = self.costs.of(num_rows)
        if times is not None:
            lost = (seconds + seconds_to_make) / times.plain - 1 - saved if stats.draft_tokens else 0.0
            self.may_lose = min(MOST_LOSS, self.may_lose + LOSS_PER_STEP - lost)
        self.costs.add(num_rows, stats.draft_tokens, seconds)

    def _acceptance(self, reason: int) -> "Acceptance":
        return self.acceptance.setdefault(reason, Acceptance())


def worths_of(schedule: Schedule, row: float) -> dict[Sequence, float]:
    """How much time one more token saves in each sequence of a step, in steps.

    If requests wait, a token saves its share of a step, because another request gets the row earlier. Otherwise it
    saves the cost of its row, and a share of the rest of a step, because the others may wait for this sequence. The
    more tokens a sequence may still get, the larger is its share.

    Args: row: the cost of one more row, as a part of a step's time.
    """
    seqs = [*schedule.singles, *(seq for seq, _ in schedule.chunks)]
    num_rows = len(seqs)
    if schedule.wait is not None:
        return dict.fromkeys(seqs, 1 / num_rows)
    left = [max(1, seq.max_total_tokens - len(seq.token_ids)) for seq in seqs]
    most, row = max(left), min(row, 1 / num_rows)
    shares = [(each / most) ** 8 for each in left]
    common = (1 - num_rows * row) / sum(shares)
    return {seq: row + common * share for seq, share in zip(seqs, shares, strict=True)}


class NgramDrafter:
    """Proposes drafts from the sequences' own tokens (a `Drafter`, see drafts.py)."""

    def __init__(self, config: SpeculativeConfig):
        self.config, self.gains = config, DraftGains()
        self.learn = self.gains.learn

    def propose(self, decodes: list[Sequence], most: int, schedule: Schedule) -> dict[Sequence, list[int]]:
        if schedule.chunks or self.gains.times_of(schedule) is None:
            return {}
        drafts = {seq: draft for seq in decodes if (draft := self._draft(seq))}
        lengths = self.gains.choose({seq: len(draft) for seq, draft in drafts.items()}, most, schedule)
        return {seq: drafts[seq][:length] for seq, length in lengths.items()}

    def observe(self, stats: StepStats) -> None:
        self.gains.observe(stats, stats.seconds)

    def rest(self) -> None:
        """Does nothing: the knowledge of a sequence ends with the sequence."""

    def restart(self) -> None:
        """Does nothing: the knowledge of a sequence depends only on its tokens."""

    def _draft(self, seq: Sequence) -> list[int]:
        state = state_of(seq)
        if state.index is None:
            state.index = NgramIndex(self.config.prompt_lookup_max, self.config.prompt_lookup_min)
        draft, state.reason = state.index.draft(seq.token_ids, self.config.num_speculative_tokens)
        return draft


class NgramIndex:
    """Where the n-grams of a sequence have last occurred, for all n from `shortest` to `longest`.

    `followers` has, for each n-gram, the position of the token that followed it there. A call of `draft` first adds the
    tokens that have come since the last one, which takes a microsecond for each.
    """

    def __init__(self, longest: int, shortest: int):
        self.longest, self.shortest = longest, shortest
        self.followers: dict[tuple[int, ...], int] = {}
        self.num_indexed = 0  # tokens

    def draft(self, token_ids: list[int], num_tokens: int) -> tuple[list[int], int]:
        """The tokens that followed the longest n-gram at the end of `token_ids` when it last occurred, and the n-gram's
        length. An empty list and 0 if no n-gram has occurred. If the tokens that followed reach the end, they are
        repeated from their beginning.

        Args: token_ids: the tokens of the previous call, and more.
        """
        self._extend(token_ids)
        end = len(token_ids)
        for n in range(min(self.longest, end), self.shortest - 1, -1):
            start = self.followers.get(tuple(token_ids[end - n :]))
            if start is not None:
                return [token_ids[start + i % (end - start)] for i in range(num_tokens)], n
        return [], 0

    def _extend(self, token_ids: list[int]) -> None:
        followers = self.followers
        for position in range(max(self.num_indexed, self.shortest), len(token_ids)):
            for n in range(self.shortest, min(self.longest, position) + 1):
                followers[tuple(token_ids[position - n : position])] = position
        self.num_indexed = len(token_ids)


@dataclass(slots=True)
class Acceptance:
    """The accepted share of the tokens of drafts. Later drafts count more than earlier ones."""

    accepted: float = 0.0
    tried: float = 0.0  # accepted tokens, and the first token of each draft that was not accepted

    def add(self, num_drafted: int, num_accepted: int, kept: float) -> None:
        """Count a draft. kept: how much of the present counts stays."""
        self.fade(kept)
        self.accepted += num_accepted
        self.tried += min(num_accepted + 1, num_drafted)

    def fade(self, kept: float) -> None:
        self.accepted *= kept
        self.tried *= kept

    def share(self, expected: float, weight: float = 1.0) -> float:
        """The accepted share. The share that is expected before anything is known counts like `weight` tokens."""
        return (self.accepted + weight * expected) / (self.tried + weight)


@dataclass(slots=True)
class DraftState:
    """What a drafter knows of a sequence.

    reason: the length of the n-gram that its last draft came from; 0 if a model made the draft.
    worth: the time that a token of the draft saves, in steps.
    """

    index: NgramIndex | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)
    reason: int = 0
    worth: float = 0.0


def state_of(seq: Sequence) -> DraftState:
    if seq.draft_state is None:
        seq.draft_state = DraftState()
    return seq.draft_state


class StepTimes:
    """The time of steps with a given number of rows: the mean without drafts, and the time that drafts add.

    A step with n > 0 tokens of drafts takes 1 + a + b n times that mean. A regression fits a and b to the steps that
    had drafts and to two points of a guess. Multiples stay right when contexts grow, or when another process takes a
    core. Later steps count more than earlier ones.

    Args:
        seconds: the time of the first step without drafts.
        number: the number of this step, among all steps.
        guess: the multiple that a token of a draft is expected to add.
    """

    def __init__(self, seconds: float, number: int, guess: float):
        self.restart(seconds, number)
        self.guess = guess
        self.sums = [0.0] * 5  # over steps with drafts: 1, n, n^2, y and n y, where y is a step's multiple minus 1

    def restart(self, seconds: float, number: int) -> None:
        """Forget the mean, and begin with this step, which had no drafts."""
        self.plain, self.last, self.count = seconds, number, 1

    def add(self, num_drafted: int, seconds: float, number: int) -> None:
        """Count a step."""
        seconds = min(seconds, 2 * self.estimate(num_drafted))  # so that one interruption does not count for long
        if num_drafted == 0:
            self.last, self.count = number, self.count + 1
            self.plain += (seconds - self.plain) * max(1 / self.count, 0.2)
        else:
            point = powers(num_drafted, seconds / self.plain - 1)
            self.sums = [0.95 * old + new for old, new in zip(self.sums, point, strict=True)]

    def estimate(self, num_drafted: int) -> float:
        """The seconds of a step."""
        if num_drafted == 0:
            return self.plain
        a, b = self.line()
        return self.plain * (1 + max(0.0, a + b * num_drafted))

    def line(self) -> tuple[float, float]:
        """a and b."""
        guesses = powers(1, self.guess), powers(8, 8 * self.guess)  # each guess counts like a quarter of a step
        count, n, nn, y, ny = (s + (one + eight) / 4 for s, one, eight in zip(self.sums, *guesses, strict=True))
        b = max(0.0, (count * ny - n * y) / (count * nn - n * n))
        return (y - b * n) / count, b


def powers(n: int, y: float) -> tuple[float, ...]:
    """What a point adds to the sums of a linear regression."""
    return 1.0, n, n * n, y, n * y


class StepCosts:
    """How long steps of decodes take. A time without drafts is forgotten if no such step has come for a while."""

    def __init__(self) -> None:
        self.times: dict[int, StepTimes] = {}  # by the rounded number of rows
        self.num_steps = 0

    def add(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        """Count a step."""
        if num_rows <= 0:
            return
        self.num_steps += 1
        times = self.times.get(rounded(num_rows))
        if times is not None and (num_drafted > 0 or self._is_recent(times)):
            times.add(num_drafted, seconds, self.num_steps)
        elif times is not None:
            times.restart(seconds, self.num_steps)
        elif num_drafted == 0:
            self.times[rounded(num_rows)] = StepTimes(seconds, self.num_steps, 1 / (num_rows + FIXED_COST))

    def of(self, num_rows: int) -> StepTimes | None:
        """The times of steps with `num_rows` rows; None if steps without drafts have not been measured twice lately."""
        times = self.times.get(rounded(num_rows))
        return times if times is not None and times.count > 1 and self._is_recent(times) else None

    def _is_recent(self, times: StepTimes) -> bool:
        return self.num_steps - times.last <= FORGET_AFTER


def rounded(number: int) -> int:
    """A number to three binary digits, rounded down: 0, 1, ..., 7, 8, 10, 12, 14, 16, 20, ..."""
    digits = max(0, number.bit_length() - 3)
    return number >> digits << digits
