"""`paged_attention` as a Triton kernel (milestone 10). Without a GPU, Triton's interpreter runs it."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def attention_kernel(
    q_ptr,  # [T, num_heads, head_dim]
    k_ptr,  # [num_blocks + 1, block_size, num_kv_heads, head_dim]
    v_ptr,  # the same
    table_ptr,  # int64 [B, max_blocks]
    row_ptr,  # int64 [T]
    position_ptr,  # int64 [T]
    out_ptr,  # [T, num_heads, head_dim]
    max_blocks,
    num_kv_heads,
    scale,  # of the scores
    group: tl.constexpr,  # query heads for each KV head
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
):
    """A program: token tl.program_id(0), query head tl.program_id(1) of tl.num_programs(1). It goes from block to
    block, with an online softmax (FlashAttention, Dao et al., 2022), in float32."""
    token, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(position_ptr + token) + 1
    table = table_ptr + tl.load(row_ptr + token) * max_blocks
    offset, dim = tl.arange(0, block_size), tl.arange(0, head_dim)
    here = (token * tl.num_programs(1) + head) * head_dim + dim
    q = tl.load(q_ptr + here).to(tl.float32) * scale
    highest = tl.full((), float("-inf"), tl.float32)  # the largest score so far
    total = tl.zeros((), tl.float32)  # the sum of exp(score - highest) so far
    acc = tl.zeros((head_dim,), tl.float32)  # the sum of exp(score - highest) * v so far
    for index in range(tl.cdiv(length, block_size)):
        slot = tl.load(table + index) * block_size + offset
        seen = index * block_size + offset < length
        cells = ((slot * num_kv_heads + head // group) * head_dim)[:, None] + dim[None, :]
        k = tl.load(k_ptr + cells, mask=seen[:, None], other=0.0).to(tl.float32)
        v = tl.load(v_ptr + cells, mask=seen[:, None], other=0.0).to(tl.float32)
        scores = tl.where(seen, tl.sum(q[None, :] * k, 1), float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 0))
        weights, faded = tl.exp(scores - higher), tl.exp(highest - higher)
        total = total * faded + tl.sum(weights, 0)
        acc = acc * faded + tl.sum(weights[:, None] * v, 0)
        highest = higher
    tl.store(out_ptr + here, acc / total)


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, block_tables: Tensor, rows: Tensor, positions: Tensor
) -> Tensor:
    """`attention.paged_attention` by the kernel: a program for each token and query head. Tiles of Triton have sizes
    that are powers of two, so head_dim and block_size must be."""
    (num_tokens, num_heads, head_dim), (_, block_size, num_kv_heads, _) = q.shape, keys.shape
    tensors = q.contiguous(), keys, values, block_tables, rows, positions, (out := torch.empty_like(q))
    sizes = block_tables.shape[1], num_kv_heads, head_dim**-0.5, num_heads // num_kv_heads, block_size, head_dim
    attention_kernel[num_tokens, num_heads](*tensors, *sizes)
    return out
