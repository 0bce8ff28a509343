"""Products with weights in oneDNN's blocked layout. oneDNN and compiled loops read the same copy of the weights.

oneDNN computes products of several rows. A product of a single row is one pass over the weights, limited by the
memory's bandwidth. A loop that Inductor compiles computes such a product without the cost of a call, and reads oneDNN's
tiles in place.
"""

import ctypes
import functools

import torch
from torch import Tensor

TILE = 64  # outputs of a tile, unless `tile_width` returns another number


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN is available and supports this dtype on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: Tensor) -> Tensor:
    """Convert a weight [out, in] to oneDNN's blocked layout, an opaque tensor of the same size."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)


def packed_linear(x: Tensor, packed_weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [..., in] by a weight packed by `pack`: [..., out]."""
    return torch.ops.mkldnn._linear_pointwise.default(x, packed_weight, bias, "none", [], "")


def tiles_of(packed_weight: Tensor, weight: Tensor) -> Tensor | None:
    """View the memory of `packed_weight`, which is `pack(weight)`, as an ordinary tensor. The view must not outlive
    `packed_weight`.

    Returns: float32 [out / width, in, width], or int32 [out / width, in / 2, width] with two bfloat16 in each element,
        the even input in the lower half. `tile_width` returns the width. None if oneDNN chose another layout, as it
        does for sizes that need padding.
    """
    return _view_as_tiles(packed_weight, weight, tile_width(weight.dtype))


@functools.cache
def tile_width(dtype: torch.dtype) -> int:
    """Return the number of outputs in a oneDNN tile: `TILE`, or 32 for bfloat16 on a processor with AMX."""
    weight = torch.randn(TILE, TILE, dtype=dtype, generator=torch.Generator().manual_seed(0))
    packed_weight = pack(weight)
    return 32 if _view_as_tiles(packed_weight, weight, 32) is not None else TILE


def _view_as_tiles(packed_weight: Tensor, weight: Tensor, width: int) -> Tensor | None:
    out_features, in_features = weight.shape
    per_word = 4 // weight.itemsize
    if out_features % width or in_features % per_word or torch.ops.mkldnn._nbytes(packed_weight) != weight.nbytes:
        return None
    address = torch.ops.mkldnn.data_ptr(packed_weight)
    memory = (ctypes.c_char * weight.nbytes).from_address(address)
    word = torch.float32 if per_word == 1 else torch.int32
    tiles = torch.frombuffer(memory, dtype=word).view(-1, in_features // per_word, width)
    for i in (0, len(tiles) - 1):
        expected = weight[i * width : (i + 1) * width].view(word).T
        if not torch.equal(tiles[i].view(torch.int32), expected.contiguous().view(torch.int32)):
            return None
    return tiles


def matvec(x: Tensor, tiles: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [1, in] by a weight given by its `tiles_of`: [1, out], summed in float32."""
    row = x.flatten().float()
    sums = []
    # Unrolled over vector registers of outputs, so that one loop reads a tile's memory in order.
    for lanes in tiles.unflatten(2, (-1, 16)).unbind(2):
        if tiles.dtype == torch.int32:
            even, odd = row.view(-1, 2, 1).unbind(1)
            low, high = (lanes << 16).view(torch.float32), (lanes & -0x10000).view(torch.float32)
            sums.append((low * even + high * odd).sum(1))
        else:
            sums.append((lanes * row[:, None]).sum(1))
    product = torch.stack(sums, 1).view(1, -1)
    return (product if bias is None else product + bias).to(x.dtype)


def rows(tiles: Tensor, ids: Tensor) -> Tensor:
    """Read rows `ids` [T] of a weight given by its `tiles_of`: [T, in]."""
    width = tiles.shape[2]
    words = tiles[ids // width, :, ids % width]
    return words.view(torch.bfloat16) if words.dtype == torch.int32 else words


# Tracing cannot look into oneDNN, so the product is registered as an operator: a single call in a compiled graph.
library = torch.library.Library("nanopage", "DEF")
library.define("packed_linear(Tensor x, Tensor packed_weight, Tensor? bias) -> Tensor")
library.impl("packed_linear", packed_linear, "CompositeExplicitAutograd")


@torch.library.register_fake("nanopage::packed_linear", lib=library)
def _(x, packed_weight, bias):
    return x.new_empty(*x.shape[:-1], packed_weight.shape[0])
