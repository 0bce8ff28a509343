"""What lies between a layer's projection and its attention, in one Triton kernel: the norms of the heads if the model
has them, the rotation of q and k, and the write of K and V to their slots of the paged cache.

    heads [T, q heads + k heads + v heads, head_dim]  ──▶  q [T, q heads, head_dim]
                                                           K and V in the page of (block, head); see cache_write.py

A program computes HEADS heads of one token, in float32 at least. A token with slot -1 is padding: neither q nor K and V
are written. vLLM has a kernel for the norms and the rotation (fused_qk_norm_rope) and another one for the write.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from nanopage.kernels.cache_write import saturated

HEADS = 8  # of a program


@triton.jit(do_not_specialize_on_alignment=["slot_ptr"])
def rotate_kernel(
    heads_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_ptr,
    cache_ptr,
    slot_ptr,
    cache_kv_stride,
    cache_block_stride,
    cache_head_stride,
    k_factor,  # 1 / the scale of K; only for a cache in fp8
    v_factor,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,  # half of HEAD_DIM, rounded up to a power of two
    ROTATED: tl.constexpr,  # dimensions of a head, the first ones
    NORMS: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,  # added to the weights of the norms
    TABLES: tl.constexpr,  # rotations of a token: one of all heads, or one of q and one of k
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    if slot < 0:
        return
    HALF: tl.constexpr = HEAD_DIM // 2
    TURNED: tl.constexpr = ROTATED // 2
    EXACT: tl.constexpr = tl.float64 if heads_ptr.dtype.element_ty == tl.float64 else tl.float32
    head, dim = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, LANES)
    # Each lane has two dimensions. Those of the first lanes are rotated together.
    if ROTATED == HEAD_DIM:
        one, two = dim, dim + HALF
    else:
        one = tl.where(dim < TURNED, dim, dim + TURNED)
        two = tl.where(dim < TURNED, dim + TURNED, dim + HALF)
    is_q, is_v = head < Q_HEADS, head >= Q_HEADS + KV_HEADS
    exists, inside = head < Q_HEADS + 2 * KV_HEADS, (dim < HALF)[None, :]
    mask = exists[:, None] & inside
    at = heads_ptr + (token * (Q_HEADS + 2 * KV_HEADS) + head)[:, None] * HEAD_DIM
    x1 = tl.load(at + one[None, :], mask=mask, other=0.0).to(EXACT)
    x2 = tl.load(at + two[None, :], mask=mask, other=0.0).to(EXACT)
    if NORMS:
        mean = (tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / HEAD_DIM
        scale = tl.where(is_v, 1.0, 1.0 / tl.sqrt(mean + EPS))[:, None]
        norm_ptr = tl.where(is_q[:, None], q_norm_ptr + one[None, :], k_norm_ptr + one[None, :])
        normed, none = mask & (head < Q_HEADS + KV_HEADS)[:, None], 1.0 - OFFSET
        x1 *= scale * (OFFSET + tl.load(norm_ptr, mask=normed, other=none).to(EXACT))
        x2 *= scale * (OFFSET + tl.load(norm_ptr + (two - one)[None, :], mask=normed, other=none).to(EXACT))
    table = token if TABLES == 1 else (token * TABLES + tl.where(is_q, 0, 1))[:, None]
    angle, turned = table * TURNED + dim[None, :], (dim < TURNED)[None, :]
    cos = tl.load(cos_ptr + angle, mask=turned, other=1.0).to(EXACT)
    sin = tl.load(sin_ptr + angle, mask=turned, other=0.0).to(EXACT)
    cos, sin = tl.where(is_v[:, None], 1.0, cos), tl.where(is_v[:, None], 0.0, sin)
    y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    q_at = q_ptr + (token * Q_HEADS + head)[:, None] * HEAD_DIM
    tl.store(q_at + one[None, :], y1.to(q_ptr.dtype.element_ty), mask=is_q[:, None] & inside)
    tl.store(q_at + two[None, :], y2.to(q_ptr.dtype.element_ty), mask=is_q[:, None] & inside)
    if cache_ptr.dtype.element_ty == tl.float8e4nv:
        factor = tl.where(is_v, v_factor, k_factor)[:, None]
        y1, y2 = saturated(y1, factor), saturated(y2, factor)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    kv_head = head - tl.where(is_v, Q_HEADS + KV_HEADS, Q_HEADS)
    page = cache_ptr + block * cache_block_stride + kv_head * cache_head_stride + tl.where(is_v, cache_kv_stride, 0)
    stride = tl.where(is_v, 1, BLOCK_SIZE)  # from one dimension of a token to the next
    element = page + tl.where(is_v, offset * HEAD_DIM, offset)
    to_cache = (~is_q & exists)[:, None] & inside
    kv_at = element[:, None] + one[None, :] * stride[:, None]
    tl.store(kv_at, y1.to(cache_ptr.dtype.element_ty), mask=to_cache)
    tl.store(kv_at + (two - one)[None, :] * stride[:, None], y2.to(cache_ptr.dtype.element_ty), mask=to_cache)


def rotate_and_write(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor, float, float] | None,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    q: Tensor,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Fill q and write K and V, as `SelfAttention.rotated` and `cache_write.write` do together.

    Args:
        heads: [T, q heads + 2 * kv_heads, head_dim], contiguous.
        cos, sin: [T, 1, rotated / 2], or [T, 2, rotated / 2] of q and of k; contiguous. The other dimensions of a head
            are not rotated.
        norms: the weights of the norms of q heads and k heads, [head_dim] each, their epsilon and what is added to the
            weights. None: no norms.
        kv_cache: one layer's cache (see pages.py).
        slot_mapping: int64 [T]; -1 for padding.
        q: [T, q heads, head_dim], contiguous; rows of padding keep what they hold.
        scales: of K and V in a cache in fp8 (see pages.py).
    """
    eps, offset = (None, 0.0) if norms is None else norms[2:]
    options = rotate_options(heads, kv_cache, 2 * cos.shape[2], eps, offset, cos.shape[1])
    q_norm, k_norm = norms[:2] if norms is not None else (cos, cos)  # placeholders
    grid = len(heads), triton.cdiv(heads.shape[1], HEADS)
    factors = 1 / scales[0], 1 / scales[1]
    inputs = heads, cos, sin, q_norm, k_norm, q
    rotate_kernel[grid](*inputs, kv_cache, slot_mapping, *kv_cache.stride()[:3], *factors, **options)


def rotate_options(
    heads: Tensor, kv_cache: Tensor, rotated: int, eps: float | None, offset: float = 0.0, tables: int = 1
) -> dict[str, Any]:
    """The constants that rotate_kernel is specialized on, and the number of warps.

    Args: rotated: dimensions of a head. eps, offset: of the norms; eps is None without norms. tables: rotations of a
        token.
    """
    kv_heads, head_dim = kv_cache.shape[2], heads.shape[2]
    return {
        "Q_HEADS": heads.shape[1] - 2 * kv_heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": kv_cache.shape[3] // head_dim,
        "HEADS": HEADS,
        "LANES": triton.next_power_of_2(head_dim // 2),
        "ROTATED": rotated,
        "NORMS": eps is not None,
        "EPS": eps or 0.0,
        "OFFSET": offset,
        "TABLES": tables,
        "num_warps": 4,
    }
