"""The gated delta rule on a GPU, for decodes and short prompts: token by token, in one Triton kernel.

Each program has some columns of the state of one head of one sequence. It reads them from the block where they are,
keeps them in registers for all tokens of the step, and writes them to the block where they belong. The idea is that of
fused_recurrent_gated_delta_rule of flash-linear-attention. Long prompts are faster in chunks (delta_rule.py).

This kernel has not run on a GPU yet: it is tested in Triton's interpreter, and compiled ahead of time.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanopage.recurrent.states import States

COLUMNS = 16  # of a program

VARYING: dict[str, list[str]] = {"do_not_specialize": ["num_sequences", "num_tokens"]}


@triton.jit(**VARYING)
def delta_kernel(
    state_ptr,
    out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    log_decay_ptr,
    beta_ptr,
    source_ptr,
    target_ptr,
    start_ptr,  # the first token of each sequence, and how many of its tokens are no draft; only with SEVERAL
    kept_ptr,
    num_sequences,
    num_tokens,
    block_stride,
    part_stride,
    part_heads,  # heads in each part of a block
    SEVERAL: tl.constexpr,  # whether sequences have several tokens
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    key, value = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    inside = is_key[:, None] & is_value[None, :]
    at = key[:, None] * VALUE_DIM + value[None, :] + (head % part_heads) * (KEY_DIM * VALUE_DIM)
    states = state_ptr + (head // part_heads).to(tl.int64) * part_stride + at
    source, target = tl.load(source_ptr + sequence), tl.load(target_ptr + sequence)
    state = tl.load(states + tl.maximum(source, 0) * block_stride, mask=inside, other=0.0)
    state = tl.where(source < 0, 0.0, state)  # a sequence begins
    first, kept, end = sequence.to(tl.int64), 1, sequence.to(tl.int64) + 1
    if SEVERAL:
        first, kept = tl.load(start_ptr + sequence), tl.load(kept_ptr + sequence)
        end = num_tokens.to(tl.int64)
        if sequence + 1 < num_sequences:
            end = tl.load(start_ptr + sequence + 1)
    for token in range(first, end):
        row = token * HEADS + head
        k = tl.load(k_ptr + row * KEY_DIM + key, mask=is_key, other=0.0)[:, None]
        q = tl.load(q_ptr + row * KEY_DIM + key, mask=is_key, other=0.0)[:, None]
        v = tl.load(v_ptr + row * VALUE_DIM + value, mask=is_value, other=0.0)
        state *= tl.exp(tl.load(log_decay_ptr + row))
        u = tl.load(beta_ptr + row) * (v - tl.sum(state * k, 0))
        state += k * u[None, :]
        tl.store(out_ptr + row * VALUE_DIM + value, tl.sum(state * q, 0), mask=is_value)
        if token + 1 == first + kept:
            tl.store(states + target * block_stride, state, mask=inside)


def update(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, states: States, index: int) -> Tensor:
    """As `delta_rule`, with the states where they are: tensor number `index` of `states`. Returns: o."""
    matrices, out = states.view(index), torch.empty_like(v, memory_format=torch.contiguous_format)
    sequences, (num_tokens, heads, value_dim) = states.sequences, v.shape
    prompts, key_dim = sequences.prompts, q.shape[2]
    starts, kept = (None, None) if prompts is None else (prompts.starts, prompts.kept)
    sizes = kernel_sizes(heads, key_dim, value_dim)
    grid = len(sequences.sources), heads, triton.cdiv(value_dim, sizes["VALUES"])
    delta_kernel[grid](
        matrices, out, *(x.contiguous() for x in (q, k, v, log_decay, beta)), sequences.sources, sequences.targets,
        starts, kept, len(sequences.sources), num_tokens, *matrices.stride()[:2], matrices.shape[2],
        SEVERAL=prompts is not None, **sizes,
    )  # fmt: skip
    return out


def kernel_sizes(heads: int, key_dim: int, value_dim: int) -> dict[str, Any]:
    """Constants of the kernel, and how it is launched. A program is a single warp, so sums over keys stay in it."""
    values = min(COLUMNS, triton.next_power_of_2(value_dim))
    sizes = {"HEADS": heads, "KEY_DIM": key_dim, "VALUE_DIM": value_dim, "VALUES": values, "num_warps": 1}
    return sizes | {"KEYS": triton.next_power_of_2(key_dim)}
