"""The gated feed-forward layer: down(act(gate(x)) * up(x)), with SiLU (SwiGLU, Shazeer 2020) or another activation."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from nanopage.layers.linear import Linear


def relu2(x: Tensor) -> Tensor:
    """Squared ReLU (So et al. 2021)."""
    return F.relu(x).square()


# The keys are names in config.json: checks.fields.ACTIVATIONS.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": relu2,
}


class MLP(nn.Module):
    """Computes gate and up in one product. Shape: [T, hidden_size] -> same."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False, activation: str = "silu"):
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, {"gate_proj": intermediate_size, "up_proj": intermediate_size}, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.activation(gate) * up)
