"""The gated feed-forward layer, SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x))."""

import torch.nn.functional as F
from torch import Tensor, nn

from nanopage.layers.linear import Linear


class MLP(nn.Module):
    """Computes gate and up in one product. Shape: [T, hidden_size] -> same."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False):
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, {"gate_proj": intermediate_size, "up_proj": intermediate_size}, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)
