"""What a steady decode step of the sampler asks of the device: no values, and as much for many rows as for few."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from on_a_cpu import floors_by_sorting
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanopage.sampling import constraints, penalties, sampler, samples
from nanopage.sampling.sampler import Sampler, sample_rows
from nanopage.state import sampling_table, sequence_table
from nanopage.state.sequence_table import SequenceTable
from nanopage.step import Batch, NewSequence, SamplingSettings

VOCAB_SIZE = 60
CPU = torch.device("cpu")
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}
WORDS = {"bad_words_token_ids": [[5], [6, 7], [8, 9, 10]]}
KINDS = {
    "truncation": {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "temperature": 0.6},
    "repetition": {"repetition_penalty": 1.1},
    "penalties": PENALTIES,
    "minimum": {"min_tokens": 900, "ending_token_ids": [2, 3]},
    "words": WORDS,
    "bias": {"logit_bias": {4: 2.0, 5: -3.0}},
    "allowed": {"allowed_token_ids": list(range(40))},
    "everything": {
        **PENALTIES, **WORDS, "min_tokens": 900, "ending_token_ids": [2], "logit_bias": {4: 2.0},
        "allowed_token_ids": list(range(1, 50)),
    },
}  # fmt: skip


class Operations(TorchDispatchMode):
    """Counts torch's operations, and refuses those that read values of a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        for name in ("_local_scalar_dense", "nonzero", "unique", "is_nonzero", "equal", "masked_select"):
            assert name not in str(func), f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@dataclass
class Step:
    operations: int
    uploads: int  # numbers that were sent to the device


def make_sampler(num_rows: int, length: int, settings: dict, device=CPU) -> Sampler:
    """A sampler of sequences of `length` tokens, and a few more."""
    made = SequenceTable(num_rows + 1, length + 5, 16, VOCAB_SIZE, device)
    settings = SamplingSettings(**settings)
    made.update(Batch(new=[NewSequence(row, [row % VOCAB_SIZE] * length, 3, row, settings) for row in range(num_rows)]))
    return Sampler(made, partial(sample_rows, floors_by_sorting))


def run_step(sample: Sampler, position: int) -> None:
    """Sample the tokens at a position."""
    num_rows, device = len(sample.table.tokens) - 1, sample.table.device
    logits = torch.zeros(num_rows, VOCAB_SIZE, dtype=torch.bfloat16, device=device)
    sample(logits, np.arange(num_rows), np.full(num_rows, position))


def run_steps(monkeypatch, num_rows: int, length: int, settings: dict, device=CPU, num_steps=3) -> Step:
    """Sample for sequences of `length` tokens, and watch the last step."""
    sent = []

    def to_device(values, device, dtype=None) -> Tensor:
        tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
        sent.append(tensor.numel())
        return tensor.to(device)

    for module in (constraints, penalties, sampler, samples, sampling_table, sequence_table):
        monkeypatch.setattr(module, "to_device", to_device)
    sample = make_sampler(num_rows, length, settings, device)
    for step in range(num_steps):
        del sent[:]
        with Operations() as operations:
            run_step(sample, length + step)
    return Step(operations.count, sum(sent))


@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_take_as_many_operations_as_few(monkeypatch, kind):
    few, many = (run_steps(monkeypatch, num_rows, 20, KINDS[kind]) for num_rows in (2, 32))
    assert few.operations == many.operations


@pytest.mark.parametrize("kind", KINDS)
def test_uploads_do_not_grow_with_the_context(monkeypatch, kind):
    short, long = (run_steps(monkeypatch, 8, length, KINDS[kind]) for length in (20, 500))
    assert short == long
    assert long.uploads <= 8 * 15, "a few numbers for each row"


@pytest.mark.parametrize("kind", KINDS)
def test_no_step_waits_for_the_device(monkeypatch, kind):
    """Tensors of the meta device have no values: an operation that had to wait for one would raise."""
    run_steps(monkeypatch, 4, 20, KINDS[kind], torch.device("meta"), num_steps=1)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_no_step_synchronizes_with_a_gpu(kind):
    sample = make_sampler(4, 20, KINDS[kind], torch.device("cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3):
            run_step(sample, 20 + step)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_no_row_needs_takes_no_operations(monkeypatch):
    plain = run_steps(monkeypatch, 8, 20, {})
    reached = run_steps(monkeypatch, 8, 20, {"min_tokens": 17, "ending_token_ids": [2]})
    assert plain == reached, "the minimum length is reached"
    assert plain.operations < run_steps(monkeypatch, 8, 20, {"min_tokens": 30, "ending_token_ids": [2]}).operations
    # Repetition penalties count no tokens.
    repetition, counted = (run_steps(monkeypatch, 8, 20, KINDS[kind]) for kind in ("repetition", "penalties"))
    assert repetition.operations < counted.operations


def test_the_constraints_of_a_sequence_are_sent_once():
    made = SequenceTable(9, 40, 16, VOCAB_SIZE, CPU)
    settings = SamplingSettings(**KINDS["everything"])
    made.update(Batch(new=[NewSequence(row, [1, 2, 3], 3, row, settings) for row in range(8)]))
    rules = list(made.sampling.rules)
    sample = Sampler(made)
    for rows in ([0, 1, 2], [2, 1], [5, 6, 7], list(range(8))):
        sample(torch.zeros(len(rows), VOCAB_SIZE), np.array(rows), np.full(len(rows), 3))
    assert all(now is before for now, before in zip(made.sampling.rules, rules, strict=True))
