"""Products with weights in tiles: int8 with one scale for each output, blocks of 8 or 4 bits with a scale for each
group of inputs, or bfloat16 or float16.

For int8, the weights of an output are divided by their largest magnitude and rounded to 127 steps on either side of
zero (vector-wise absmax, as in LLM.int8() by Dettmers et al. 2022). Activations are rounded in the same way (W8A8),
GROUP_INPUTS inputs of a token at a time, because processors multiply int8 fastest. Blocks are the format of .gguf
files; activations are then rounded in the same groups as the weights. Most checkpoints store their weights in bfloat16
or float16: a CPU that does not multiply these computes in float32, but need not read twice the bytes.

The weights are stored in tiles like oneDNN's blocks: a vector register holds weights of different outputs, so a product
of few rows needs no sum across a register.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopage.cpu.packed_linear import TILE, library

GROUP_INPUTS = 64  # inputs that share a scale of their activations, as in integer_products.h
INT4_GROUP = 32  # inputs that share a scale of their int4 weights
INT4_FITS = 2
INT4_ROWS = 16 * TILE  # rows that are rounded to int4 at once
QUAD = 4  # inputs whose int8 weights are adjacent in memory
ZERO = 128  # the byte that stands for the weight 0
MANY_ROWS = 16  # rows from which on transposing int8 weights pays


def tile(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Store a weight [out, in] of any floating type in tiles of int8 or of a floating type.

    Returns: tiles, and float32 scales [ceil(out / TILE), TILE], which are 1 for floats. Tiles of floats are
        [ceil(out / TILE), in, TILE]. Tiles of int8 are uint8 [ceil(out / TILE), ceil(in / QUAD), TILE, QUAD], each
        weight plus ZERO. Weights beyond `out` are zero.
    """
    num_tiles, in_features = -(-len(weight) // TILE), weight.shape[1]
    scales = torch.ones(num_tiles, TILE, device=weight.device)
    if dtype == torch.int8:
        num_quads = -(-in_features // QUAD)
        tiles = torch.full((num_tiles, num_quads, TILE, QUAD), ZERO, dtype=torch.uint8, device=weight.device)
    else:
        tiles = torch.zeros(num_tiles, in_features, TILE, dtype=dtype, device=weight.device)
    for i, part in enumerate(weight.split(TILE)):  # one tile at a time, because float32 takes more memory
        part = part.float()
        if dtype == torch.int8:
            scale = row_scales(part, 127)
            scales[i, : len(part)] = scale
            part = F.pad((part / scale[:, None]).round(), (0, -in_features % QUAD)) + ZERO
            tiles[i, :, : len(part)] = part.unflatten(1, (-1, QUAD)).transpose(0, 1)
        else:
            tiles[i, :, : len(part)] = part.T
    return tiles, scales


def row_scales(values: Tensor, most: float) -> Tensor:
    """Scales that turn the largest magnitude of each row into `most`: [rows, n] -> float32 [rows]. Rows of zeros have
    scales other than 0, too."""
    return (values.abs().amax(1).float() / most).clamp(min=torch.finfo(torch.float32).tiny)


@dataclass
class Blocks:
    """A weight [out, in] of integers: weight = scale * integer - offset, with G groups of 16 or 32 adjacent inputs.

    integers: int8 [out, in]; from 0 to 15 for 4 bits.
    scales: float32 [out, G]. offsets: the same, or None for zeros.
    bits: 8 or 4. Weights of 4 bits have groups of 32 and offsets.
    """

    integers: Tensor
    scales: Tensor
    offsets: Tensor | None
    bits: int

    def without_rows(self) -> "Blocks":
        offsets = None if self.offsets is None else self.offsets[:0]
        return Blocks(self.integers[:0], self.scales[:0], offsets, self.bits)


def round_to_int4(weight: Tensor) -> Blocks:
    """Round a weight [out, in] of any floating type to 4 bits, with a scale and an offset for each INT4_GROUP inputs.

    Scale and offset first cover the group's range. Then, twice, they are fitted to the rounded weights by least
    squares, and the weights are rounded again. in: a multiple of INT4_GROUP.
    """
    groups = weight.float().unflatten(1, (-1, INT4_GROUP))
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    scale, offset = (high - low) / 15, -low
    for _ in range(INT4_FITS):
        integers = _divide(groups + offset, scale)
        centred, mean = integers - integers.mean(2, keepdim=True), groups.mean(2, keepdim=True)
        scale = (centred * (groups - mean)).sum(2, keepdim=True) / centred.square().sum(2, keepdim=True).clamp(min=1)
        offset = scale * integers.mean(2, keepdim=True) - mean
    scale, offset = (part.to(torch.float16).float() for part in (scale, offset))  # as they are stored
    integers = _divide(groups + offset, scale)
    return Blocks(integers.flatten(1).to(torch.int8), scale.squeeze(2), offset.squeeze(2), 4)


def _divide(values: Tensor, scale: Tensor) -> Tensor:
    return torch.where(scale > 0, values / scale, 0).round_().clamp_(0, 15)


def tile_blocks(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Store a weight of integers in tiles.

    Returns: uint8 tiles, and float16 scales [ceil(out / TILE), G, 1, TILE], or with offsets
        [ceil(out / TILE), G, 2, TILE]. Tiles of 8 bits are [ceil(out / TILE), in / QUAD, TILE, QUAD], each weight plus
        ZERO. Tiles of 4 bits are [ceil(out / TILE), in / QUAD / 2, TILE, QUAD]: the low halves of bytes are one quad,
        and the high halves are the next quad. Weights beyond `out` are zero.
    """
    padding = -len(blocks.integers) % TILE
    integers = F.pad(blocks.integers, (0, 0, 0, padding)).unflatten(0, (-1, TILE)).unflatten(2, (-1, QUAD))
    quads = integers.transpose(1, 2).view(torch.uint8)
    # Adding ZERO to a byte is the same as flipping its highest bit.
    tiles = quads ^ ZERO if blocks.bits == 8 else quads[:, 0::2] | quads[:, 1::2] << 4
    parts = [blocks.scales] if blocks.offsets is None else [blocks.scales, blocks.offsets]
    scales = F.pad(torch.stack(parts, 1), (0, 0, 0, 0, 0, padding)).unflatten(0, (-1, TILE))  # [tiles, TILE, 1 or 2, G]
    return tiles.contiguous(), scales.permute(0, 3, 2, 1).to(torch.float16).contiguous()


def tile_int8(integers: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Store int8 integers [out, in] with float32 scales [out] in tiles. Returns: as `tile`."""
    padding = -len(integers) % TILE
    quads = F.pad(integers, (0, -integers.shape[1] % QUAD, 0, padding)).unflatten(1, (-1, QUAD))
    tiles = quads.unflatten(0, (-1, TILE)).transpose(1, 2).contiguous().view(torch.uint8) ^ ZERO
    return tiles, F.pad(scales, (0, padding), value=1.0).unflatten(0, (-1, TILE))


def tile_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight [out, in] of any floating type to int4, and store it in tiles. Returns: as `tile_blocks`."""
    # A part at a time: float32 takes more memory.
    parts = [tile_blocks(round_to_int4(part)) for part in weight.split(INT4_ROWS)]
    tiles, scales = zip(*parts, strict=True)
    return torch.cat(tiles), torch.cat(scales)


def rows(tiles: Tensor, scales: Tensor, ids: Tensor, in_features: int, dtype: torch.dtype) -> Tensor:
    """Rows `ids` [T] of the weight [out, in]: [T, in]."""
    tile, lane = ids // TILE, ids % TILE
    weights = tiles[tile, :, lane]
    if scales.dim() == 4:
        return _rows_of_blocks(weights, scales[tile, :, :, lane].float(), in_features).to(dtype)
    if tiles.dtype == torch.uint8:
        weights = weights.flatten(1)[:, :in_features].float() - ZERO
    return (weights * scales[tile, lane][:, None]).to(dtype)


def _rows_of_blocks(weights: Tensor, scales: Tensor, in_features: int) -> Tensor:
    """Rows in float32 [T, in], from their bytes [T, in / QUAD or in / QUAD / 2, QUAD] and scales [T, G, 1 or 2]."""
    if weights.shape[1] * QUAD < in_features:
        integers = torch.stack([weights & 15, weights >> 4], 2).flatten(1).float()
    else:
        integers = weights.flatten(1).float() - ZERO
    scale, *offset = scales[..., None].unbind(2)
    wide = integers.unflatten(1, (scales.shape[1], -1)) * scale
    return (wide - offset[0] if offset else wide).flatten(1)


def round_activations(x: Tensor, group: int = GROUP_INPUTS) -> Tensor:
    """Round x [T, in] to the values that int8 can represent, with a scale for each `group` inputs."""
    groups = F.pad(x, (0, -x.shape[1] % group)).unflatten(1, (-1, group)).float()
    largest = groups.abs().amax(2, keepdim=True)
    steps = torch.div(torch.tensor(127.0), largest)  # the operator / would multiply by the rounded reciprocal
    rounded = (groups.double() * steps).round() * (largest / 127)  # in C++, too, these products are not rounded
    return torch.where(largest == 0, 0, rounded).flatten(1)[:, : x.shape[1]].to(x.dtype)


def product(x: Tensor, tiles: Tensor, scales: Tensor) -> Tensor:
    """Multiply x [T, in] by the weight: [T, tiles * TILE]. Converts the whole weight to x's dtype first. Compiled code
    (tile_linear.cpp) converts a part at a time, or nothing."""
    if scales.dim() == 4:
        in_features = x.shape[1]
        weight = rows(tiles, scales, torch.arange(len(tiles) * TILE), in_features, x.dtype)
        return torch.matmul(round_activations(x, in_features // scales.shape[1]), weight.T)
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


# Registered as an operator, so that compiled code calls tile_linear.cpp.
library.define("tile_linear(Tensor x, Tensor tiles, Tensor scales) -> Tensor")
library.impl("tile_linear", product, "CompositeExplicitAutograd")


@torch.library.register_fake("nanopage::tile_linear", lib=library)
def _(x, tiles, scales):
    return x.new_empty(x.shape[0], tiles.shape[0] * TILE)
