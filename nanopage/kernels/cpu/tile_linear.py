"""Products with weights in tiles: int8 with one scale for each output, or bfloat16 for activations in float32.

The int8 weights of an output are divided by their largest magnitude and rounded to 127 steps on either side of zero
(vector-wise absmax, as in LLM.int8() by Dettmers et al. 2022). So are activations (W8A8), GROUP_INPUTS inputs of a
token at a time, because processors multiply int8 fastest. bfloat16 is how most checkpoints store their weights: a CPU
that does not multiply it computes in float32, but need not read twice the bytes.

The weights are stored in tiles like oneDNN's blocks: a vector register holds weights of different outputs, so a product
of few rows needs no sum across a register.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopage.kernels.cpu.packed_linear import TILE, library

GROUP_INPUTS = 64  # inputs that share a scale of their activations, as in int8_products.h
QUAD = 4  # inputs whose int8 weights are adjacent in memory
ZERO = 128  # the byte of the weight 0
MANY_ROWS = 16  # from which on it is worth while to transpose int8 weights


def tile(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Store a weight [out, in] of any floating type in tiles of int8 or bfloat16.

    Returns: tiles, zero beyond `out`: bfloat16 [ceil(out / TILE), in, TILE]; or int8, plus ZERO, as
        uint8 [ceil(out / TILE), ceil(in / QUAD), TILE, QUAD]. And float32 scales [ceil(out / TILE), TILE], which are 1
        for bfloat16.
    """
    num_tiles, in_features = -(-len(weight) // TILE), weight.shape[1]
    scales = torch.ones(num_tiles, TILE, device=weight.device)
    if dtype == torch.int8:
        num_quads = -(-in_features // QUAD)
        tiles = torch.full((num_tiles, num_quads, TILE, QUAD), ZERO, dtype=torch.uint8, device=weight.device)
    else:
        tiles = torch.zeros(num_tiles, in_features, TILE, dtype=dtype, device=weight.device)
    for i, part in enumerate(weight.split(TILE)):  # one tile at a time: float32 takes more memory
        part = part.float()
        if dtype == torch.int8:
            scale = (part.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)  # not 0, even for zeros
            scales[i, : len(part)] = scale
            part = F.pad((part / scale[:, None]).round(), (0, -in_features % QUAD)) + ZERO
            tiles[i, :, : len(part)] = part.unflatten(1, (-1, QUAD)).transpose(0, 1)
        else:
            tiles[i, :, : len(part)] = part.T
    return tiles, scales


def rows(tiles: Tensor, scales: Tensor, ids: Tensor, in_features: int, dtype: torch.dtype) -> Tensor:
    """Rows `ids` [T] of the weight [out, in]: [T, in]."""
    tile, lane = ids // TILE, ids % TILE
    weights = tiles[tile, :, lane]
    if tiles.dtype == torch.uint8:
        weights = weights.flatten(1)[:, :in_features].float() - ZERO
    return (weights * scales[tile, lane][:, None]).to(dtype)


def round_activations(x: Tensor) -> Tensor:
    """Round x [T, in] to the values that int8 can represent, with a scale for each GROUP_INPUTS inputs."""
    groups = F.pad(x, (0, -x.shape[1] % GROUP_INPUTS)).unflatten(1, (-1, GROUP_INPUTS)).float()
    largest = groups.abs().amax(2, keepdim=True)
    steps = torch.div(torch.tensor(127.0), largest)  # the operator / multiplies by the rounded reciprocal
    rounded = (groups.double() * steps).round() * (largest / 127)  # in C++, too, these products are not rounded
    return torch.where(largest == 0, 0, rounded).flatten(1)[:, : x.shape[1]].to(x.dtype)


def product(x: Tensor, tiles: Tensor, scales: Tensor) -> Tensor:
    """Multiply x [T, in] by the weight: [T, tiles * TILE]. Converts the whole weight to x's dtype first; compiled code
    converts a part at a time, or nothing (tile_linear.cpp)."""
    if tiles.dtype == torch.uint8:
        products = _int8_product(round_activations(x), (tiles ^ ZERO).view(torch.int8))
    else:
        products = torch.matmul(x, tiles.to(x.dtype))
    return (products * scales[:, None]).transpose(0, 1).flatten(1).to(x.dtype)


def _int8_product(x: Tensor, weights: Tensor) -> Tensor:
    """Multiply x [T, in] by int8 weights [tiles, ceil(in / QUAD), TILE, QUAD]: [tiles, T, TILE]."""
    if len(x) > MANY_ROWS:
        return torch.matmul(x, weights.transpose(2, 3).flatten(1, 2)[:, : x.shape[1]].to(x.dtype))
    # Transposing the weights would take longer than multiplying each input by the weights of all inputs of its quad.
    quads = F.pad(x, (0, -x.shape[1] % QUAD)).unflatten(1, (-1, QUAD))
    products = torch.matmul(quads.transpose(1, 2).flatten(0, 1), weights.flatten(2).to(x.dtype))
    return products.unflatten(2, (-1, QUAD)).unflatten(1, (-1, QUAD)).diagonal(0, 2, 4).sum(-1)


# Registered as an operator, so that compiled code calls tile_linear.cpp for it.
library.define("tile_linear(Tensor x, Tensor tiles, Tensor scales) -> Tensor")
library.impl("tile_linear", product, "CompositeExplicitAutograd")


@torch.library.register_fake("nanopage::tile_linear", lib=library)
def _(x, tiles, scales):
    return x.new_empty(x.shape[0], tiles.shape[0] * TILE)
