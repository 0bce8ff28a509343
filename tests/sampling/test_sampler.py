"""The sampler against exact distributions and naive formulas; and that a seeded request depends on nothing else."""

import functools
import math
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
import torch
from helpers import LONG, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from on_a_cpu import floors_by_sorting
from transformers import RepetitionPenaltyLogitsProcessor

from nanopage.kernels import floors
from nanopage.sampling import dry as dry_stage
from nanopage.sampling import sampler, samples
from nanopage.sampling.argmax import argmax
from nanopage.sampling.dry import count_first
from nanopage.sampling.logprobs import make_tables, top_logprobs
from nanopage.sampling.noise import gumbel_noise
from nanopage.sampling.sampler import Sampler, sample_rows
from nanopage.sampling.truncation import CANDIDATES, truncate
from nanopage.state.sampling_table import SamplingTable
from nanopage.state.sequence_table import SequenceTable
from nanopage.step import NO_TOKEN, Batch, Fork, LogprobTable, NewSequence, SamplingSettings

INF = float("inf")
P_VALUE = 1e-4
BIG_VOCAB = 3000  # more than CANDIDATES, so that truncation has to look at more than its first guess
CPU = torch.device("cpu")
BY_SORTING = functools.partial(sample_rows, floors_by_sorting)  # all rows at once, as on a GPU
BY_KERNEL = functools.partial(sample_rows, floors.find_floors)


def scipy_stats():
    from scipy import stats  # takes half a second: not in every process of the tests

    return stats


def chi_square(counts, expected=None):
    """The p-value of counts. Args: `expected` of them; None: all alike."""
    return scipy_stats().chisquare(counts, expected).pvalue


@dataclass
class Sequence:
    """`position` is that of the token to be sampled."""

    token_ids: list[int]
    num_prompt_tokens: int
    position: int
    seed: int
    settings: SamplingSettings

    def new(self, row: int) -> NewSequence:
        return NewSequence(row, self.token_ids, self.num_prompt_tokens, self.seed, self.settings)


class SampledToken(NamedTuple):
    token_id: int
    logprobs: LogprobTable | None


def sequence(output=(), prompt=(1, 2, 3), seed=0, eos=(), bad_words=(), stop_token_ids=(), **params) -> Sequence:
    params["logit_bias"] = params.get("logit_bias") or {}
    ends, words = sorted({*eos, *stop_token_ids}), [list(word) for word in bad_words]
    chosen = SamplingSettings(bad_words_token_ids=words, ending_token_ids=ends, **params)
    return Sequence([*prompt, *output], len(prompt), len(prompt) + len(output), seed, chosen)


def sequences(count: int, varying: str = "seed", start: int = 0, **params) -> list[Sequence]:
    """Sequences that differ in their seed, or in the position of the token to be sampled."""
    shared = SamplingSettings(**params)
    if varying == "seed":
        return [Sequence([], 0, 3, number, shared) for number in range(start, start + count)]
    return [Sequence([], 0, number, 42, shared) for number in range(start, start + count)]


def sampler_of(batch: list[Sequence], vocab_size: int, sample_all=None) -> tuple[Sampler, np.ndarray, np.ndarray]:
    """A sampler of a table that holds these sequences in rows of any order, their rows and their positions.

    Args: sample_all: None, or how a GPU samples.
    """
    rows = np.random.default_rng(len(batch)).permutation(len(batch) + 3)[: len(batch)]
    positions = np.array([seq.position for seq in batch])
    table = SequenceTable(len(batch) + 3, int(positions.max()) + 1, 16, vocab_size, CPU)
    table.update(Batch(new=[seq.new(row) for row, seq in zip(rows.tolist(), batch, strict=True)]))
    return Sampler(table, sample_all), rows, positions


def tokens_of(samples) -> list[SampledToken]:
    tokens, logprobs = samples.result()
    return [SampledToken(token, logprobs.get(index)) for index, token in enumerate(tokens)]


def run(logits, batch, sample_all=None) -> list[SampledToken]:
    made, rows, positions = sampler_of(batch, logits.shape[1], sample_all)
    return tokens_of(made(logits, rows, positions))


def sample(logits, batch, sample_all=None) -> torch.Tensor:
    """The tokens, without constraints and penalties."""
    made, rows, positions = sampler_of(batch, logits.shape[1], sample_all)
    return made.sample(logits, rows, positions)


def constrain(logits, batch) -> torch.Tensor:
    """The logits with constraints and penalties."""
    made, rows, positions = sampler_of(batch, logits.shape[1])
    return made.change(logits, rows, positions)


def table_of(logits, token, wanted):
    (table,) = make_tables([token], top_logprobs(logits, torch.tensor([token]), wanted))
    return table


def table_for(batch: list[Sequence], vocab_size: int) -> SamplingTable:
    """Sampling settings, those of the first sequence in row 0, and so on."""
    table = SamplingTable(len(batch), vocab_size, CPU)
    table.add([seq.new(row) for row, seq in enumerate(batch)])
    return table


def random_logits(rows: int, vocab_size: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(rows, vocab_size, generator=generator, dtype=torch.float64).to(dtype)


def naive_kept(logits, top_k=0, top_p=1.0, min_p=0.0, temperature=1.0) -> np.ndarray:
    """The mask of tokens that may be sampled: min-p, then top-k, then top-p renormalised on what is left."""
    scaled = np.asarray(logits, np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    kept = (weights >= min_p) & (scaled > -INF)
    if top_k > 0:
        kept &= scaled >= np.sort(scaled)[::-1][min(top_k, len(scaled)) - 1]
    if top_p < 1:
        total, mass = weights[kept].sum(), 0.0
        for token in sorted(np.flatnonzero(kept), key=lambda token: -scaled[token]):
            mass += weights[token]
            if mass >= top_p * total:
                kept &= scaled >= scaled[token]
                break
    return kept


def exact_distribution(logits, temperature=1.0, **truncation) -> np.ndarray:
    kept = naive_kept(logits, temperature=temperature, **truncation)
    scaled = np.asarray(logits, np.float64) / temperature
    weights = np.where(kept, np.exp(scaled - scaled.max()), 0)
    return weights / weights.sum()


def kept_by_truncate(logits: torch.Tensor, batch: list[Sequence]) -> np.ndarray:
    """What truncate() keeps, as a mask [B, vocab_size]; checks the form of what it returns on the way."""
    before = logits.clone()
    table = table_for(batch, logits.shape[1])
    values, ids = truncate(logits, table.temperature, table.limits)
    assert torch.equal(logits, before)
    assert values.dtype == logits.dtype
    assert (values.diff(dim=-1).nan_to_num(0, neginf=-1.0) <= 0).all()
    mask = torch.zeros_like(logits, dtype=torch.bool)
    for row in range(len(batch)):
        finite = values[row] > -INF
        assert len(set(ids[row, finite].tolist())) == finite.sum()
        assert torch.equal(logits[row, ids[row, finite]], values[row, finite])
        mask[row, ids[row, finite]] = True
    return mask.numpy()


def assert_drawn_from(distribution: np.ndarray, tokens: torch.Tensor) -> None:
    counts = np.bincount(tokens.numpy(), minlength=len(distribution))
    possible = distribution > 0
    assert counts[~possible].sum() == 0
    expected = distribution[possible] * counts.sum()
    assert expected.min() > 5  # else chi-square does not apply
    assert chi_square(counts[possible], expected) > P_VALUE


# Greedy


def test_greedy_is_argmax():
    logits = random_logits(50, 200)
    tokens = sample(logits, [sequence(temperature=0, seed=row) for row in range(50)])
    assert tokens.tolist() == logits.numpy().argmax(axis=1).tolist()


@pytest.mark.parametrize("vocab_size", [7, 16, 48, 300, 1024, 49152])
@pytest.mark.parametrize("distinct", [3, 10**6], ids=["many equals", "no equals"])
def test_argmax_is_the_first_of_the_largest(vocab_size, distinct):
    logits = torch.randint(distinct, (5, vocab_size), generator=torch.Generator().manual_seed(0)).float()
    logits[4, : vocab_size - 1] = -INF
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert argmax(logits).tolist() == expected
    assert argmax(logits[:1]).tolist() == expected[:1]


@pytest.mark.parametrize("vocab_size", [7, 300, 12288])
@pytest.mark.parametrize(
    "params",
    [{"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_p": 0.5, "top_k": 20, "min_p": 0.1}],
    ids=str,
)
@pytest.mark.parametrize("sample_all", [None, BY_SORTING, pytest.param(BY_KERNEL, marks=pytest.mark.interpreter)])
def test_a_row_whose_largest_logit_is_not_finite_gives_no_token(vocab_size, params, sample_all):
    good = random_logits(1, vocab_size)[0]
    rows = [good.clone() for _ in range(6)]
    rows[0][vocab_size - 1] = math.nan
    rows[1][:] = math.nan
    rows[2][0] = INF
    rows[3][:] = -INF
    rows[4][1:] = -INF  # only token 0 is possible
    batch = [sequence(seed=row, **params) for row in range(6)]
    tokens = sample(torch.stack(rows), batch, sample_all).tolist()
    assert tokens[:5] == [NO_TOKEN, NO_TOKEN, NO_TOKEN, NO_TOKEN, 0]
    assert tokens[5] == sample(good[None], batch[5:]).item()
    batch = [sequence(seed=5, logprobs=2, **params) for _ in range(6)]
    result = run(torch.stack(rows), batch, sample_all)
    assert [token.token_id for token in result] == tokens
    assert result[5].logprobs[tokens[5]][0] > -INF


def test_greedy_ignores_truncation():
    logits = random_logits(20, 100)
    batch = [sequence(temperature=0, top_k=5, top_p=0.3, min_p=0.2, seed=row) for row in range(20)]
    assert sample(logits, batch).tolist() == logits.argmax(dim=-1).tolist()


def test_greedy_rows_are_argmax_among_sampled_ones():
    logits = random_logits(60, 100)
    kinds = [{"temperature": 0}, {"temperature": 1.5}, {"temperature": 1.5, "top_p": 0.9}]
    tokens = sample(logits, [sequence(seed=row, **kinds[row % 3]) for row in range(60)])
    best = logits.argmax(dim=-1)
    assert torch.equal(tokens[::3], best[::3])
    assert not torch.equal(tokens[1::3], best[1::3])
    assert not torch.equal(tokens[2::3], best[2::3])


# The distribution

LOGITS = [1.0, 0.5, 1.5, -1.0, 0.0, 1.5, -0.25, -2.0, 2.0, 0.25, -INF, 0.5]


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 2.5},
    {"top_k": 2},  # tied with the third
    {"top_k": 4},
    {"top_k": 5},
    {"top_k": 100},
    {"top_p": 0.5},
    {"top_p": 0.9, "temperature": 1.5},
    {"min_p": 0.2},
    {"min_p": 0.05, "temperature": 0.8},
    {"top_k": 6, "top_p": 0.8},
    {"min_p": 0.15, "top_p": 0.7},
    {"min_p": 0.25, "top_k": 8},
    {"min_p": 0.05, "top_k": 7, "top_p": 0.85, "temperature": 1.3},
]


# The kernel of noise makes no difference between what varies: without NANOPAGE_LONG_TESTS=1, three settings show it.
@pytest.mark.parametrize(
    ("varying", "params"),
    [*product(["seed"], SETTINGS), *product(["position"], SETTINGS if LONG else SETTINGS[::6])],
    ids=str,
)
def test_samples_follow_the_exact_distribution(params, varying):
    # A temperature of 0.6 leaves some tokens too unlikely for fewer draws.
    draws = 10_000 if LONG or params == {"temperature": 0.6} else 4_000
    tokens = sample(torch.tensor(LOGITS).expand(draws, -1), sequences(draws, varying, **params))
    assert_drawn_from(exact_distribution(LOGITS, **params), tokens)


@pytest.mark.parametrize("params", [{}, {"top_k": 400}, {"top_p": 0.6}, {"min_p": 0.9}], ids=str)
def test_samples_of_a_flat_big_vocabulary_follow_the_exact_distribution(params):
    logits = np.linspace(0, 0.2, BIG_VOCAB, dtype=np.float32)
    draws = 4_000
    tokens = sample(torch.from_numpy(logits).expand(draws, -1), sequences(draws, **params))
    distribution = exact_distribution(logits, **params)
    assert distribution[tokens.numpy()].min() > 0
    groups = np.arange(BIG_VOCAB) // 100
    expected = np.bincount(groups, weights=distribution) * draws
    counts = np.bincount(groups[tokens.numpy()], minlength=len(expected))
    large = expected > 5
    counts, expected = (np.append(x[large], x[~large].sum()) for x in (counts, expected))
    keep = expected > 0
    assert chi_square(counts[keep], expected[keep]) > P_VALUE


def test_a_token_of_no_probability_is_never_sampled():
    for low in (-80.0, -INF):
        logits = torch.full((128, 49152), low)
        logits[:, 7] = 0
        for start in range(512, 1024, 128):
            assert set(sample(logits, sequences(128, start=start)).tolist()) == {7}


# Truncation against a full sort

TOP_K = st.sampled_from([-1, 0, 1, 2, 3, 7, 40, 255, 256, 257, 2999, 3000, 5000])
TOP_P = st.sampled_from([1e-9, 0.1, 0.5, 0.77, 0.9, 0.95, 0.999, 0.999999, 1.0])
MIN_P = st.sampled_from([0.0, 1e-6, 0.03, 0.2, 0.7, 1.0])


@st.composite
def rows_of_logits(draw, vocab_size: int):
    """Float64 logits with ties (multiples of a step), flat or peaked, some of them -inf."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        step = draw(st.sampled_from([0.0, 1e-9, 0.01, 0.25, 1.0]))
        row = step * generator.integers(-draw(st.sampled_from([1, 20, 1000])), 9, vocab_size).astype(np.float64)
        if draw(st.booleans()):
            row[generator.random(vocab_size) < draw(st.sampled_from([0.1, 0.9, 0.999]))] = -INF
            row[generator.integers(vocab_size)] = 0
        rows.append(row)
    return np.stack(rows)


@pytest.mark.parametrize("vocab_size, count", [(1, 30), (5, 200), (300, 150), (BIG_VOCAB, 70)])
def test_truncation_equals_a_full_sort(vocab_size, count):
    @settings(max_examples=examples(count), deadline=None, derandomize=True)
    @given(rows_of_logits(vocab_size), st.data())
    def check(logits, data):
        settings_of = [
            {"top_k": data.draw(TOP_K), "top_p": data.draw(TOP_P), "min_p": data.draw(MIN_P)} for _ in logits
        ]
        kept = kept_by_truncate(torch.from_numpy(logits), [sequence(**row) for row in settings_of])
        for row, params in enumerate(settings_of):
            assert np.array_equal(kept[row], naive_kept(logits[row], **params)), params

    check()


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=20), TOP_K, TOP_P, MIN_P)
def test_truncation_of_arbitrary_floats_equals_a_full_sort(logits, top_k, top_p, min_p):
    kept = kept_by_truncate(
        torch.tensor([logits], dtype=torch.float64), [sequence(top_k=top_k, top_p=top_p, min_p=min_p)]
    )
    # Logits are arbitrary here, so a token may lie on the line itself, where rounding decides.
    tight = naive_kept(logits, top_k, max(top_p * (1 - 1e-9), 1e-300), min(min_p * (1 + 1e-9), 1))
    loose = naive_kept(logits, top_k, top_p * (1 + 1e-9), min_p * (1 - 1e-9))
    assert (tight <= kept[0]).all()
    assert (kept[0] <= loose).all()


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 5.0])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 0.999999])
def test_top_p_in_float32_is_right_within_rounding(spread, top_p):
    scaled = random_logits(4, BIG_VOCAB) * spread
    kept = kept_by_truncate(scaled, [sequence(top_p=top_p)] * 4)
    for row in range(4):
        assert (naive_kept(scaled[row], top_p=top_p * (1 - 1e-5)) <= kept[row]).all()
        assert (kept[row] <= naive_kept(scaled[row], top_p=top_p * (1 + 1e-5))).all()


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 1, "top_p": 0.999999}])
def test_the_strictest_truncation_keeps_the_likeliest_and_its_ties(params):
    logits = random_logits(3, BIG_VOCAB)
    logits[1, 100] = logits[1, 2000] = 50.0
    logits[2] = 0.0
    kept = kept_by_truncate(logits, [sequence(**params)] * 3)
    assert np.flatnonzero(kept[0]).tolist() == [logits[0].argmax().item()]
    assert np.flatnonzero(kept[1]).tolist() == [100, 2000]
    assert kept[2].all()


@pytest.mark.parametrize("top_k", [300, 301, 10_000, 2**31, 2**62, 2**63, 10**30])
def test_top_k_of_the_whole_vocabulary_or_more_keeps_everything(top_k):
    assert kept_by_truncate(random_logits(2, 300), [sequence(top_k=top_k), sequence(top_k=2)])[0].all()


def test_the_token_that_crosses_top_p_is_kept():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64).log()
    for top_p, count in [(0.4, 1), (0.6, 2), (0.79, 2), (0.81, 3), (0.94, 3), (0.96, 4)]:
        assert kept_by_truncate(logits, [sequence(top_p=top_p)]).sum() == count


def test_ties_are_kept_whatever_the_token_order():
    logits = torch.tensor([0.0, 3.0, 1.0, 1.0, 2.0, 1.0, 0.0, 3.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for params in ({"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.13}, {"top_k": 6, "top_p": 0.93}):
        expected = sorted(logits[torch.from_numpy(kept_by_truncate(logits[None], [sequence(**params)])[0])].tolist())
        assert expected == [1.0, 1.0, 1.0, 2.0, 3.0, 3.0]
        for _ in range(20):
            shuffled = logits[torch.randperm(8, generator=generator)]
            kept = torch.from_numpy(kept_by_truncate(shuffled[None], [sequence(**params)])[0])
            assert sorted(shuffled[kept].tolist()) == expected


def test_a_row_that_needs_the_whole_vocabulary_does_not_change_its_neighbours():
    logits = random_logits(3, BIG_VOCAB, dtype=torch.float64)
    params = [{"top_k": 20, "top_p": 0.9}, {"top_p": 0.95}, {"min_p": 0.1}]
    alone = [kept_by_truncate(logits[row : row + 1], [sequence(**params[row])])[0] for row in range(3)]
    flat = torch.zeros(1, BIG_VOCAB, dtype=torch.float64)
    crowd = kept_by_truncate(torch.cat([flat, logits]), [sequence(top_p=0.99), *(sequence(**p) for p in params)])
    assert crowd[0].all()
    assert np.array_equal(crowd[1:], np.stack(alone))


def test_equal_logits_are_told_in_the_same_order_whatever_other_rows_want():
    logits = random_logits(3, BIG_VOCAB).bfloat16()  # many are equal
    tokens, wanted = logits.argmax(1), np.array([2, 20, 7])
    _, together = samples.Samples(tokens, logits, wanted).result()
    for row in range(3):
        _, alone = samples.Samples(tokens[row:][:1], logits[row:][:1], wanted[row:][:1]).result()
        assert list(together[row].items()) == list(alone[0].items())


def test_truncation_looks_beyond_its_first_guess_only_if_it_must():
    def candidates(**params):
        table = table_for([sequence(**params)], BIG_VOCAB)
        return truncate(torch.arange(BIG_VOCAB, dtype=torch.float64)[None], table.temperature, table.limits)[0].shape[1]

    assert candidates(top_p=0.9) == candidates(top_k=CANDIDATES - 1) == CANDIDATES
    assert candidates(top_k=CANDIDATES + 1) > CANDIDATES


# The noise


def noise(seeds, positions, token_ids) -> np.ndarray:
    seeds, positions = np.broadcast_arrays(seeds, positions)
    rows = [torch.from_numpy(np.array(x, dtype=np.int64).reshape(-1)) for x in (seeds, positions)]
    return gumbel_noise(*rows, torch.as_tensor(np.asarray(token_ids))).numpy()


@functools.cache
def axis_of_noise(axis: str, count: int) -> np.ndarray:
    numbers = np.arange(count)
    return {
        "seeds": lambda: noise(numbers, 5, [3]),
        "negative seeds": lambda: noise(-numbers, 5, [3]),
        "positions": lambda: noise(11, numbers, [3]),
        "token ids": lambda: noise(11, 5, numbers),
        "seeds and positions against each other": lambda: noise(numbers, count - numbers, [3]),
        "seeds, positions and ids": lambda: noise(*(x.ravel() for x in np.indices((8, 8))), np.arange(count // 64)),
    }[axis]().ravel()


AXES = [
    "seeds", "negative seeds", "positions", "token ids", "seeds and positions against each other",
    "seeds, positions and ids",
]  # fmt: skip


@pytest.mark.parametrize("axis", AXES)
def test_noise_is_gumbel(axis):
    values = axis_of_noise(axis, 2**17).astype(np.float64)
    assert scipy_stats().kstest(values, "gumbel_r").pvalue > P_VALUE
    assert abs(values.mean() - np.euler_gamma) < 4.5 * math.sqrt(math.pi**2 / 6 / len(values))
    # The kurtosis of a Gumbel variable is 5.4, which gives the spread of a sample's variance.
    assert abs(values.var() / (math.pi**2 / 6) - 1) < 4.5 * math.sqrt(4.4 / len(values))


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("lag", [1, 2, 3, 8, 256])
def test_neighbouring_noise_is_independent(axis, lag):
    uniform = np.exp(-np.exp(-axis_of_noise(axis, 2**17).astype(np.float64)))
    assert abs(np.corrcoef(uniform[:-lag], uniform[lag:])[0, 1]) < 4.5 / math.sqrt(len(uniform))
    # Pairs that do not overlap, in a grid of 16 by 16.
    cells = (uniform[: len(uniform) // (2 * lag) * 2 * lag].reshape(-1, 2 * lag) * 16).astype(int)
    counts = np.bincount((cells[:, :lag] * 16 + cells[:, lag:]).ravel(), minlength=256)
    assert chi_square(counts) > P_VALUE


def test_noise_is_finite_for_every_token_id():
    for seed in range(2):
        for block in range(4):
            ids = np.arange(block * 2**22, (block + 1) * 2**22)
            assert np.isfinite(noise(seed, 5, ids)).all()


def test_noise_does_not_depend_on_the_batch_or_on_which_tokens_are_asked():
    seeds = np.array([0, 1, 2, -1, 2**63 - 1, -(2**63), 123456789, 1])
    positions = np.array([1, 1, 2, 5, 8191, 131071, 7, 9])
    whole = noise(seeds, positions, np.arange(1000))
    generator = np.random.default_rng(0)
    for row in range(8):
        assert np.array_equal(noise(seeds[row], positions[row], np.arange(1000))[0], whole[row])
    order = generator.permutation(8)
    assert np.array_equal(noise(seeds[order], positions[order], np.arange(1000)), whole[order])
    subsets = np.stack([generator.permutation(1000)[:37] for _ in range(8)])
    assert np.array_equal(noise(seeds, positions, subsets), np.take_along_axis(whole, subsets, axis=1))
    assert len(np.unique(whole)) > 0.99 * whole.size


def test_no_two_contexts_have_the_same_noise_in_another_order():
    # A generator that mixed only 32 bits of seed and position with the token id would give some of these.
    bits = noise(np.arange(20_000) % 100, np.arange(20_000) // 100, np.arange(256)).view(np.uint32).astype(np.uint64)
    assert len(set(zip(bits.sum(axis=1).tolist(), (bits**2).sum(axis=1).tolist(), strict=True))) == 20_000


# Seeded sequences


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0},
        {"temperature": 1.7},
        {"top_k": 30},
        {"top_p": 0.8},
        {"min_p": 0.05, "top_p": 0.9},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
        {"repetition_penalty": 1.3, "top_p": 0.9, "logit_bias": {5: 3.0}},
        {"allowed_token_ids": [1, 5, 9, 200], "temperature": 3.0},
        {"logprobs": 3},
    ],
    ids=str,
)
def test_a_seeded_sequence_samples_the_same_alone_and_in_a_crowd(params):
    neighbours = [
        {"temperature": 0},
        {},
        {"temperature": 0.3, "top_k": 3},
        {"top_p": 0.999},
        {"repetition_penalty": 2.0},
        {"frequency_penalty": 1.0, "temperature": 0},
        {"logit_bias": {3: 50.0}},
        {"logprobs": 5},
        {"allowed_token_ids": [0]},
    ]
    generator = np.random.default_rng(1)
    tokens = set()
    for trial in range(20):
        target = sequence(output=generator.integers(0, 600, trial), seed=trial * 7, **params)
        own = random_logits(1, 600, seed=trial)
        (alone,) = run(own, [target])
        crowd = [sequence(seed=int(generator.integers(99)), **neighbours[i % 9]) for i in generator.permutation(12)]
        logits = random_logits(12, 600, seed=1000 + trial)
        logits[0] = 0  # needs the whole vocabulary if it is truncated
        place = int(generator.integers(13))
        crowd.insert(place, target)
        together = run(torch.cat([logits[:place], own, logits[place:]]), crowd)[place]
        assert together.token_id == alone.token_id
        if params.get("logprobs"):
            assert list(together.logprobs) == list(alone.logprobs)
        tokens.add(alone.token_id)
    assert len(tokens) > 3


def test_row_order_does_not_change_what_is_sampled():
    logits = random_logits(40, 500)
    kinds = [{}, {"temperature": 0}, {"top_k": 9}, {"presence_penalty": 1.0}, {"min_p": 0.1, "temperature": 2.0}]
    batch = [sequence(output=[row], seed=row, **kinds[row % 5]) for row in range(40)]
    tokens = [sampled.token_id for sampled in run(logits, batch)]
    order = np.random.default_rng(2).permutation(40)
    shuffled = run(logits[order], [batch[row] for row in order])
    assert [sampled.token_id for sampled in shuffled] == [tokens[row] for row in order]


def test_seed_and_position_both_change_what_is_sampled():
    for varying in ("seed", "position"):
        assert len(set(sample(torch.zeros(200, 1000), sequences(200, varying)).tolist())) > 150


def test_extreme_seeds_sample():
    seeds = [-(2**63), -1, 0, 1, 2**63 - 1]
    tokens = sample(torch.zeros(5, 10**6), [sequence(seed=seed) for seed in seeds])
    assert len(set(tokens.tolist())) == 5


# Penalties, biases and bans


def naive_constraints(row: np.ndarray, seq: Sequence) -> np.ndarray:
    """Every rule by its own formula, in vLLM's order."""
    params, row = seq.settings, row.copy()
    output = seq.token_ids[seq.num_prompt_tokens :]
    for token in range(len(row)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            row[token] = -INF
    for *before, last in params.bad_words_token_ids:
        if output[len(output) - len(before) :] == before and len(output) >= len(before):
            row[last] = -INF
    if len(output) < params.min_tokens:
        for token in params.ending_token_ids:
            row[token] = -INF
    for token, bias in params.logit_bias.items():
        row[token] += bias
    for token in range(len(row)):
        if token in seq.token_ids:
            row[token] *= 1 / params.repetition_penalty if row[token] > 0 else params.repetition_penalty
        row[token] -= params.frequency_penalty * output.count(token)
        row[token] -= params.presence_penalty * (token in output)
    for token, length in continued(output, params.dry_breaker_ids).items():
        if params.dry_multiplier and length >= params.dry_allowed_length:
            row[token] -= params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
    return row


def continued(output, breakers) -> dict[int, int]:
    """The tokens that followed earlier occurrences of the last tokens, and the length of the longest, at most 32."""
    output, lengths = output[-2048:], {}
    for end in range(1, len(output)):  # an occurrence is output[end - length : end]
        length = 0
        while length < min(end, 32) and output[end - 1 - length] == output[-1 - length] not in breakers:
            length += 1
        if output[end] not in breakers:
            lengths[output[end]] = max(length, lengths.get(output[end], 0))
    return lengths


TOKEN = st.integers(0, 29)


@st.composite
def constrained_sequences(draw):
    params = {
        "repetition_penalty": draw(st.sampled_from([1.0, 0.5, 1.1, 2.0])),
        "presence_penalty": draw(st.sampled_from([0.0, -2.0, 0.7])),
        "frequency_penalty": draw(st.sampled_from([0.0, -0.3, 2.0])),
        "dry_multiplier": draw(st.sampled_from([0.0, 0.8])),
        "dry_base": draw(st.sampled_from([1.0, 1.75])),
        "dry_allowed_length": draw(st.integers(1, 4)),
        "dry_breaker_ids": draw(st.lists(TOKEN, max_size=2)),
        "logit_bias": draw(st.none() | st.dictionaries(TOKEN, st.floats(-100, 100), min_size=1)),
        "allowed_token_ids": draw(st.none() | st.lists(TOKEN, min_size=1)),
        "min_tokens": draw(st.integers(0, 8)),
        "stop_token_ids": draw(st.lists(TOKEN, max_size=3)),
    }
    return sequence(
        prompt=draw(st.lists(TOKEN, min_size=1, max_size=8)),
        output=draw(st.lists(TOKEN, max_size=8)) * draw(st.integers(1, 6)),
        eos=draw(st.sets(TOKEN, max_size=2)),
        bad_words=draw(st.lists(st.lists(TOKEN, min_size=1, max_size=3), max_size=3)),
        **{name: value for name, value in params.items() if draw(st.booleans())},
    )


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(st.lists(constrained_sequences(), min_size=1, max_size=5), st.integers(0, 2**20))
def test_all_constraints_together_equal_the_naive_formulas(batch, seed):
    logits = random_logits(len(batch), 30, seed, torch.float64)
    logits[:, 4] = 0
    before = logits.clone()
    got = constrain(logits, batch)
    assert torch.equal(logits, before)
    expected = np.stack([naive_constraints(row.numpy(), seq) for row, seq in zip(logits, batch, strict=True)])
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("penalty", [0.3, 1.2, 5.0])
def test_repetition_penalty_is_that_of_transformers(penalty):
    logits = random_logits(3, 50)
    batch = [
        sequence(prompt=[1, 2, 2, 40], output=output, repetition_penalty=penalty)
        for output in ([], [7, 7, 1], [49, 0, 3, 3])
    ]
    got = constrain(logits, batch)
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    for row, seq in enumerate(batch):
        expected = processor(torch.tensor([seq.token_ids]), logits[row : row + 1].clone())[0]
        assert not torch.equal(expected, logits[row])
        torch.testing.assert_close(got[row], expected)


def test_presence_and_frequency_penalties_are_those_of_openai():
    logits = random_logits(1, 20, dtype=torch.float64)
    seq = sequence(prompt=[1, 2, 2], output=[2, 5, 5, 5], presence_penalty=0.5, frequency_penalty=0.25)
    change = (constrain(logits, [seq]) - logits)[0]
    expected = torch.zeros(20, dtype=torch.float64)
    expected[2], expected[5] = -0.5 - 0.25, -0.5 - 0.75
    torch.testing.assert_close(change, expected)


def test_repetition_penalty_covers_the_prompt_and_the_others_only_the_output():
    logits = torch.ones(3, 10)
    seen = {"prompt": [4], "output": [6]}
    got = constrain(
        logits,
        [
            sequence(**seen, repetition_penalty=2.0),
            sequence(**seen, presence_penalty=1.0),
            sequence(**seen, frequency_penalty=1.0),
        ],
    )
    assert (got != 1).nonzero().tolist() == [[0, 4], [0, 6], [1, 6], [2, 6]]


def test_dry_gives_what_llamacpp_gives():
    """The cases of llama.cpp's tests/test-sampling.cpp: output, breakers, multiplier, allowed length, probabilities."""
    cases = [
        ([0, 1], [], 1, 2, [0.2] * 5),
        ([0, 1, 2, 0, 1], [], 1, 2, [0.228945, 0.228945, 0.084224, 0.228945, 0.228945]),  # its own has four tokens
        ([0, 1, 3, 4, 0, 1], [3], 1, 2, [0.2] * 5),
        ([0, 1, 2, 0, 1], [], 2, 2, [0.241818, 0.241818, 0.032727, 0.241818, 0.241818]),
        ([0, 1, 2, 3, 4, 0, 1], [], 1, 4, [0.2] * 5),
    ]
    batch = [
        sequence(output, dry_multiplier=scale, dry_base=1.1, dry_allowed_length=allowed, dry_breaker_ids=breakers)
        for output, breakers, scale, allowed, _ in cases
    ]
    probabilities = constrain(torch.zeros(len(cases), 5), batch).softmax(-1)
    torch.testing.assert_close(probabilities, torch.tensor([case[-1] for case in cases]), atol=1e-6, rtol=0)


def test_dry_looks_at_the_output_alone_and_its_work_is_bounded(monkeypatch):
    dry = {"dry_multiplier": 1.0, "dry_base": 2.0, "dry_allowed_length": 1}
    batch = [
        sequence(prompt=[5, 6, 7, 5, 6], output=[5, 6], **dry),  # an answer may repeat the question
        sequence(output=[8, 9, *range(10, 20)] * 400, **dry),
        sequence(output=[9] * 4000, **dry),
        sequence(output=[1, 2] + [3] * 2047 + [1], **dry),  # too far away
    ]
    compared = []
    monkeypatch.setattr(dry_stage, "count_first", lambda flags: (compared.append(flags.numel()), count_first(flags))[1])
    change = constrain(torch.zeros(len(batch), 20), batch)
    expected = torch.zeros(len(batch), 20)
    expected[1, 8] = expected[2, 9] = -(2.0**31)
    assert torch.equal(change, expected)
    assert max(compared) <= len(batch) * 2048 * 32


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_large_logit_bias_decides(temperature):
    logits = random_logits(40, 100)
    forced = [sequence(seed=i, temperature=temperature, logit_bias={17: 100, 3: -100}) for i in range(40)]
    assert {sampled.token_id for sampled in run(logits, forced)} == {17}


def test_a_logit_bias_of_minus_100_forbids():
    logits = torch.zeros(300, 3)
    banned = [sequence(seed=i, logit_bias={1: -100}) for i in range(300)]
    assert {sampled.token_id for sampled in run(logits, banned)} == {0, 2}


@pytest.mark.parametrize("params", [{}, {"temperature": 0}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.01}], ids=str)
def test_only_allowed_token_ids_are_sampled(params):
    logits = random_logits(200, 3000)
    allowed = [5, 2999, 77]
    batch = [sequence(seed=i, allowed_token_ids=allowed, **params) for i in range(200)]
    assert {sampled.token_id for sampled in run(logits, batch)} == set(allowed)


def test_allowed_token_ids_keep_their_proportions():
    batch = [sequence(seed=i, allowed_token_ids=[2, 4, 8, 8], min_p=min_p) for min_p in (0, 1e-6) for i in range(5000)]
    tokens = [sampled.token_id for sampled in run(torch.tensor(LOGITS).expand(len(batch), -1), batch)]
    expected = exact_distribution([x if i in (2, 4, 8) else -INF for i, x in enumerate(LOGITS)])
    assert_drawn_from(expected, torch.tensor(tokens[:5000]))
    assert_drawn_from(expected, torch.tensor(tokens[5000:]))


@pytest.mark.parametrize(
    "output, banned",
    [
        ([], [9]),
        ([5], [6, 9]),
        ([5, 6], [7, 9]),
        ([6, 5], [6, 9]),
        ([5, 6, 1], [9]),
        ([1, 5, 6], [7, 9]),
    ],
)
def test_bad_words_ban_the_token_that_would_complete_them(output, banned):
    # The prompt ends with the beginning of a bad word, which does not count.
    seq = sequence(prompt=[5, 6, 5], output=output, bad_words=[[9], [5, 6], [5, 6, 7]])
    got = constrain(torch.zeros(1, 12), [seq])
    assert got[0].isneginf().nonzero().flatten().tolist() == banned


def test_min_tokens_masks_eos_and_stop_ids_until_reached():
    for num_output in range(5):
        seq = sequence(output=[0] * num_output, min_tokens=3, eos=[5, 6], stop_token_ids=[8])
        banned = constrain(torch.zeros(1, 10), [seq])[0].isneginf().nonzero().flatten().tolist()
        assert banned == ([5, 6, 8] if num_output < 3 else [])


def test_min_tokens_without_anything_to_mask_masks_nothing():
    assert torch.equal(constrain(torch.zeros(1, 10), [sequence(min_tokens=3)]), torch.zeros(1, 10))


def test_unconstrained_rows_are_untouched():
    logits = random_logits(5, 40)
    batch = [
        sequence(),
        sequence(repetition_penalty=1.5),
        sequence(temperature=0, top_k=3),
        sequence(logit_bias={3: 1.0}),
        sequence(output=[1, 2, 3], logprobs=2),
    ]
    got = constrain(logits, batch)
    for row in (0, 2, 4):
        assert torch.equal(got[row], logits[row])
    for row in (1, 3):
        assert not torch.equal(got[row], logits[row])


def test_a_batch_without_constraints_is_not_copied():
    logits = random_logits(3, 40)
    assert constrain(logits, [sequence(), sequence(top_p=0.5), sequence(temperature=0, logprobs=1)]) is logits


def test_logits_may_have_any_layout():
    logits = random_logits(30, 5).t()
    batch = [sequence(output=[1, 2], repetition_penalty=1.5, frequency_penalty=1.0, bad_words=[[4], [2, 5]])] * 5
    assert torch.equal(constrain(logits, batch), constrain(logits.contiguous(), batch))


EVERYTHING = [
    {"temperature": 0},
    {"temperature": 0.5, "logprobs": 20},
    {"top_k": 5, "top_p": 0.5, "min_p": 0.01},
    {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 1.0, "logprobs": 0},
    {"logit_bias": {0: 5.0}, "allowed_token_ids": [0, 1, 2]},
    {"min_tokens": 5, "stop_token_ids": [3]},
]


@pytest.mark.parametrize("subset", [EVERYTHING, *([params] for params in EVERYTHING)], ids=len)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_logits_given_are_never_modified(subset, dtype):
    logits = random_logits(len(subset), 60, dtype=dtype)
    before = logits.clone()
    run(logits, [sequence(output=[1, 2], bad_words=[[4]], eos=[9], **params) for params in subset])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("params", [{"temperature": 0}, {"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-9}], ids=str)
def test_float64_is_not_rounded(params):
    logits = torch.zeros(1, 400, dtype=torch.float64)
    logits[0, 250] = 1e-12
    for constrained in ({}, {"logit_bias": {7: -1.0}}, {"presence_penalty": 0.5}):
        (sampled,) = run(logits, [sequence(logprobs=1, **params, **constrained)])
        assert sampled.token_id == 250
        assert abs(sampled.logprobs[250][0] - stats_log_softmax(logits[0])[250]) < 1e-14


def stats_log_softmax(row: torch.Tensor) -> np.ndarray:
    row = row.to(torch.float64).numpy()
    return row - row.max() - math.log(np.exp(row - row.max()).sum())


# Log-probabilities


@pytest.mark.parametrize("n", [0, 1, 5, 20])
def test_logprobs_are_the_sampled_token_and_then_the_top(n):
    logits = random_logits(30, 100)
    results = run(logits, [sequence(seed=row, temperature=3.0, logprobs=n) for row in range(30)])
    outside = 0
    for row, sampled in enumerate(results):
        expected = stats_log_softmax(logits[row])
        order = np.argsort(-expected).tolist()
        tokens = list(sampled.logprobs)
        assert tokens[0] == sampled.token_id
        assert tokens[1:] == [token for token in order[:n] if token != sampled.token_id]
        for token, (logprob, rank) in sampled.logprobs.items():
            assert logprob == pytest.approx(expected[token], abs=1e-5)
            assert rank == order.index(token) + 1
        outside += sampled.token_id not in order[:n]
    assert outside > 0


def test_logprobs_are_the_models_own():
    logits = random_logits(6, 50)
    changed = {
        "temperature": 4.0, "repetition_penalty": 3.0, "presence_penalty": 2.0, "frequency_penalty": 2.0, "top_k": 20,
        "top_p": 0.9, "min_p": 0.01, "logit_bias": {3: 7.0}, "min_tokens": 3, "stop_token_ids": [4], "logprobs": 20,
    }  # fmt: skip
    batch = [sequence(output=[5, 6, 6][: row % 3], seed=row, **changed) for row in range(6)]
    for row, sampled in enumerate(run(logits, batch)):
        expected = stats_log_softmax(logits[row])
        for token, (logprob, _) in sampled.logprobs.items():
            assert logprob == pytest.approx(expected[token], abs=1e-5)
        assert set(np.argsort(-expected)[:20].tolist()) <= set(sampled.logprobs)


def test_only_those_who_ask_get_logprobs():
    logits = random_logits(5, 50)
    wanted = [None, 2, None, 0, 7]
    results = run(logits, [sequence(seed=row, logprobs=n) for row, n in enumerate(wanted)])
    for n, sampled in zip(wanted, results, strict=True):
        if n is None:
            assert sampled.logprobs is None
        else:
            assert len(sampled.logprobs) in (n, n + 1)
            assert next(iter(sampled.logprobs)) == sampled.token_id


def test_asking_for_logprobs_does_not_change_the_sample():
    logits = random_logits(50, 80)
    without = run(logits, [sequence(seed=row, temperature=2.0) for row in range(50)])
    with_some = run(logits, [sequence(seed=row, temperature=2.0, logprobs=4) for row in range(50)])
    assert [s.token_id for s in without] == [s.token_id for s in with_some]


def test_more_logprobs_than_the_vocabulary_has_are_all_of_it():
    (sampled,) = run(random_logits(1, 12), [sequence(logprobs=20)])
    assert sorted(sampled.logprobs) == list(range(12))


def test_the_rank_of_a_tied_token_counts_only_the_likelier():
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    for token in (1, 2, 3):
        assert table_of(logits, token, 0)[token][1] == 2


@pytest.mark.parametrize("values", [[3, 1, 1, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [2, 2, 1, 1, 1]])
@pytest.mark.parametrize("token", range(5))
@pytest.mark.parametrize("wanted", [1, 2, 3, 5])
def test_ranks_have_no_gaps_at_ties(values, token, wanted):
    table = table_of(torch.tensor([values], dtype=torch.float32), token, wanted)
    likelier = sum(value > values[token] for value in values)
    assert table[token][1] == likelier + 1
    ranks = sorted(rank for _, rank in table.values())
    others = [rank for rank in ranks if rank != likelier + 1]
    assert len(others) == len(table) - 1
    assert ranks == [*range(1, len(table) + 1)] or (others == [*range(1, wanted + 1)] and likelier >= wanted)
    by_rank = sorted(table, key=lambda each: table[each][1])
    assert [values[each] for each in by_rank] == sorted((values[each] for each in table), reverse=True)


def test_logprobs_of_impossible_tokens_are_minus_infinity():
    table = table_of(torch.tensor([[0.0, -INF, 0.0]]), 1, 3)
    assert table[1] == (-INF, 3)
    assert table[0][0] == pytest.approx(-math.log(2))


# A table whose rows change from step to step


class Table:
    """Sequences in a table, sampled step by step, and how each would be sampled from a table of its own."""

    def __init__(self, vocab_size=30, num_rows=8, sample_all=None):
        self.vocab_size = vocab_size
        self.table = SequenceTable(num_rows, 64, 4, vocab_size, CPU)
        self.sampler = Sampler(self.table, sample_all)
        self.rows: dict[int, Sequence] = {}
        self.steps = 0

    def add(self, row: int, seq: Sequence) -> None:
        self.rows[row] = seq
        self.table.update(Batch(new=[seq.new(row)]))

    def fork(self, parent: int, row: int, seed: int, num_tokens: int | None = None) -> None:
        source = self.rows[parent]
        token_ids = source.token_ids[:num_tokens]
        self.rows[row] = replace(source, token_ids=token_ids, position=len(token_ids), seed=seed)
        self.table.update(Batch(forks=[Fork(parent, row, len(token_ids), seed)]))

    def step(self, rows: list[int]) -> list[int]:
        """Sample for some rows, in this order. Checks that each token is that of its sequence alone."""
        self.steps += 1
        logits = random_logits(len(rows), self.vocab_size, seed=self.steps, dtype=torch.float64)
        batch = [self.rows[row] for row in rows]
        positions = np.array([seq.position for seq in batch])
        made = self.sampler
        got = made.change(logits, np.array(rows), positions)
        expected = np.stack([naive_constraints(row.numpy(), seq) for row, seq in zip(logits, batch, strict=True)])
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12, atol=1e-12)
        tokens, _ = made(logits, np.array(rows), positions).result()
        assert tokens == [run(logits[i : i + 1], [seq])[0].token_id for i, seq in enumerate(batch)]
        for seq, token in zip(batch, tokens, strict=True):
            seq.token_ids, seq.position = [*seq.token_ids, token], seq.position + 1
        return tokens


PENALTIES = {"repetition_penalty": 1.7, "presence_penalty": 0.6, "frequency_penalty": 0.5, "dry_multiplier": 0.8}


@pytest.mark.parametrize("sample_all", [None, BY_SORTING])
@pytest.mark.parametrize("params", [{}, {"top_p": 0.8}, {"temperature": 0}], ids=str)
def test_sampled_tokens_are_penalized_from_the_next_step_on(params, sample_all):
    table = Table(sample_all=sample_all)
    table.add(5, sequence(prompt=[4, 4, 9], output=[6], seed=1, **PENALTIES, **params))
    table.add(2, sequence(prompt=[3], seed=2, **params))
    table.add(0, sequence(prompt=[8, 1], output=[1, 1], seed=3, frequency_penalty=2.0, **params))
    for rows in ([5, 2, 0], [0, 5], [2], [2, 0], [5], [0, 2, 5]):
        for _ in range(3):
            table.step(rows)


def test_a_sequence_that_begins_again_is_penalized_as_before():
    table = Table()
    table.add(1, sequence(prompt=[4, 7], seed=1, **PENALTIES))
    for _ in range(5):
        table.step([1])
    table.add(3, table.rows.pop(1))  # in another row
    table.add(1, sequence(prompt=[5], seed=2, **PENALTIES))  # which belongs to another one now
    for _ in range(5):
        table.step([1, 3])


def test_a_fork_has_counts_of_its_own():
    table = Table()
    table.add(0, sequence(prompt=[4, 7], output=[9, 9], seed=1, **PENALTIES))
    table.fork(0, 4, seed=2)
    table.fork(0, 6, seed=3)
    table.fork(0, 2, seed=5, num_tokens=3)  # of fewer tokens than its parent has
    outputs = [tuple(table.step([4, 0, 6, 2])) for _ in range(6)]
    assert len(set(zip(*outputs, strict=True))) == 4
    table.step([0])
    table.fork(4, 0, seed=9)  # a row that had counts
    for _ in range(4):
        table.step([0, 6, 4])


def test_a_fork_of_a_sequence_without_penalties_takes_the_place_of_one_with_them():
    table = Table()
    table.add(0, sequence(prompt=[4], seed=1))
    table.add(1, sequence(prompt=[5], output=[5] * 3, seed=2, **PENALTIES))
    table.step([0, 1])
    table.fork(0, 1, seed=3)
    table.step([0, 1])
    table.add(1, sequence(prompt=[6], seed=4, **PENALTIES))
    table.step([1, 0])


def test_only_presence_and_frequency_penalties_take_memory_to_count_in():
    table = Table(num_rows=8)
    penalties = table.sampler.penalties
    table.add(0, sequence(prompt=[1, 1], seed=1, repetition_penalty=1.5))
    table.step([0])
    assert penalties._counts is None
    for row in range(1, 8):
        table.add(row, sequence(prompt=[row], seed=row, **PENALTIES))
        table.step([row, 0])
        assert penalties._counts.shape == (8 * table.vocab_size,)


def test_the_settings_of_a_row_are_those_of_the_sequence_that_has_it_now():
    table = Table()
    kinds = [
        {"temperature": 0},
        {"top_k": 2, "temperature": 2.0},
        {"allowed_token_ids": [3, 4]},
        {"logit_bias": {7: 50.0}},
        {"min_tokens": 50, "stop_token_ids": list(range(29))},
        {**PENALTIES},
        {},
    ]
    for turn in range(21):
        table.add(2, sequence(prompt=[turn], seed=turn, **kinds[turn * 3 % 7]))
        table.add(5, sequence(prompt=[turn], seed=turn, **kinds[turn * 2 % 7]))
        table.step([5, 2])
        table.step([2])


def test_words_of_several_tokens_are_compared_with_what_was_just_sampled():
    table = Table(vocab_size=4)
    words = [[0, 1], [1, 2, 3], [3, 3], [2, 0, 0, 1], [2]]
    table.add(1, sequence(prompt=[0, 1, 2], seed=1, temperature=3.0, bad_words=words))
    table.add(0, sequence(prompt=[3], seed=2, temperature=3.0, bad_words=words[:3]))
    for _ in range(20):
        table.step([0, 1])
    for seq in table.rows.values():
        output = seq.token_ids[seq.num_prompt_tokens :]
        for word in seq.settings.bad_words_token_ids:
            assert all(output[i : i + len(word)] != word for i in range(len(output)))


@pytest.mark.parametrize("sample_all", [None, BY_SORTING])
def test_a_fork_knows_the_words_that_its_parent_has_begun(sample_all):
    table = Table(vocab_size=5, sample_all=sample_all)
    table.add(0, sequence(prompt=[4], seed=1, temperature=0, logit_bias={3: 100}, bad_words=[[3, 3, 3]]))
    assert [table.step([0]), table.step([0])] == [[3], [3]]
    table.fork(0, 2, seed=2)
    first = table.step([2, 0])
    assert 3 not in first
    assert table.step([0, 2]) == [3, 3]


def test_lists_of_constraints_are_made_once_while_the_same_rows_run():
    table = Table()
    lists = table.sampler.constraints

    def count(rows, num_steps):
        """How often lists are made."""
        made = 0
        for _ in range(num_steps):
            before = lists._lists
            table.step(rows)
            made += lists._lists is not before
        return made

    table.add(0, sequence(prompt=[1], seed=1, min_tokens=4, stop_token_ids=[9], bad_words=[[1, 2]]))
    table.add(1, sequence(prompt=[1], seed=2))
    assert count([0, 1], 4) == 1
    assert count([0, 1], 4) == 1, "the minimum is reached"
    assert count([1, 0], 2) == 1, "rows in another order"
    assert count([1], 2) == 0, "no constraints"
    table.add(1, sequence(prompt=[1], seed=2, logit_bias={4: 1.0}))
    assert count([1, 0], 3) == 1, "a row with other settings"


def test_what_a_step_does_not_need_is_not_computed(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("not needed")

    for name in ("gumbel_max", "sample_rows", "sample_truncated"):
        monkeypatch.setattr(sampler, name, refuse)
    monkeypatch.setattr(samples, "top_logprobs", refuse)
    greedy = [sequence(temperature=0, top_k=3, top_p=0.4, seed=row) for row in range(4)]
    logits = random_logits(4, 40)
    assert [token.token_id for token in run(logits, greedy)] == logits.argmax(dim=-1).tolist()


def test_constraints_and_penalties_change_logits_and_nothing_else_does():
    changing = [{"presence_penalty": 0.1}, {"logit_bias": {1: 1.0}}, {"min_tokens": 1, "stop_token_ids": [2]}]
    others = [{}, {"temperature": 0}, {"logprobs": 3}, {"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.1}, {"min_tokens": 1}]
    for params in changing + others:
        made, rows, positions = sampler_of([sequence(), sequence(**params)], 40)
        assert made.changes_logits(rows, positions) == (params in changing)
        assert not made.changes_logits(rows[:1], positions[:1])


def test_a_minimum_length_changes_logits_until_it_is_reached():
    made, rows, positions = sampler_of([sequence(min_tokens=3, stop_token_ids=[2]), sequence(min_tokens=3)], 40)
    changes = [made.changes_logits(rows, positions + output) for output in range(5)]
    assert changes == [True, True, True, False, False]
    assert not made.changes_logits(rows[1:], positions[1:]), "no token could end it"


@pytest.mark.parametrize("sample_all", [None, BY_SORTING])
def test_sampled_tokens_are_in_the_table_at_once(sample_all):
    batch = [sequence(seed=row, **params) for row, params in enumerate(EVERYTHING)]
    made, rows, positions = sampler_of(batch, 60, sample_all)
    samples = made(random_logits(len(batch), 60), rows, positions)
    recorded = made.table.tokens[rows, positions].tolist()
    assert recorded == samples.result()[0] and any(recorded)


def test_a_token_that_could_not_be_sampled_is_recorded_as_token_0():
    made, rows, positions = sampler_of([sequence(seed=1, **PENALTIES), sequence(seed=2)], 10)
    made.table.tokens.fill_(7)
    assert made(torch.full((2, 10), math.nan), rows, positions).result() == ([NO_TOKEN, NO_TOKEN], {})
    assert made.table.tokens[rows, positions].tolist() == [0, 0]


@pytest.mark.parametrize("low", [0.0, 1e-6, 0.99e-5])
def test_temperatures_too_small_to_divide_by_are_greedy(low):
    logits = random_logits(20, 50)
    tokens = [token.token_id for token in run(logits, [sequence(temperature=low, seed=row) for row in range(20)])]
    assert tokens == logits.argmax(dim=-1).tolist()
