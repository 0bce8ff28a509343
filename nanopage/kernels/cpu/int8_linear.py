"""Products with int8 weights and one scale for each output. Activations keep their dtype (W8A16).

The weights of an output are divided by their largest magnitude and rounded to 127 steps on either side of zero
(vector-wise absmax, as in LLM.int8() by Dettmers et al. 2022, which also quantizes activations). The integers are exact
in bfloat16, and the scale is applied to the sum. The weights are stored in tiles like oneDNN's blocks: a vector
register holds weights of different outputs, so a product of few rows needs no sum across a register.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopage.kernels.cpu.packed_linear import TILE

# The most rows for which `product_of_few` is faster than `product`, which multiplies matrices in this dtype.
FEW_ROWS = {torch.float32: 256, torch.bfloat16: 20}
ROWS = 4  # rows that share a load of the weights: with 4 registers of outputs, 16 sums are in registers


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
    """Multiply x [T, in] by the quantized weight: [T, tiles * TILE]. Converts the whole weight to x's dtype first."""
    weight = tiles.transpose(1, 2).to(x.dtype).reshape(-1, x.shape[1])
    return (F.linear(x, weight) * scales.flatten()).to(x.dtype)


def product_of_few(x: Tensor, tiles: Tensor, scales: Tensor) -> Tensor:
    """Compute the same as `product`, in code for Inductor.

    Reads the int8 weights once for every ROWS rows, or once for a single row, and sums in float32.
    """
    num_rows, in_features = x.shape
    together = 1 if num_rows == 1 else ROWS
    num_groups = -(-num_rows // together)
    padded = F.pad(x.float(), (0, 0, 0, num_groups * together - num_rows))
    # as_strided makes Inductor store the padded rows in memory. Otherwise it would convert and pad them again for every
    # weight.
    groups = padded.as_strided((num_groups, together, in_features), (together * in_features, in_features, 1))
    sums = []
    # Unrolled over vector registers of outputs and over rows, so that one loop computes all of them.
    for lanes in tiles.unflatten(2, (-1, 16)).unbind(2):
        weight = lanes.float()[:, None]  # [tiles, 1, in, 16]
        sums.append(torch.stack([(weight * row[None, :, :, None]).sum(2) for row in groups.unbind(1)], 2))
    scaled = torch.stack(sums, 3) * scales.view(-1, 1, 1, TILE // 16, 16)  # [tiles, groups, together, 4, 16]
    return scaled.permute(1, 2, 0, 3, 4).reshape(num_groups * together, -1)[:num_rows].to(x.dtype)
