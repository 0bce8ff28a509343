"""The kernels of LoRA adapters, in Triton's interpreter where there is no GPU, against plain torch.
tests/kernels/ahead_of_time.py compiles them."""

import pytest
import torch

from nanopage.adapters import kernels
from nanopage.adapters.layers import LoRAWeight, Running
from nanopage.cpu.lora import add_adapters
from nanopage.layers.linear import Linear

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize(
    ("num_tokens", "parts", "rank", "in_features"),
    [
        (1, {"": 70}, 8, 48),
        (33, {"q": 64, "k": 24, "v": 24}, 16, 130),
        (20, {"gate": 40, "up": 40}, 3, 256),
        (5, {"": 9}, 40, 64),
    ],
)
def test_products_as_in_plain_torch(num_tokens, parts, rank, in_features, dtype):
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    linear = LoRAWeight(Linear(in_features, parts), 4, rank, dtype, torch.device("cpu"), Running(), add_adapters)
    linear.a.copy_(normal(*linear.a.shape))
    linear.b.copy_(normal(*linear.b.shape))
    x, y = normal(num_tokens, in_features), normal(num_tokens, sum(parts.values()))
    slots = torch.randint(-1, 4, (num_tokens,), generator=generator)
    if num_tokens == 1:
        slots[:] = 2
    expected = y.double()
    weights = linear.a.double(), linear.b.double()
    add_adapters(expected, x.double(), *weights, slots, linear.sizes)
    changed = y.clone().to(DEVICE)
    tensors = [tensor.to(DEVICE) for tensor in (x, linear.a, linear.b, slots)]
    kernels.add_adapters(changed, *tensors, linear.sizes)
    error = (changed.cpu().double() - expected).abs().max() / expected.abs().max()
    assert error < {torch.float32: 2e-5, torch.float16: 4e-3}[dtype]
    assert torch.equal(changed.cpu()[slots < 0], y[slots < 0])  # bit for bit
