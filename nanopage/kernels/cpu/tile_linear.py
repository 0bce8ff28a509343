"""Products with weights of fewer bits than activations: int8 with one scale for each output (W8A16), or bfloat16 for
activations in float32.

The int8 weights of an output are divided by their largest magnitude and rounded to 127 steps on either side of zero
(vector-wise absmax, as in LLM.int8() by Dettmers et al. 2022, which also quantizes activations). The integers are exact
in bfloat16, and the scale is applied to the sum. bfloat16 is how most checkpoints store their weights: a CPU that does
not multiply it computes in float32, but need not read twice the bytes.

The weights are stored in tiles like oneDNN's blocks: a vector register holds weights of different outputs, so a product
of few rows needs no sum across a register.
"""

import torch
from torch import Tensor

from nanopage.kernels.cpu.packed_linear import TILE, library


def tile(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Store a weight [out, in] of any floating type in tiles of int8 or bfloat16.

    Returns: tiles [ceil(out / TILE), in, TILE], zero beyond `out`, and float32 scales [ceil(out / TILE), TILE], which
        are 1 for bfloat16.
    """
    num_tiles = -(-len(weight) // TILE)
    tiles = torch.zeros(num_tiles, weight.shape[1], TILE, dtype=dtype, device=weight.device)
    scales = torch.ones(num_tiles, TILE, device=weight.device)
    for i, part in enumerate(weight.split(TILE)):  # one tile at a time: float32 takes more memory
        part = part.float()
        if dtype == torch.int8:
            scale = (part.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)  # not 0, even for zeros
            scales[i, : len(part)] = scale
            part = (part / scale[:, None]).round()
        tiles[i, :, : len(part)] = part.T
    return tiles, scales


def rows(tiles: Tensor, scales: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows `ids` [T] of the weight [out, in]: [T, in]."""
    tile, lane = ids // TILE, ids % TILE
    return (tiles[tile, :, lane] * scales[tile, lane][:, None]).to(dtype)


def product(x: Tensor, tiles: Tensor, scales: Tensor) -> Tensor:
    """Multiply x [T, in] by the weight: [T, tiles * TILE]. Converts the whole weight to x's dtype first; compiled code
    converts a part at a time (tile_linear.cpp)."""
    products = torch.matmul(x, tiles.to(x.dtype)) * scales[:, None]  # [tiles, T, TILE]
    return products.transpose(0, 1).flatten(1).to(x.dtype)


# Registered as an operator, so that compiled code calls tile_linear.cpp for it.
library.define("tile_linear(Tensor x, Tensor tiles, Tensor scales) -> Tensor")
library.impl("tile_linear", product, "CompositeExplicitAutograd")


@torch.library.register_fake("nanopage::tile_linear", lib=library)
def _(x, tiles, scales):
    return x.new_empty(x.shape[0], tiles.shape[0] * TILE)
