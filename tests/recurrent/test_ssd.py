"""State space duality against its definition, token by token."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import examples

from nanopage.recurrent import ssd


def by_definition(x, decay, b, c, state):
    """y of the tokens of a sequence, and the state after them."""
    outputs = []
    for token in range(len(x)):
        product = x[token, ..., None] * b[token, :, None, None]
        state = decay[token].exp()[..., None, None] * state + product
        outputs.append((state * c[token, :, None, None]).sum(-1))
    return torch.stack(outputs), state


@pytest.mark.parametrize("world", range(examples(24)))
def test_any_division_into_steps_gives_what_the_definition_gives(world, monkeypatch):
    """Also if the last tokens of steps are drafts: the state is then that before them, and later steps compute them
    again."""
    rng, generator = random.Random(world), torch.Generator().manual_seed(world)
    monkeypatch.setattr(ssd, "CHUNK", rng.choice([1, 3, 8, 64]))
    groups, heads, dim, size = (rng.choice([1, 2, 3]) for _ in range(4))

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    drafts = rng.random() < 0.5
    lengths = [rng.choice([1, 2, 7, 8, 9, 65, 130]) for _ in range(rng.randint(1, 5))]
    sequences, states, expected = [], [], []
    for length in lengths:
        decay = -draw(length, groups, heads).exp() * rng.choice([1e-3, 1, 100])  # of long memory, or of none
        tensors = draw(length, groups, heads, dim), decay, draw(length, groups, size), draw(length, groups, size)
        sequences.append(tensors)
        states.append(draw(groups, heads, dim, size))
        expected.append(by_definition(*tensors, states[-1]))
    done = [0] * len(lengths)
    while done != lengths:
        chosen = [i for i, length in enumerate(lengths) if done[i] < length and (rng.random() < 0.7 or sum(done) == 0)]
        counts = {i: rng.choice([1, rng.randint(1, lengths[i] - done[i])]) for i in chosen}
        order = sorted(chosen, key=lambda i: counts[i] > 1)
        if not order:
            continue
        tokens = [[tensor[done[i] : done[i] + counts[i]] for tensor in sequences[i]] for i in order]
        kept = {i: rng.randint(1, counts[i]) if drafts else counts[i] for i in order}
        numbers = {"counts": counts, "kept": kept}
        pages = SimpleNamespace(**{name: np.array([of[i] for i in order]) for name, of in numbers.items()})
        before = torch.stack([states[i] for i in order])
        y, after = ssd.scan(*(torch.cat(parts) for parts in zip(*tokens, strict=True)), before, pages)
        torch.testing.assert_close(before, torch.stack([states[i] for i in order]), rtol=0, atol=0)  # not written to
        for i, rows, state in zip(order, y.split([counts[i] for i in order]), after, strict=True):
            torch.testing.assert_close(rows, expected[i][0][done[i] : done[i] + counts[i]], rtol=1e-10, atol=1e-10)
            states[i] = state
            done[i] += kept[i]
    for state, (_, last) in zip(states, expected, strict=True):
        torch.testing.assert_close(state, last, rtol=1e-10, atol=1e-10)


def test_a_long_chunk_with_strong_decays_is_accurate_in_float32():
    """Differences of sums from the start of a chunk would lose the small decays behind large ones."""
    x, b, c = torch.randn(64, 1, 1, 2), torch.randn(64, 1, 2), torch.randn(64, 1, 2)
    decay = torch.where(torch.arange(64) < 32, -1000.0, -1e-3)[:, None, None]
    given = x, decay, b, c, torch.randn(1, 1, 1, 2, 2)
    y, _ = ssd.scan(*given, SimpleNamespace(counts=np.array([64]), kept=np.array([64])))
    exact, _ = by_definition(*(tensor.double() for tensor in given[:4]), given[4][0].double())
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)
