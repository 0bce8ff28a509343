"""Weights in tiles, for a CPU: integers, whose inputs are rounded to int8 as well, or 16 bits (see cpu/tile_linear.py).

`tile` replaces weights in floats with weights in tiles once they are loaded. For a quantized .gguf file,
quantization/gguf_tiles.py makes the tiles.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from nanopage.cpu import tile_linear
from nanopage.layers.linear import Linear, replace_weights
from nanopage.layers.weight import Floats


class TiledWeight(nn.Module):
    """A weight that exists only in tiles.

    multiply: computes products when a step runs eagerly, as the operator nanopage::tile_linear does.

    Args: dtype: the dtype of activations.
    """

    tiles: Tensor
    scales: Tensor
    has_rows = True

    def __init__(self, out_features: int, in_features: int, tiles: Tensor, scales: Tensor, dtype: torch.dtype):
        super().__init__()
        self.out_features, self.in_features, self.dtype = out_features, in_features, dtype
        self.register_buffer("tiles", tiles, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.multiply: Callable[[Tensor, Tensor, Tensor], Tensor] = torch.ops.nanopage.tile_linear

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self.multiply(x, self.tiles, self.scales)[:, : self.out_features]
        return y if bias is None else y + bias

    def rows(self, indices: Tensor) -> Tensor:
        return tile_linear.rows(self.tiles, self.scales, indices, self.in_features, self.dtype)


def has_only_float16(module: nn.Module) -> bool:
    """Whether float16 represents all weights of linear layers exactly."""
    weights = (child.weight for child in module.modules() if isinstance(child, Linear))
    matrices = (weight.matrix for weight in weights if isinstance(weight, Floats))
    return all(torch.equal(matrix.to(torch.float16).to(matrix.dtype), matrix) for matrix in matrices)


def tile(module: nn.Module, kind: str) -> None:
    """Tile the weight of every Linear in a module, and the embedding's weight if the embedding is tied to one of them.

    Args:
        kind: "int4", "int8", "bfloat16", "float16" or "float32". With int4, two kinds of matrices become int8: the
            head, whose rounding costs the most, and matrices whose number of inputs is not a multiple of INT4_GROUP.
    """
    head = getattr(module, "lm_head", None)

    def replace(linear: Linear) -> TiledWeight:
        matrix = linear.weight.matrix.data
        if kind != "int4":
            tiles, scales = tile_linear.tile(matrix, getattr(torch, kind))
        elif linear is head or linear.in_features % tile_linear.INT4_GROUP:
            tiles, scales = tile_linear.tile(matrix, torch.int8)
        else:
            tiles, scales = tile_linear.tile_int4(matrix)
        return TiledWeight(linear.out_features, linear.in_features, tiles, scales, matrix.dtype)

    replace_weights(module, replace)
