"""The layout of the KV cache, and plain functions that write and read it.

One layer's cache is [2, num_blocks, kv_heads, head_dim * block_size]. A page holds the K or V of one block and one
head. A page of V is [block_size, head_dim], one token after the other. A page of K is transposed, [head_dim,
block_size]. With latent attention, K is V, too, and a cache is [1, num_blocks, ...]: pages of K.

A vector instruction works on adjacent elements. A score is a sum over dimensions. To compute several scores at once, an
instruction multiplies one dimension of several tokens, so tokens are adjacent in K. An output is a sum over tokens. To
compute several of its dimensions at once, an instruction multiplies several dimensions of one token, so dimensions are
adjacent in V. The axes of a page are flattened into one, because K and V have them in different orders and share a
tensor.

A cache in fp8 (float8_e4m3fn, 1 byte, at most 448) holds K and V divided by a scale each, one number for all heads of a
layer. Numbers beyond its range become the largest, not NaN. Attention multiplies by the scales as it reads. A cache in
another dtype has no scales.
"""

import numpy as np
import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn


def views(kv_cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Views of K [num_blocks, kv_heads, head_dim, block_size] and V [num_blocks, kv_heads, block_size, head_dim]."""
    k = kv_cache[0].unflatten(2, (head_dim, -1))
    return k, k.transpose(2, 3) if len(kv_cache) == 1 else kv_cache[1].unflatten(2, (-1, head_dim))


def movable(kv_cache: Tensor) -> Tensor:
    """A view of a cache for operators that only move its numbers: of bytes if it is in fp8, which few operators of
    torch know."""
    return kv_cache.view(torch.uint8) if kv_cache.dtype == FP8 else kv_cache


def write(
    k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, k_scale: float = 1.0, v_scale: float = 1.0
) -> None:
    """Write k and v [T, kv_heads, head_dim] to slots [T] of a layer's cache: block * block_size + offset. They are
    rounded to the cache's dtype. In float16 and in fp8, numbers beyond its range become its largest. Compiled code
    cannot write to a cache that has only pages of K."""
    if kv_cache.dtype == FP8:
        k, v = k.float() * (1 / k_scale), v.float() * (1 / v_scale)
    if kv_cache.dtype in (torch.float16, FP8) and kv_cache.dtype != k.dtype:
        most = torch.finfo(kv_cache.dtype).max
        k, v = k.clamp(-most, most), v.clamp(-most, most)
    k, v, kv_cache = movable(k.to(kv_cache.dtype)), movable(v.to(kv_cache.dtype)), movable(kv_cache)
    _, num_heads, head_dim = k.shape
    block_size = kv_cache.shape[3] // head_dim
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    if not torch.compiler.is_compiling():
        k_pages, v_pages = views(kv_cache, head_dim)
        k_pages[blocks, :, :, offsets] = k
        if len(kv_cache) == 2:
            v_pages[blocks, :, offsets] = v
        return
    # Element by element: compiled code that writes through a view copies the whole cache.
    dims, offsets = torch.arange(head_dim), offsets[:, None]
    elements = torch.stack((dims * block_size + offsets, offsets * head_dim + dims))  # [2, T, head_dim]
    which, heads = torch.arange(2)[:, None, None, None], torch.arange(num_heads)[:, None]
    kv_cache[which, blocks[:, None, None], heads, elements[:, :, None]] = torch.stack((k, v))


def pad_tables(block_tables: np.ndarray, num_blocks: np.ndarray) -> np.ndarray:
    """Replace the entries after each sequence's `num_blocks` [B] in block tables [B, max_blocks, kinds] with its first
    block.

    Plain attention gathers whole rows and masks them afterwards. The replaced entries may name blocks of other
    sequences, whose values may be NaN, and a mask does not hide NaN.
    """
    width = block_tables.shape[1]
    if num_blocks.min() == width:
        return block_tables
    return np.where((np.arange(width) < num_blocks[:, None])[:, :, None], block_tables, block_tables[:, :1])


def gather(kv_cache: Tensor, block_tables: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Gather the pages of block_tables [B, blocks].

    Returns: K [B, kv_heads, head_dim, tokens] and V [B, kv_heads, tokens, head_dim].
    """
    ids, shape = block_tables.flatten(), block_tables.shape
    k_pages, v_pages = views(movable(kv_cache), head_dim)
    k = k_pages.index_select(0, ids).unflatten(0, shape).permute(0, 2, 3, 1, 4).flatten(3).view(kv_cache.dtype)
    if len(kv_cache) == 1:
        return k, k.transpose(2, 3)
    v = v_pages.index_select(0, ids).unflatten(0, shape).transpose(1, 2).flatten(2, 3)  # from [B, blocks, kv_heads, ..]
    return k, v.view(kv_cache.dtype)
