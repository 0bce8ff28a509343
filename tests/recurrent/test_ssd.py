"""State space duality against its definition, token by token."""

import random

import pytest
import torch
from divisions import check_any_division, pages, run_groups
from helpers import examples

from nanopage.recurrent import sequences, ssd


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
    rng, generator = random.Random(world), torch.Generator().manual_seed(world)
    monkeypatch.setattr(sequences, "CHUNK", rng.choice([1, 3, 8, 64]))
    groups, heads, dim, size = (rng.choice([1, 2, 3]) for _ in range(4))

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made, states = [], []
    for length in [rng.choice([1, 2, 7, 8, 9, 65, 130]) for _ in range(rng.randint(1, 5))]:
        decay = -draw(length, groups, heads).exp() * rng.choice([1e-3, 1, 100])  # of long memory, or of none
        x, b, c = draw(length, groups, heads, dim), draw(length, groups, size), draw(length, groups, size)
        made.append((x, decay, b, c))
        states.append(draw(groups, heads, dim, size))
    check_any_division(rng, ssd.scan, made, states, by_definition)


def test_a_long_chunk_with_strong_decays_is_accurate_in_float32():
    """Differences of sums from the start of a chunk would lose the small decays behind large ones."""
    x, b, c = torch.randn(64, 1, 1, 2), torch.randn(64, 1, 2), torch.randn(64, 1, 2)
    decay = torch.where(torch.arange(64) < 32, -1000.0, -1e-3)[:, None, None]
    given = x, decay, b, c, torch.randn(1, 1, 1, 2, 2)
    y, _ = run_groups(ssd.scan, given[:4], given[4], pages([64], [64]))
    exact, _ = by_definition(*(tensor.double() for tensor in given[:4]), given[4][0].double())
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)
