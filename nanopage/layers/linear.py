"""Linear layers, y = x Wᵀ + b. Several matrices of a checkpoint are fused into one if they share an input."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """A matrix product over one or more fused output parts.

    Args:
        in_features: size of the input.
        parts: checkpoint name -> output features; `{"q_proj": 576, "k_proj": 192, "v_proj": 192}` is one
            [960, in] matrix whose rows come from three tensors of the checkpoint. A number makes a plain layer, with
            one part named "".
        bias: whether every part has a bias.

    Shapes: x [..., in_features] -> [..., sum of parts].
    """

    def __init__(self, in_features: int, parts: dict[str, int] | int, bias: bool = False):
        super().__init__()
        self.parts = {"": parts} if isinstance(parts, int) else parts
        self.in_features, self.out_features = in_features, sum(self.parts.values())
        self.weight = nn.Parameter(torch.empty(self.out_features, in_features))
        self.bias = nn.Parameter(torch.empty(self.out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)
