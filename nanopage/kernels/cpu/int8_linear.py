"""Products with int8 weights: a byte for each and a scale for each output; activations keep their type (W8A16).

An output's weights are divided by their largest magnitude and rounded to 127 steps on either side of zero (absmax,
vector-wise: LLM.int8(), Dettmers et al. 2022, there with int8 activations as well). The integers are exact in bfloat16
and the scale is applied to the sum. They lie as oneDNN's blocks do: a vector register then holds different outputs,
and a product of few rows needs no sum across a register.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopage.kernels.cpu.packed_linear import TILE

ROWS = 4  # that are multiplied while a weight is in a register: with its 4 registers of outputs, 16 sums


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [out, in] of any floating type as int8 tiles [ceil(out / TILE), in, TILE], zeros beyond `out`, and
    float32 scales [ceil(out / TILE), TILE]."""
    num_tiles = -(-len(weight) // TILE)
    tiles = torch.zeros(num_tiles, weight.shape[1], TILE, dtype=torch.int8, device=weight.device)
    scales = torch.zeros(num_tiles, TILE, device=weight.device)
    for i, part in enumerate(weight.split(TILE)):  # one after the other: in float32 it is four times the size
        part = part.float()
        scale = (part.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)  # of zeros it is not zero
        tiles[i, :, : len(part)] = (part / scale[:, None]).round().T
        scales[i, : len(part)] = scale
    return tiles, scales


def rows(tiles: Tensor, scales: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows `ids` [T] of the quantized weight [out, in]: [T, in]."""
    tile, lane = ids // TILE, ids % TILE
    return (tiles[tile, :, lane] * scales[tile, lane][:, None]).to(dtype)


def product(x: Tensor, tiles: Tensor, scales: Tensor) -> Tensor:
    """x [T, in] times the quantized weight: [T, tiles * TILE]. The weight in x's type exists for a moment."""
    weight = tiles.transpose(1, 2).to(x.dtype).reshape(-1, x.shape[1])
    return (F.linear(x, weight) * scales.flatten()).to(x.dtype)


def product_of_few(x: Tensor, tiles: Tensor, scales: Tensor) -> Tensor:
    """The same for code that Inductor makes: it streams the int8 weights once for every ROWS rows, or for a single one,
    and sums in float32. Faster than `product` up to some 50 rows."""
    num_rows, in_features = x.shape
    together = 1 if num_rows == 1 else ROWS
    num_groups = -(-num_rows // together)
    padded = F.pad(x.float(), (0, 0, 0, num_groups * together - num_rows))
    # Inductor keeps what is seen through as_strided in memory: else every weight's loop would convert and pad again.
    groups = padded.as_strided((num_groups, together, in_features), (together * in_features, in_features, 1))
    sums = []
    # A vector register of outputs at a time, times a row at a time, unrolled: one loop does them all.
    for lanes in tiles.unflatten(2, (-1, 16)).unbind(2):
        weight = lanes.float()[:, None]  # [tiles, 1, in, 16]
        sums.append(torch.stack([(weight * row[None, :, :, None]).sum(2) for row in groups.unbind(1)], 2))
    scaled = torch.stack(sums, 3) * scales.view(-1, 1, 1, TILE // 16, 16)  # [tiles, groups, together, 4, 16]
    return scaled.permute(1, 2, 0, 3, 4).reshape(num_groups * together, -1)[:num_rows].to(x.dtype)
