"""Linear layers: y = x Wᵀ + b, with several of a checkpoint's matrices fused into one where they share an input."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopage.kernels.cpu import int8_linear, packed_linear


def pack(module: nn.Module, quantization: str | None = None) -> None:
    """Pack every Linear in a module, itself included: as it is, or in int8 (see kernels/int8_linear.py)."""
    for part in module.modules():
        if isinstance(part, Linear):
            if quantization:
                part.quantize()
            else:
                part.pack()


class Linear(nn.Module):
    """A matrix product over one or more fused output parts.

    Args:
        in_features: size of the input.
        parts: checkpoint name -> output features; `{"q_proj": 576, "k_proj": 192, "v_proj": 192}` is one
            [960, in] matrix whose rows come from three tensors of the checkpoint. One part named "" is a plain layer.
        bias: whether every part has a bias.

    Shapes: x [..., in_features] -> [..., sum of parts].
    """

    def __init__(self, in_features: int, parts: dict[str, int] | int, bias: bool = False):
        super().__init__()
        self.parts = {"": parts} if isinstance(parts, int) else parts
        self.in_features, self.out_features = in_features, sum(self.parts.values())
        self.weight = nn.Parameter(torch.empty(self.out_features, in_features))
        self.bias = nn.Parameter(torch.empty(self.out_features)) if bias else None
        self.few_rows = False  # said of int8 weights when a graph of decodes is compiled
        self.packed: Tensor | None
        self.tiles: Tensor | None
        self.scales: Tensor | None
        for name in ("packed", "tiles", "scales"):
            self.register_buffer(name, None, persistent=False)

    def pack(self) -> None:
        """Replace the weight by oneDNN's layout of it: products then stream it about twice as fast."""
        self.packed = packed_linear.pack(self.weight.data)
        self.tiles = packed_linear.tiles_of(self.packed, self.weight.data)
        del self.weight

    def quantize(self) -> None:
        """Replace the weight by int8 tiles and scales."""
        self.tiles, self.scales = int8_linear.quantize(self.weight.data)
        del self.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.tiles is not None and self.scales is not None:
            product = int8_linear.product_of_few if self.few_rows else int8_linear.product
            y = product(x, self.tiles, self.scales)[:, : self.out_features]
            return y if self.bias is None else y + self.bias
        if self.packed is None:
            return F.linear(x, self.weight, self.bias)
        if not torch.compiler.is_compiling():
            return packed_linear.packed_linear(x, self.packed, self.bias)
        if self.tiles is not None and x.shape[0] == 1:
            return packed_linear.matvec(x, self.tiles, self.bias)
        return torch.ops.nanopage.packed_linear(x, self.packed, self.bias)
