"""Products of tokens with the weights of their experts on a GPU: a grouped matrix product in Triton.

Each (token, expert) pair is a row. Rows are sorted by expert, and each program multiplies a block of one expert's rows
by some of that expert's outputs. An expert's last block may be partly empty, so there are more blocks than full blocks:

    rows       │ expert 0      │ expert 2  │ expert 3            │
    blocks     │ 0   │ 1   ▒▒▒ │ 2     ▒▒▒ │ 3   │ 4   │ 5   ▒▒▒ │ 6: no expert │

The GPU computes the rows and the expert of each block. The number of blocks depends on the number of tokens alone:
programs of blocks that turn out not to be needed return at once. So nothing synchronizes, and CUDA graphs can capture
the product.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanopage.experts.activation import clamped_swiglu
from nanopage.kernels.paged_attention import architecture_of
from nanopage.layers.mlp import ACTIVATIONS

VARYING: dict[str, list[str]] = {"do_not_specialize": ["num_chosen"]}


@triton.jit(**VARYING)
def grouped_linear_kernel(
    x_ptr,
    weight_ptr,  # [experts, out_features, in_features]
    bias_ptr,  # [experts, out_features], only with BIAS
    scale_ptr,  # the scale of each pair, in the order of tokens
    out_ptr,
    order_ptr,  # the pair of each row
    expert_ptr,  # the expert of each block; num_experts for none
    row_ptr,  # the first row of each block
    end_ptr,  # the row after each expert's last row
    num_experts,
    num_chosen,
    in_features,
    out_features,
    FROM_TOKENS: tl.constexpr,  # True: x has one row for each token, and out has one for each sorted row. False: x has
    # one row for each sorted row, and out, which is scaled, has one for each pair
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block = tl.program_id(0)
    expert = tl.load(expert_ptr + block)
    if expert >= num_experts:
        return
    row = tl.load(row_ptr + block) + tl.arange(0, ROWS)
    inside = row < tl.load(end_ptr + expert)
    pair = tl.load(order_ptr + row, mask=inside, other=0)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    if FROM_TOKENS:
        x_row, out_row = pair // num_chosen, row
    else:
        x_row, out_row = row, pair
    x_rows = x_ptr + x_row.to(tl.int64) * in_features
    # Results for outputs beyond the last one are not stored.
    weights = weight_ptr + (expert.to(tl.int64) * out_features + tl.minimum(output, out_features - 1)) * in_features
    acc = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for first in range(0, in_features, INPUTS):
        column = first + tl.arange(0, INPUTS)
        is_input = column < in_features
        x = tl.load(x_rows[:, None] + column[None, :], mask=inside[:, None] & is_input[None, :], other=0.0)
        weight = tl.load(weights[None, :] + column[:, None], mask=is_input[:, None], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision=PRECISION)
    if BIAS:
        bias = tl.load(bias_ptr + expert.to(tl.int64) * out_features + output, mask=output < out_features, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    if not FROM_TOKENS:
        acc = acc * tl.load(scale_ptr + pair, mask=inside, other=0.0).to(tl.float32)[:, None]
    at = out_row.to(tl.int64)[:, None] * out_features + output[None, :]
    is_stored = inside[:, None] & (output < out_features)[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=is_stored)


@dataclass(slots=True)
class Groups:
    """The rows and the expert of each block. All tensors are int64, on the device.

    order    [T * num_chosen]  the pair of each row: token * num_chosen + index among the token's experts
    experts  [blocks]          the expert of each block, counted from 0; the number of experts if it has none
    rows     [blocks]          the first row of each block
    ends     [experts]         the row after each expert's last row
    """

    order: Tensor
    experts: Tensor
    rows: Tensor
    ends: Tensor


def group(chosen: Tensor, first: int, num_experts: int, block_rows: int) -> Groups:
    """Sort pairs by expert, and divide the rows of each expert into blocks. Does not synchronize.

    Args:
        chosen: [T, num_chosen], the experts of each token.
        first, num_experts: the range of experts on this device. Pairs of others come last, and belong to no block.
    """
    expert = chosen.flatten() - first
    expert = expert.masked_fill((expert < 0) | (expert >= num_experts), num_experts)
    order = expert.argsort(stable=True)
    counts = expert.new_zeros(num_experts + 1).scatter_add_(0, expert, torch.ones_like(expert))[:-1]
    ends, num_blocks = counts.cumsum(0), (counts + block_rows - 1) // block_rows
    last = num_blocks.cumsum(0)  # the block after each expert's last block
    block = torch.arange(most_blocks(len(expert), num_experts, block_rows), device=chosen.device)
    experts = torch.searchsorted(last, block, right=True)
    known = experts.clamp(max=num_experts - 1)
    rows = (ends - counts)[known] + (block - (last - num_blocks)[known]) * block_rows
    return Groups(order, experts, rows, ends)


def most_blocks(num_rows: int, num_experts: int, block_rows: int) -> int:
    """The most blocks that there may be: each expert with rows may have one block that is not full."""
    return min(num_rows, num_rows // block_rows + min(num_experts, num_rows))


def grouped_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    chosen: Tensor,
    weights: Tensor,
    first: int,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    swiglu: Sequence[float] | None = None,
    activation: str = "silu",
) -> Tensor:
    """The weighted sum of the outputs of each token's experts, down(activation(gate(x)) * up(x)).

    Args:
        x: [T, hidden_size] in float32, float16 or bfloat16.
        gate_up: [experts, 2 * intermediate_size, hidden_size]. down: [experts, hidden_size, intermediate_size].
        chosen, weights: [T, num_chosen], from `routing.route`.
        first: the number of the first expert in `gate_up` and `down`. Experts on other workers add nothing.
        gate_up_bias, down_bias: [experts, outputs].
        swiglu: alpha and limit of `clamped_swiglu`, in place of activation(gate(x)) * up(x).
        activation: a key of ACTIVATIONS.

    Returns: [T, hidden_size]
    """
    num_pairs, num_experts = chosen.numel(), len(gate_up)
    options = grouped_options(num_pairs, num_experts, x.dtype, architecture_of(x.device) >= 80)
    groups = group(chosen, first, num_experts, options["ROWS"])
    scales = weights.contiguous()
    inner = x.new_empty(num_pairs, gate_up.shape[1])
    _launch(x.contiguous(), (gate_up, gate_up_bias), scales, inner, groups, chosen.shape[1], options, from_tokens=True)
    if swiglu is None:
        gate, up = inner.chunk(2, dim=-1)
        inner = ACTIVATIONS[activation](gate) * up
    else:
        inner = clamped_swiglu(inner, *swiglu)
    outputs = x.new_zeros(num_pairs, x.shape[1])  # outputs of other experts stay 0
    _launch(inner, (down, down_bias), scales, outputs, groups, chosen.shape[1], options, from_tokens=False)
    return outputs.unflatten(0, chosen.shape).sum(1)


def _launch(
    x: Tensor,
    linear: tuple[Tensor, Tensor | None],
    scales: Tensor,
    out: Tensor,
    groups: Groups,
    num_chosen: int,
    options: dict[str, Any],
    from_tokens: bool,
) -> None:
    weight, bias = linear
    num_experts, out_features, in_features = weight.shape
    grid = len(groups.experts), triton.cdiv(out_features, options["OUTPUTS"])
    grouped_linear_kernel[grid](
        x, weight, weight if bias is None else bias, scales, out, groups.order, groups.experts, groups.rows,
        groups.ends, num_experts, num_chosen, in_features, out_features, FROM_TOKENS=from_tokens,
        BIAS=bias is not None, **options,
    )  # fmt: skip


def grouped_options(num_pairs: int, num_experts: int, dtype: torch.dtype, fast: bool) -> dict[str, Any]:
    """The constants that grouped_linear_kernel is specialized on, and its warps and stages.

    Args: fast: whether the GPU has tensor cores that Triton uses (Ampere and later).
    """
    wide = dtype.itemsize > 2 or not fast
    rows = min(max(triton.next_power_of_2(triton.cdiv(num_pairs, num_experts)), 16), 32 if wide else 128)
    many = rows == 128
    return {
        "ROWS": rows,
        "OUTPUTS": 128 if many else 64,
        "INPUTS": 32 if wide else 64,
        "PRECISION": "tf32x3" if fast and dtype == torch.float32 else "ieee",
        "num_warps": 8 if many else 4,
        "num_stages": 3,
    }


# An operator that torch.compile does not look into: see quantized_linear.py.
library = torch.library.Library("nanopage", "FRAGMENT")
library.define(
    "grouped_experts(Tensor x, Tensor gate_up, Tensor down, Tensor chosen, Tensor weights, int first, "
    'Tensor? gate_up_bias=None, Tensor? down_bias=None, float[]? swiglu=None, str activation="silu") -> Tensor'
)
library.impl("grouped_experts", grouped_experts, "CompositeExplicitAutograd")


@torch.library.register_fake("nanopage::grouped_experts", lib=library)
def _(x, gate_up, down, chosen, weights, first, gate_up_bias=None, down_bias=None, swiglu=None, activation="silu"):
    return torch.empty_like(x)
