import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


def inputs(length=300, heads=4, k_size=16, v_size=12, rank=10):
    generator = torch.Generator().manual_seed(length)
    shapes = (heads, k_size), (length, rank), (heads, k_size, rank), (heads, v_size, rank)
    return *(torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes), k_size**-0.5


class Largest(TorchDispatchMode):
    """The most numbers that any result has. A view has none of its own."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numbers = max(self.numbers, result.untyped_storage().nbytes() // result.element_size())
        return result


@pytest.mark.parametrize("sizes", [{}, {"length": 1}, {"heads": 1}, {"k_size": 3, "v_size": 20}, {"rank": 1}], ids=str)
def test_it_is_attention_with_k_and_v(exercise, sizes):
    given = inputs(**sizes)
    torch.testing.assert_close(exercise.attend(*given), exercise.attend_with_k_and_v(*given))


def test_one_latent_is_attended_to_alone(exercise):
    q, latents, w_k, w_v, scale = inputs(length=1)
    torch.testing.assert_close(exercise.attend(q, latents, w_k, w_v, scale), w_v @ latents[0])


def test_neither_k_nor_v_is_made(exercise):
    with Largest() as largest:
        exercise.attend(*inputs())
    assert 0 < largest.numbers <= 300 * 10, "no more than the latents: K has 300 * 4 * 16 numbers"
