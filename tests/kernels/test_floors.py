"""The kernel that searches the floor of truncation, in Triton's interpreter where there is no GPU: against a sort in
float64, and the tokens that are sampled with it against those of a CPU."""

from functools import partial

import numpy as np
import pytest
import torch
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from on_a_cpu import floors_by_sorting
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanopage.kernels import floors as kernel
from nanopage.sampling.sampler import Sampler, sample_rows
from nanopage.state.sequence_table import SequenceTable
from nanopage.step import NO_TOKEN, Batch, NewSequence, SamplingSettings

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
INF = float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def find(logits: Tensor, rows: list[dict], find_floors=kernel.find_floors) -> Tensor:
    """The floors of rows with these settings: temperature, top_k, top_p, min_p."""
    off = {"temperature": 1.0, "top_k": logits.shape[1], "top_p": 1.0, "min_p": 0.0}
    table = {name: [(off | row)[name] for row in rows][::-1] for name in off}  # the sequence table's order is another
    integers = torch.tensor(table.pop("top_k"), device=DEVICE)
    temperature, top_p, min_p = (torch.tensor(x, dtype=torch.float64, device=DEVICE) for x in table.values())
    index = torch.arange(len(rows) - 1, -1, -1, device=DEVICE)
    before = logits.clone()
    found = find_floors(logits.to(DEVICE), index, temperature, integers, top_p, min_p).cpu()
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    assert found.shape == (len(rows),) and found.dtype == torch.promote_types(logits.dtype, torch.float32)
    return found


def kept(logits: Tensor, floors: Tensor) -> Tensor:
    return logits.double() >= floors.double()[:, None]


def exact_floor(logits: Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> float:
    """The smallest logit that may be sampled, by sorting in float64."""
    values = np.sort(logits.double().numpy())[::-1]
    weights = np.exp((values - values[0]) / temperature)
    possible = weights >= min_p
    if 0 < top_k < len(values):
        possible &= values >= values[top_k - 1]
    if top_p < 1:
        mass = np.where(possible, weights, 0).cumsum()
        possible &= values >= values[min(np.searchsorted(mass, top_p * mass[-1]), possible.sum() - 1)]
    return values[possible].min()


def check(logits: Tensor, rows: list[dict], margin=1e-5) -> Tensor:
    """What is kept equals the sort's, where no sum of masses is within `margin` of top_p."""
    found = find(logits, rows)
    for row, floor, params in zip(logits, found, rows, strict=True):
        lowest = row.double()[row.double() >= floor.item()].min().item()
        top_p, min_p = params.get("top_p", 1.0), params.get("min_p", 0.0)
        less = params | {"top_p": top_p * (1 - margin), "min_p": min(min_p * (1 + margin), 1.0)}
        more = params | {"top_p": min(top_p * (1 + margin), 1.0), "min_p": min_p * (1 - margin)}
        if top_p == 1.0:
            less.pop("top_p")
        assert exact_floor(row, **more) <= lowest <= exact_floor(row, **less), params
    return found


def random_logits(generator, num_rows: int, vocab_size: int, spread: float, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(spread * generator.standard_normal((num_rows, vocab_size)) + 2).to(dtype)


LIMITS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([1e-4, 0.3, 0.6, 1.0, 2.5])},
    optional={
        "top_k": st.sampled_from([1, 2, 20, 50, 299, 5000]),
        "top_p": st.sampled_from([1e-9, 0.1, 0.5, 0.8, 0.9, 0.95, 0.999]),
        "min_p": st.sampled_from([1e-6, 0.05, 0.3, 1.0]),
    },
)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spread", [0.0, 0.01, 2.0, 30.0])
def test_floors_are_those_of_a_sort(dtype, spread):
    @settings(max_examples=examples(15), deadline=None, derandomize=True)
    @given(st.sampled_from([1, 5, 300, 2049]), st.lists(LIMITS, min_size=1, max_size=3), st.integers(0, 2**32 - 1))
    def run(vocab_size, rows, seed):
        generator = np.random.default_rng(seed)
        logits = random_logits(generator, len(rows), vocab_size, spread, dtype)
        if seed % 3 == 0:  # few tokens are possible
            logits[torch.from_numpy(generator.random(logits.shape) < 0.98)] = -INF
            logits[:, seed % vocab_size] = 1.5
        check(logits, [row | {"top_k": min(row.get("top_k", vocab_size), vocab_size)} for row in rows])

    run()


@pytest.mark.interpreter
@pytest.mark.parametrize(("lanes", "dtype"), [(64, torch.bfloat16), (256, torch.float32)], ids=str)
def test_rows_are_read_again_only_below_the_tokens_that_were_kept(dtype, lanes, monkeypatch):
    """With few lanes nearly all is below the guard, which changes no result."""
    logits = random_logits(np.random.default_rng(0), 6, 600, 2.0, dtype)
    rows = [
        {"top_k": 20, "top_p": 0.95, "temperature": 0.6}, {"top_p": 0.9}, {"top_k": 300}, {"min_p": 0.001},
        {"top_p": 0.999, "temperature": 2.0, "min_p": 1e-4}, {"top_k": 599, "top_p": 0.5, "temperature": 5.0},
    ]  # fmt: skip
    expected = kept(logits, find(logits, rows))
    monkeypatch.setattr(kernel, "LANES", lanes)
    assert torch.equal(kept(logits, check(logits, rows)), expected)


@pytest.mark.interpreter
def test_the_vocabularies_of_llama_and_qwen():
    for vocab_size in (49_152, 151_936):
        logits = random_logits(np.random.default_rng(1), 3, vocab_size, 3.0, torch.bfloat16)
        check(logits, [{"top_k": 20, "top_p": 0.95, "temperature": 0.6}, {"top_p": 0.9, "temperature": 0.6}, {}])


@pytest.mark.interpreter
@pytest.mark.parametrize("find_floors", [kernel.find_floors, floors_by_sorting])
def test_rows_that_are_not_truncated_have_no_floor(find_floors):
    logits = random_logits(np.random.default_rng(0), 4, 300, 2.0, torch.float32)
    rows = [{}, {"temperature": 0.0, "top_k": 3, "top_p": 0.1}, {"top_k": 3}, {"temperature": 0.0}]
    assert kept(logits, find(logits, rows, find_floors)).sum(dim=1).tolist() == [300, 300, 3, 300]


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_and_zeros_of_either_sign_are_kept(dtype):
    logits = torch.full((4, 700), -5.0, dtype=dtype)
    logits[:, 10:20] = 3.0
    logits[1, 100], logits[1, 200] = 0.0, -0.0
    logits[1, 10:20] = -1.0
    logits[2] = -2.5
    found = find(logits, [{"top_k": 1}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
    assert kept(logits, found).sum(dim=1).tolist() == [10, 2, 700, 10]


@pytest.mark.interpreter
def test_a_row_does_not_depend_on_its_neighbours():
    generator = np.random.default_rng(3)
    logits = random_logits(generator, 9, 1000, 1.5, torch.float32)
    rows = [{"top_p": 0.97, "temperature": 1.3}, {"top_k": 40, "top_p": 0.9}, {"min_p": 0.02, "top_p": 0.8}] * 3
    together = find(logits, rows)
    order = generator.permutation(9).tolist()
    assert torch.equal(find(logits[order], [rows[i] for i in order]), together[order])
    assert torch.equal(torch.cat([find(logits[i : i + 1], [rows[i]]) for i in range(9)]), together)


KINDS = [
    {"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 20, "top_p": 0.95, "temperature": 0.6}, {"top_p": 0.9},
    {"min_p": 0.05, "temperature": 1.5}, {"top_k": 1}, {"top_k": 400, "temperature": 3.0}, {"top_p": 1e-6},
    {"top_p": 0.9, "presence_penalty": 0.4}, {"top_k": 7, "allowed_token_ids": [3, 5, 8, 13]},
]  # fmt: skip


def sampler_of(num_rows: int, vocab_size: int, find_floors=None, device=CPU) -> Sampler:
    table = SequenceTable(num_rows + 1, 9, 16, vocab_size, device)
    new = [NewSequence(i, [1, 2, 3], 2, 7 * i, SamplingSettings(**KINDS[i % 10])) for i in range(num_rows)]
    table.update(Batch(new=new))
    return Sampler(table, None if find_floors is None else partial(sample_rows, find_floors))


@pytest.mark.interpreter
@pytest.mark.parametrize(("vocab_size", "dtype"), [(300, torch.float32), *((2051, each) for each in DTYPES)], ids=str)
def test_a_cpu_and_the_kernel_sample_the_same_tokens(dtype, vocab_size):
    """Rows of every kind together, on the paths of a CPU and of a GPU."""
    rows, positions = np.arange(30), np.full(30, 3)
    logits = random_logits(np.random.default_rng(0), 30, vocab_size, 2.0, dtype)
    logits[13] = -INF
    logits[22, 5] = torch.nan
    logits[12, 7] = INF
    expected = sampler_of(30, vocab_size)(logits, rows, positions).result()[0]
    assert [expected[row] for row in (13, 22, 12)] == [NO_TOKEN] * 3
    for find_floors in (kernel.find_floors, floors_by_sorting):
        at_once = sampler_of(30, vocab_size, find_floors, DEVICE)
        assert at_once(logits.to(DEVICE), rows, positions).result()[0] == expected


class Launches(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.interpreter
def test_truncated_rows_take_one_launch_for_all_as_untruncated_ones_do(monkeypatch):
    launched, launchers = [], kernel.floor_kernel

    class Counted:
        def __getitem__(self, grid):
            launched.append(grid)
            return launchers[grid]

    monkeypatch.setattr(kernel, "floor_kernel", Counted())
    counts = []
    for chosen in ([0, 1], [2, 3], [0, 1, 2, 3, 4, 5, 6, 7]):
        sampler = sampler_of(8, 300, kernel.find_floors)
        logits = torch.zeros(len(chosen), 300)
        with Launches() as operations:
            sampler.sample(logits, np.array(chosen), np.full(len(chosen), 3))
        counts.append(operations.count)
    assert launched == [(2,), (2,), (8,)]
    assert len(set(counts)) == 1


@pytest.mark.gpu
def test_no_step_with_truncated_rows_synchronizes_with_a_gpu():
    sampler = sampler_of(20, 151_936, kernel.find_floors, DEVICE)
    rows, positions = np.arange(20), np.full(20, 3)
    logits = 3 * torch.randn(20, 151_936, dtype=torch.bfloat16, device=DEVICE)
    sampler(logits, rows, positions).result()
    torch.cuda.set_sync_debug_mode("error")
    try:
        samples = sampler(logits, rows, positions)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = sampler_of(20, 151_936)(logits.cpu(), rows, positions).result()[0]
    assert sum(ours == theirs for ours, theirs in zip(samples.result()[0], expected, strict=True)) >= 19
