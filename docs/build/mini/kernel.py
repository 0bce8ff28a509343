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
    raise NotImplementedError("milestone 10")


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
