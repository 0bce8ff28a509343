"""Products with int8 weights and one scale for each output. Activations keep their dtype (W8A16).

The weights of an output are divided by their largest magnitude and rounded to 127 steps on either side of zero
(vector-wise absmax, as in LLM.int8() by Dettmers et al. 2022, which also quantizes activations). The integers are exact
in bfloat16, and the scale is applied to the sum. The weights are stored in tiles like oneDNN's blocks: a vector
register holds weights of different outputs, so a product of few rows needs no sum across a register.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopage.kernels.cpu.packed_linear import TILE, library


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a weight [out, in] of any floating type.

    Returns: int8 tiles [ceil(out / TILE), in, TILE], zero beyond `out`, and float32 scales [ceil(out / TILE), TILE].
    """
    num_tiles = -(-len(weight) // TILE)
    tiles = torch.zeros(num_tiles, weight.shape[1], TILE, dtype=torch.int8, device=weight.device)
    scales = torch.zeros(num_tiles, TILE, device=weight.device)
    for i, part in enumerate(weight.split(TILE)):  # one tile at a time: float32 takes more memory
        part = part.float()
        scale = (part.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)  # not 0, even for zeros
        tiles[i, :, : len(part)] = (part / scale[:, None]).round().T
        scales[i, : len(part)] = scale
    return tiles, scales


def rows(tiles: Tensor, scales: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows `ids` [T] of the quantized weight [out, in]: [T, in]."""
    tile, lane = ids // TILE, ids % TILE
    return (tiles[tile, :, lane] * scales[tile, lane][:, None]).to(dtype)


def product(x: Tensor, tiles: Tensor, scales: Tensor) -> Tensor:
    """Multiply x [T, in] by the quantized weight: [T, tiles * TILE]. Converts the whole weight to x's dtype first;
    compiled code converts a part at a time (int8_linear.cpp)."""
    weight = tiles.transpose(1, 2).to(x.dtype).reshape(-1, x.shape[1])
    return (F.linear(x, weight) * scales.flatten()).to(x.dtype)


# Registered as an operator, so that compiled code calls int8_linear.cpp for it.
library.define("int8_linear(Tensor x, Tensor tiles, Tensor scales) -> Tensor")
library.impl("int8_linear", product, "CompositeExplicitAutograd")


@torch.library.register_fake("nanopage::int8_linear", lib=library)
def _(x, tiles, scales):
    return x.new_empty(x.shape[0], tiles.shape[0] * TILE)
