"""int8 weights with a scale for each output, activations as they are (W8A16): see kernels/cpu/int8_linear.py."""

import torch
from torch import Tensor, nn

from nanopage.kernels.cpu import int8_linear
from nanopage.layers.linear import Linear
from nanopage.layers.packed import replace_linears


class Int8Linear(nn.Module):
    """A Linear in int8."""

    tiles: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, linear: Linear):
        super().__init__()
        self.out_features, self.dtype = linear.out_features, linear.weight.dtype
        tiles, scales = int8_linear.quantize(linear.weight.data)
        self.register_buffer("tiles", tiles, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.nanopage.int8_linear(x, self.tiles, self.scales)[:, : self.out_features]
        return y if self.bias is None else y + self.bias


class Int8Embedding(nn.Module):
    """An embedding tied to a quantized head."""

    tiles: Tensor
    scales: Tensor

    def __init__(self, head: Int8Linear):
        super().__init__()
        self.dtype = head.dtype
        self.register_buffer("tiles", head.tiles, persistent=False)
        self.register_buffer("scales", head.scales, persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        return int8_linear.rows(self.tiles, self.scales, input_ids, self.dtype)


def quantize(module: nn.Module) -> None:
    """Quantize every Linear in a module, and the embedding if it is tied to one of them."""
    replace_linears(module, Int8Linear, Int8Embedding)
