"""Products with weights in oneDNN's blocked layout: one copy of them, read by oneDNN and by compiled loops alike.

For several rows the product is oneDNN's. For a single row it is one pass over the weights, as fast as memory: a loop
that Inductor makes streams it without the cost of a call, reading the tiles where oneDNN has put them.
"""

import ctypes

import torch
from torch import Tensor

TILE = 64  # outputs


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN is there and multiplies in this type natively."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: Tensor) -> Tensor:
    """oneDNN's own blocked layout of a weight [out, in]: an opaque tensor of the same size."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)


def packed_linear(x: Tensor, packed_weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] times a weight packed by `pack`: [..., out]."""
    return torch.ops.mkldnn._linear_pointwise.default(x, packed_weight, bias, "none", [], "")


def tiles_of(packed_weight: Tensor, weight: Tensor) -> Tensor | None:
    """The memory of `packed_weight`, made by `pack(weight)`, as an ordinary tensor; it must not outlive that one.

    Returns: float32 [out / TILE, in, TILE], or int32 [out / TILE, in / 2, TILE] with two bfloat16 in each, the even
        input in the lower half. None where oneDNN chose another layout, which it does for sizes that need padding.
    """
    out_features, in_features = weight.shape
    per_word = 4 // weight.itemsize
    if out_features % TILE or in_features % per_word or torch.ops.mkldnn._nbytes(packed_weight) != weight.nbytes:
        return None
    address = torch.ops.mkldnn.data_ptr(packed_weight)
    memory = (ctypes.c_char * weight.nbytes).from_address(address)
    word = torch.float32 if per_word == 1 else torch.int32
    tiles = torch.frombuffer(memory, dtype=word).view(-1, in_features // per_word, TILE)
    for i in (0, len(tiles) - 1):
        expected = weight[i * TILE : (i + 1) * TILE].view(word).T
        if not torch.equal(tiles[i].view(torch.int32), expected.contiguous().view(torch.int32)):
            return None
    return tiles


def matvec(x: Tensor, tiles: Tensor, bias: Tensor | None) -> Tensor:
    """x [1, in] times the weight whose `tiles_of` these are: [1, out], summed in float32."""
    row = x.flatten().float()
    sums = []
    # A vector register of outputs at a time, unrolled: one loop then reads a tile's memory in order.
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
    """Rows `ids` [T] of the weight [out, in] whose `tiles_of` these are: [T, in]."""
    words = tiles[ids // TILE, :, ids % TILE]
    return words.view(torch.bfloat16) if words.dtype == torch.int32 else words


# An operator of a library "nanopage": a single call in a graph that is being compiled, which can not look into oneDNN.
_library = torch.library.Library("nanopage", "DEF")
_library.define("packed_linear(Tensor x, Tensor packed_weight, Tensor? bias) -> Tensor")
_library.impl("packed_linear", packed_linear, "CompositeExplicitAutograd")


@torch.library.register_fake("nanopage::packed_linear", lib=_library)
def _(x, packed_weight, bias):
    return x.new_empty(*x.shape[:-1], packed_weight.shape[0])
