"""Linear layers and an embedding for a CPU, with weights in tiles: integers, whose inputs are rounded to int8 as well,
or 16 bits (see cpu/tile_linear.py).

`tile` replaces plain modules with these once the weights are loaded. Those of a quantized .gguf file are made by
quantization/gguf_tiles.py.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from nanopage.cpu import tile_linear
from nanopage.cpu.packed import replace_linears
from nanopage.layers.embedding import Embedding
from nanopage.layers.linear import Linear


class TiledLinear(nn.Module):
    """A Linear whose weight exists only in tiles.

    product: computes products when a step runs eagerly, as the operator nanopage::tile_linear does.
    """

    tiles: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, linear: Linear, tiles: Tensor, scales: Tensor):
        super().__init__()
        self.parts, self.out_features, self.in_features = linear.parts, linear.out_features, linear.in_features
        self.register_buffer("tiles", tiles, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.bias = linear.bias
        self.product: Callable[[Tensor, Tensor, Tensor], Tensor] = torch.ops.nanopage.tile_linear

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x, self.tiles, self.scales)[:, : self.out_features]
        return y if self.bias is None else y + self.bias


class TiledEmbedding(nn.Module):
    """An embedding in tiles, which may be those of a TiledLinear. `dtype` is that of activations."""

    tiles: Tensor
    scales: Tensor

    def __init__(self, tiles: Tensor, scales: Tensor, in_features: int, dtype: torch.dtype):
        super().__init__()
        self.in_features, self.dtype = in_features, dtype
        self.register_buffer("tiles", tiles, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        return tile_linear.rows(self.tiles, self.scales, input_ids, self.in_features, self.dtype)


def has_only_float16(module: nn.Module) -> bool:
    """Whether all weights of linear layers are numbers that float16 has."""
    linears = (child for child in module.modules() if isinstance(child, Linear))
    return all(
        torch.equal(linear.weight.to(torch.float16).to(linear.weight.dtype), linear.weight) for linear in linears
    )


def tile(module: nn.Module, kind: str) -> None:
    """Tile every Linear in a module, and the embedding if it is tied to one of them.

    Args:
        kind: "int4", "int8", "bfloat16" or "float16". With int4, the head, whose rounding costs the most, and matrices
            whose number of inputs is not a multiple of INT4_GROUP become int8.
    """
    head = getattr(module, "lm_head", None)

    def replace(linear: Linear) -> TiledLinear:
        weight = linear.weight.data
        if kind != "int4":
            return TiledLinear(linear, *tile_linear.tile(weight, getattr(torch, kind)))
        if linear is head or linear.in_features % tile_linear.INT4_GROUP:
            return TiledLinear(linear, *tile_linear.tile(weight, torch.int8))
        return TiledLinear(linear, *tile_linear.tile_int4(weight))

    def replace_tied(head: TiledLinear, embedding: Embedding) -> TiledEmbedding:
        return TiledEmbedding(head.tiles, head.scales, head.in_features, embedding.weight.dtype)

    replace_linears(module, replace, replace_tied)
