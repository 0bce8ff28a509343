"""The products of LoRA adapters on a GPU: two Triton kernels for tokens with different adapters in any order.

    h = x Aᵀ        lora_shrink_kernel, [T, parts * rank] in float32
    y += h Bᵀ       lora_expand_kernel, once for each part

A program has TOKENS tokens and one slot. If none of its tokens has the slot, it ends at once. Otherwise it computes the
product for all its tokens and stores the results of the slot's tokens. So each adapter is read once for TOKENS tokens
(SGMV: Punica, 2023). The grid depends only on the number of tokens, so a CUDA graph can capture the kernels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanopage.kernels.paged_attention import architecture_of

TOKENS, INPUTS, OUTPUTS = 16, 128, 64
VARYING: dict[str, list[str]] = {"do_not_specialize": ["num_tokens"]}  # see attention_kernels.py


@triton.jit(**VARYING)
def lora_shrink_kernel(
    x_ptr,
    a_ptr,  # [slots, ranks, in]
    slots_ptr,
    h_ptr,  # [num_tokens, ranks]
    num_tokens,
    in_features,
    ranks,  # parts * rank
    x_stride,
    TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.program_id(1)
    mine = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1) == slot
    if tl.max(mine.to(tl.int32), 0) == 0:
        return
    rank = tl.program_id(2) * RANKS + tl.arange(0, RANKS)
    lane = tl.arange(0, INPUTS)
    a_row = a_ptr + (slot.to(tl.int64) * ranks + rank) * in_features
    x_row = x_ptr + token.to(tl.int64) * x_stride
    acc = tl.zeros((TOKENS, RANKS), tl.float32)
    for begin in range(0, in_features, INPUTS):
        column = begin + lane
        inside = column < in_features
        x = tl.load(x_row[:, None] + column[None, :], mask=mine[:, None] & inside[None, :], other=0.0)
        a = tl.load(a_row[None, :] + column[:, None], mask=inside[:, None] & (rank < ranks)[None, :], other=0.0)
        acc = tl.dot(x, a, acc, input_precision=PRECISION)
    at = token.to(tl.int64)[:, None] * ranks + rank[None, :]
    tl.store(h_ptr + at, acc, mask=mine[:, None] & (rank < ranks)[None, :])


@triton.jit(**VARYING)
def lora_expand_kernel(
    h_ptr,  # [num_tokens, ranks]
    b_ptr,  # [slots, rank, out]
    slots_ptr,
    y_ptr,
    num_tokens,
    out_features,  # of all parts
    first_output,  # of this part
    num_outputs,
    ranks,
    first_rank,
    rank_size,
    y_stride,
    TOKENS: tl.constexpr,
    RANK: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.program_id(1)
    mine = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1) == slot
    if tl.max(mine.to(tl.int32), 0) == 0:
        return
    index = tl.program_id(2) * OUTPUTS + tl.arange(0, OUTPUTS)
    rank = tl.arange(0, RANK)
    inside, known = index < num_outputs, rank < rank_size
    output = first_output + index
    h_at = token.to(tl.int64)[:, None] * ranks + first_rank + rank[None, :]
    h = tl.load(h_ptr + h_at, mask=mine[:, None] & known[None, :], other=0.0)
    b_at = (slot.to(tl.int64) * rank_size + rank)[:, None] * out_features + output[None, :]
    b = tl.load(b_ptr + b_at, mask=inside[None, :] & known[:, None], other=0.0)
    added = tl.dot(h.to(b.dtype), b, input_precision=PRECISION)
    stored = mine[:, None] & inside[None, :]
    y_at = y_ptr + token.to(tl.int64)[:, None] * y_stride + output[None, :]
    y = tl.load(y_at, mask=stored, other=0.0)
    tl.store(y_at, (y.to(tl.float32) + added).to(y.dtype), mask=stored)


def add_adapters(y: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor, sizes: list[int]) -> Tensor:
    """As `adapters.layers.Add`, in float32, float16 or bfloat16. Rows of x and y are contiguous. Changes y."""
    num_slots, num_parts, rank, in_features = a.shape
    num_tokens, ranks = len(x), num_parts * rank
    h = torch.empty(num_tokens, ranks, dtype=torch.float32, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    precision = "tf32x3" if x.dtype == torch.float32 and architecture_of(x.device) >= 80 else "ieee"
    tiles, step = triton.cdiv(num_tokens, TOKENS), min(64, max(16, triton.next_power_of_2(ranks)))
    lora_shrink_kernel[tiles, num_slots, triton.cdiv(ranks, step)](
        x, a, slots, h, num_tokens, in_features, ranks, x.stride(0),
        TOKENS=TOKENS, RANKS=step, INPUTS=INPUTS, PRECISION=precision,
    )  # fmt: skip
    first = 0
    for part, size in enumerate(sizes):
        lora_expand_kernel[tiles, num_slots, triton.cdiv(size, OUTPUTS)](
            h, b, slots, y, num_tokens, b.shape[2], first, size, ranks, part * rank, rank, y.stride(0),
            TOKENS=TOKENS, RANK=max(16, triton.next_power_of_2(rank)), OUTPUTS=OUTPUTS, PRECISION=precision,
        )  # fmt: skip
        first += size
    return y
