"""The gated delta rule against its definition, token by token."""

import random

import pytest
import torch
from divisions import check_any_division, pages, run_groups
from helpers import examples

from nanopage.recurrent import delta_rule as module
from nanopage.recurrent import sequences


def by_definition(q, k, v, log_decay, beta, state):
    """o of the tokens of a sequence, and the state after them."""
    outputs = []
    for token in range(len(q)):
        state = log_decay[token].exp()[:, None, None] * state
        u = beta[token][:, None] * (v[token] - torch.einsum("hkv,hk->hv", state, k[token]))
        state = state + torch.einsum("hk,hv->hkv", k[token], u)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[token]))
    return torch.stack(outputs), state


def draw_tokens(rng, generator, length, heads, key_dim, value_dim):
    """q, k, v, log_decay and beta."""

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(draw(length, heads, key_dim), dim=-1) for _ in range(2))
    log_decay = -draw(length, heads).exp() * rng.choice([1e-3, 1, 100])  # of long memory, or of none
    return q, k, draw(length, heads, value_dim), log_decay, draw(length, heads).sigmoid()


@pytest.mark.parametrize("world", range(examples(24)))
def test_any_division_into_steps_gives_what_the_definition_gives(world, monkeypatch):
    rng, generator = random.Random(world), torch.Generator().manual_seed(world)
    monkeypatch.setattr(sequences, "CHUNK", rng.choice([1, 3, 8, 64]))
    heads, key_dim, value_dim = (rng.choice([1, 2, 5]) for _ in range(3))

    made, states = [], []
    for length in [rng.choice([1, 2, 7, 8, 9, 65, 130]) for _ in range(rng.randint(1, 5))]:
        made.append(draw_tokens(rng, generator, length, heads, key_dim, value_dim))
        states.append(torch.randn(heads, key_dim, value_dim, generator=generator, dtype=torch.float64))
    check_any_division(rng, module.delta_rule, made, states, by_definition)


def test_small_decays_behind_large_ones_are_exact_in_float32():
    torch.manual_seed(0)
    shape = 64, 2, 4
    q, k, v = torch.randn(3, *shape, dtype=torch.float64)
    k = torch.nn.functional.normalize(k, dim=-1)
    log_decay = torch.full(shape[:2], -0.01, dtype=torch.float64)
    log_decay[3] = -3e4  # forgets everything; float32 would leave errors of 0.002 in sums from here on
    tensors = [*(x.float() for x in (q, k, v, log_decay)), torch.full(shape[:2], 0.5)]
    expected, _ = by_definition(*(x.double() for x in tensors), torch.zeros(2, 4, 4, dtype=torch.float64))
    out, _ = run_groups(module.delta_rule, tensors, torch.zeros(1, 2, 4, 4), pages([64], [64]))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
