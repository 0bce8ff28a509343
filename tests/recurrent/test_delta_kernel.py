"""delta_kernel.py in Triton's interpreter where there is no GPU, against the plain form. tests/kernels/ahead_of_time.py
compiles it."""

import random

import pytest
import torch
from divisions import pages
from helpers import examples
from test_delta_rule import draw_tokens

from nanopage.recurrent.delta_kernel import update
from nanopage.recurrent.delta_rule import delta_rule
from nanopage.recurrent.sequences import divide
from nanopage.recurrent.states import States, divided

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("world", range(examples(8)))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-11)], ids=str)
def test_the_kernel_equals_the_plain_form(world, dtype, tolerance):
    """Where sequences begin, go on in their block or in another one, and have drafts; of odd sizes, too."""
    rng, generator = random.Random(world), torch.Generator().manual_seed(world)
    heads, key_dim, value_dim = rng.choice([1, 2, 3]), rng.choice([2, 5, 16]), rng.choice([1, 4, 24])
    counts = sorted(rng.choice([1, 1, 2, 7]) for _ in range(rng.randint(1, 4)))
    kept = [rng.randint(1, count) for count in counts]
    shapes = (3, 2), (heads, key_dim, value_dim)
    cache = torch.randn(2, 2 * len(counts) + 1, divided(shapes, 2)[-1][1] + 2, generator=generator, dtype=dtype)
    step = pages(counts, kept)
    step.sources = torch.tensor([rng.choice([-1, 2 * i, 2 * i]) for i in range(len(counts))])
    step.targets = torch.tensor([2 * i + rng.randint(0, 1) for i in range(len(counts))])
    tokens = [part.to(dtype) for part in draw_tokens(rng, generator, sum(counts), heads, key_dim, value_dim)]
    here, first = cache.to(DEVICE), 0
    for group in divide(step):
        rows = [part[first : first + group.num_rows] for part in tokens]
        first += group.num_rows
        plain = States(cache, shapes, group)
        expected, after = delta_rule(*rows, plain.read(1), group.prompts)
        plain.write(1, after)
        names = [name for name in group.__slots__ if isinstance(getattr(group, name), torch.Tensor)]
        for name in names:
            setattr(group, name, getattr(group, name).to(DEVICE))
        out = update(*(part.to(DEVICE) for part in rows), States(here, shapes, group), 1)
        torch.testing.assert_close(out.cpu(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(here.cpu(), cache, rtol=tolerance, atol=tolerance)  # other blocks are as they were
