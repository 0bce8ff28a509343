"""Linear layers, y = x Wᵀ + b. Several matrices of a checkpoint are fused into one if they share an input."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nanopage.layers.embedding import Embedding
from nanopage.layers.weight import Floats, Weight


class Linear(nn.Module):
    """A matrix product over one or more fused output parts.

    Args:
        in_features: size of the input.
        parts: checkpoint name -> output features; `{"q_proj": 576, "k_proj": 192, "v_proj": 192}` is one
            [960, in] matrix whose rows come from three tensors of the checkpoint. A number makes a plain layer, with
            one part named "".
        bias: whether every part has a bias.

    Shapes: x [T, in_features] -> [T, sum of parts]. Only Floats and PackedWeight accept more than two dimensions.
    """

    def __init__(self, in_features: int, parts: dict[str, int] | int, bias: bool = False):
        super().__init__()
        self.parts = {"": parts} if isinstance(parts, int) else parts
        self.in_features, self.out_features = in_features, sum(self.parts.values())
        self.weight: Any = Floats(self.out_features, in_features)  # or another Weight (weight.py)
        self.bias = nn.Parameter(torch.empty(self.out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.product(x, self.bias)

    def slots(self, parameter: Tensor) -> dict[str, Tensor]:
        """What the tensors of a checkpoint fill of the matrix, or of the bias, by the names of the parts."""
        return dict(zip(self.parts, parameter.split(list(self.parts.values())), strict=True))


def replace_weights(module: nn.Module, replace: Callable[[Linear], Weight]) -> None:
    """Replace the floats of every Linear in a module, and of an embedding that shares them, one after the other, so
    that at most one matrix exists twice.

    Args: replace: makes the new weight of a Linear, or returns the old one to keep it.
    """
    sharing: dict[int, list[Any]] = {}  # layers by their weight
    for layer in module.modules():
        if isinstance(layer, Linear | Embedding) and isinstance(layer.weight, Floats):
            sharing.setdefault(id(layer.weight), []).append(layer)
    # A matrix shared with an embedding is the largest: replaced first, its memory would be cut up for the others, and
    # on a CPU fewer huge pages would be left.
    for layers in sorted(sharing.values(), key=len):
        for linear in [layer for layer in layers if isinstance(layer, Linear)]:
            weight = replace(linear)
            for layer in layers:
                if layer is linear or weight.has_rows:
                    layer.weight = weight
