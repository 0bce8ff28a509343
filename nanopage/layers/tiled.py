"""Linear layers and an embedding for a CPU, with weights in tiles: int8 with a scale for each output, whose inputs are
rounded to int8 as well, or bfloat16 (see kernels/cpu/tile_linear.py).

`tile` replaces plain modules with these once the weights are loaded.
"""

import torch
from torch import Tensor, nn

from nanopage.kernels.cpu import tile_linear
from nanopage.layers.linear import Linear
from nanopage.layers.packed import replace_linears


class TiledLinear(nn.Module):
    """A Linear whose weight exists only in tiles of `dtype`."""

    tiles: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, linear: Linear, dtype: torch.dtype):
        super().__init__()
        self.out_features, self.in_features = linear.out_features, linear.in_features
        self.dtype = linear.weight.dtype
        tiles, scales = tile_linear.tile(linear.weight.data, dtype)
        self.register_buffer("tiles", tiles, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.nanopage.tile_linear(x, self.tiles, self.scales)[:, : self.out_features]
        return y if self.bias is None else y + self.bias


class TiledEmbedding(nn.Module):
    """An embedding tied to a tiled head. The two share one matrix."""

    tiles: Tensor
    scales: Tensor

    def __init__(self, head: TiledLinear):
        super().__init__()
        self.in_features, self.dtype = head.in_features, head.dtype
        self.register_buffer("tiles", head.tiles, persistent=False)
        self.register_buffer("scales", head.scales, persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        return tile_linear.rows(self.tiles, self.scales, input_ids, self.in_features, self.dtype)


def tile(module: nn.Module, dtype: torch.dtype) -> None:
    """Tile every Linear in a module, and the embedding if it is tied to one of them. dtype: int8 or bfloat16."""
    replace_linears(module, lambda linear: TiledLinear(linear, dtype), TiledEmbedding)
