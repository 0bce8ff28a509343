"""Writes this step's K and V to their slots of the paged cache: one Triton program for each token and KV head.

    k [T, kv_heads, head_dim]  --- slot_mapping[t] = block * block_size + offset --->  page of (block, head):

        K  [head_dim, block_size]      a column, one element every block_size
        V  [block_size, head_dim]      a row

A slot of -1 writes nothing: CUDA graphs use it for padding. k and v may be views of a fused projection, because only
their last dimension must be contiguous. pages.py describes the layout, and what a cache in fp8 holds. vLLM's kernel for
this is reshape_and_cache.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def write_kernel(
    k_ptr,
    v_ptr,
    cache_ptr,
    slot_ptr,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    cache_kv_stride,
    cache_block_stride,
    cache_head_stride,
    k_factor,  # 1 / the scale of K; only for a cache in fp8
    v_factor,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,  # HEAD_DIM rounded up to a power of two
):
    token, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slot_ptr + token)
    if slot < 0:
        return
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    dim = tl.arange(0, LANES)
    inside = dim < HEAD_DIM
    k = tl.load(k_ptr + token.to(tl.int64) * k_token_stride + head * k_head_stride + dim, mask=inside)
    v = tl.load(v_ptr + token.to(tl.int64) * v_token_stride + head * v_head_stride + dim, mask=inside)
    if cache_ptr.dtype.element_ty == tl.float8e4nv:
        k, v = saturated(k, k_factor), saturated(v, v_factor)
    page = cache_ptr + block * cache_block_stride + head * cache_head_stride
    tl.store(page + dim * BLOCK_SIZE + offset, k.to(cache_ptr.dtype.element_ty), mask=inside)
    tl.store(page + cache_kv_stride + offset * HEAD_DIM + dim, v.to(cache_ptr.dtype.element_ty), mask=inside)


@triton.jit
def saturated(x, factor):
    """x times factor in float32, within the range of e4m3. NaN stays NaN."""
    return tl.clamp(x.to(tl.float32) * factor, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)


def write(
    k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, k_scale: float = 1.0, v_scale: float = 1.0
) -> None:
    """Write k and v [T, kv_heads, head_dim] to slots [T] of one layer's cache. A slot of -1 writes nothing. The scales
    are as in pages.py."""
    arguments = k, v, kv_cache, slot_mapping, *k.stride()[:2], *v.stride()[:2], *kv_cache.stride()[:3]
    write_kernel[k.shape[0], k.shape[1]](*arguments, 1 / k_scale, 1 / v_scale, **write_options(k, kv_cache))


def write_options(k: Tensor, kv_cache: Tensor) -> dict[str, int]:
    """The constants that write_kernel is specialized on, and the number of warps of a program."""
    head_dim = k.shape[2]
    lanes = triton.next_power_of_2(head_dim)
    return {"HEAD_DIM": head_dim, "BLOCK_SIZE": kv_cache.shape[3] // head_dim, "LANES": lanes, "num_warps": 1}
