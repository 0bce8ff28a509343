"""Products with weights of 4 or 8 bits on a GPU: a Triton kernel that converts weights to floats in registers.

A program computes the transposed product, OUTPUTS outputs of TOKENS tokens. Weights are the left operand, which tensor
cores take from registers, and a few tokens are enough for the right operand.

                          in ──▶  tiles of TILE bytes of each output
              ┌────────┬────────┬───
    OUTPUTS   │ weight │ weight │ ...      x TOKENS, summed in float32
              └────────┴────────┴───
              └─ split 0 ───────┘          few tokens and a small matrix are too little work for a GPU: splits then
                                           write partial sums, which are added in order

quantized_weights.py has the format of weights. torch's scaled product multiplies fp8 weights by many tokens
where the GPU has one.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanopage.cpu.tile_linear import row_scales
from nanopage.kernels.paged_attention import architecture_of, num_processors
from nanopage.quantization.quantized_weights import FP8, MIDDLE, TILE

SPLIT_TILES = 8  # adding the sums of a split with fewer tiles costs more than the split gains
SCALED_TOKENS = 64  # from this many tokens on (a prompt or a large batch), rounding activations to fp8 pays

VARYING: dict[str, list[str]] = {"do_not_specialize": ["num_tokens", "tiles_of_split"]}  # see attention_kernels.py


@triton.jit(**VARYING)
def linear_kernel(
    x_ptr,
    packed_ptr,
    scale_ptr,
    offset_ptr,
    bias_ptr,
    out_ptr,  # [splits, num_tokens, out_features]; float32 if there is more than one split
    num_tokens,
    in_features,
    out_features,
    x_stride,
    row_bytes,
    group,
    tiles_of_split,
    BITS: tl.constexpr,
    FP8: tl.constexpr,  # weights are float8_e4m3fn
    SCALES: tl.constexpr,  # scales of an output for TILE inputs; 0: one for all its inputs
    OFFSETS: tl.constexpr,  # whether there are any
    ZERO_POINTS: tl.constexpr,
    BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    MIDDLE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    HALVES: tl.constexpr = 8 // BITS
    ADDED: tl.constexpr = 2**BITS + (MIDDLE if BITS == 8 else 0)  # added to the integers, see below
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    row = tl.minimum(output, out_features - 1)  # results of rows beyond are not stored
    lane = tl.arange(0, TILE)
    x_row = x_ptr + tl.minimum(token, num_tokens - 1).to(tl.int64) * x_stride
    packed_row = packed_ptr + row.to(tl.int64) * row_bytes
    first = split * tiles_of_split
    end = tl.minimum(first + tiles_of_split, row_bytes // TILE)
    acc = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    for tile in range(first, end):
        packed = tl.load(packed_row[:, None] + tile * TILE + lane[None, :]).to(tl.int32)
        for half in tl.static_range(HALVES):
            column = (tile * HALVES + half) * TILE + lane
            x = tl.load(x_row[None, :] + column[:, None], mask=(column < in_features)[:, None], other=0.0)
            if FP8:
                # The bits of a float16 that is 256 times smaller; also right for subnormal numbers.
                bits = ((packed & 0x80) << 8) | ((packed & 0x7F) << 7)
                weight = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            else:
                # Set the bits of 2^BITS plus the number: cheaper than a conversion. The offset has both constants.
                number = (packed >> (half * BITS)) & (2**BITS - 1)
                bits = (number << (23 - BITS)) | ((127 + BITS) << 23)
                weight = bits.to(tl.float32, bitcast=True)
            if SCALES == 0:
                if not FP8:
                    weight = weight - ADDED
            else:
                # Padding may belong to a group that does not exist.
                index = (tile * HALVES + half) * TILE + tl.arange(0, SCALES) * (TILE // SCALES)
                at = (tl.minimum(index, in_features - 1) // group)[None, :] * out_features + row[:, None]
                scale = tl.load(scale_ptr + at).to(tl.float32)
                if FP8:
                    weight = weight * spread(scale * 256.0, OUTPUTS, TILE)
                else:
                    shift = scale * ADDED
                    if OFFSETS:
                        offset = tl.load(offset_ptr + at).to(tl.float32)
                        shift = scale * (offset + ADDED) if ZERO_POINTS else shift + offset
                    weight = weight * spread(scale, OUTPUTS, TILE) - spread(shift, OUTPUTS, TILE)
            acc = tl.dot(weight.to(x.dtype), x, acc, input_precision=PRECISION)
    if SCALES == 0:
        acc = acc * (tl.load(scale_ptr + row).to(tl.float32) * (256.0 if FP8 else 1.0))[:, None]
    if BIAS:
        acc = acc + tl.load(bias_ptr + row).to(tl.float32)[:, None]
    at = (split.to(tl.int64) * num_tokens + token)[None, :] * out_features + output[:, None]
    inside = (token < num_tokens)[None, :] & (output < out_features)[:, None]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def spread(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, n] -> [ROWS, COLUMNS], each value repeated."""
    wide = tl.broadcast_to(values[:, :, None], (ROWS, values.shape[1], COLUMNS // values.shape[1]))
    return tl.reshape(wide, (ROWS, COLUMNS))


def product(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group: int,
    zero_points: bool,
) -> Tensor:
    """Multiply x [T, in] by a QuantizedMatrix [out, in]: [T, out].

    Args:
        x: float32, float16 or bfloat16. The others as in QuantizedMatrix.
        bias: [out].
    """
    if packed.dtype == FP8 and group == x.shape[1] and has_scaled_product(x, len(packed)):
        return scaled_product(x, packed, scales, bias)
    x = x if x.stride(1) == 1 else x.contiguous()
    num_tokens, in_features = x.shape
    per_output = bits == 8 and group == in_features and offsets is None
    tensor_cores = architecture_of(x.device) >= 80  # tensor cores that Triton uses
    options = linear_options(num_tokens, x.dtype, packed.dtype, bits, 0 if per_output else group, tensor_cores)
    num_tiles, out_features = packed.shape[1] // TILE, len(packed)
    blocks = triton.cdiv(out_features, options["OUTPUTS"]) * triton.cdiv(num_tokens, options["TOKENS"])
    tiles_of_split = choose_split(num_tiles, blocks, num_processors(x.device))
    num_splits = triton.cdiv(num_tiles, tiles_of_split)
    partial = x.new_empty(num_splits, num_tokens, out_features, dtype=torch.float32 if num_splits > 1 else x.dtype)
    whole = num_splits == 1
    grid = triton.cdiv(out_features, options["OUTPUTS"]), triton.cdiv(num_tokens, options["TOKENS"]), num_splits
    linear_kernel[grid](
        x, packed.view(torch.uint8), scales, scales if offsets is None else offsets,
        scales if bias is None else bias, partial, num_tokens, in_features, out_features, x.stride(0), packed.shape[1],
        group, tiles_of_split, OFFSETS=offsets is not None, ZERO_POINTS=zero_points, BIAS=whole and bias is not None,
        **options,
    )  # fmt: skip
    if whole:
        return partial[0]
    total = partial.sum(0)
    return (total if bias is None else total + bias).to(x.dtype)


def choose_split(num_tiles: int, blocks: int, num_processors: int) -> int:
    """How many tiles a split has: such that each processor runs about two programs, but at least SPLIT_TILES.

    Args: blocks: the number of programs without splits.
    """
    splits = max(1, min(2 * num_processors // blocks, num_tiles // SPLIT_TILES))
    return triton.cdiv(num_tiles, splits)


def linear_options(
    num_tokens: int, dtype: torch.dtype, packed: torch.dtype, bits: int, group: int, fast: bool
) -> dict[str, Any]:
    """The constants that linear_kernel is specialized on, and its warps and stages.

    Args:
        group: 0: an output has one scale and no offset.
        fast: whether the GPU has tensor cores that Triton uses (Ampere and later).
    """
    wide = dtype.itemsize > 2 or not fast
    most = 32 if wide else 128
    if bits == 4 and 0 < group < TILE:
        most //= 2  # its scales take as many registers
    tokens = min(max(triton.next_power_of_2(num_tokens), 16), most)
    many = tokens == 128
    return {
        "BITS": bits,
        "FP8": packed == FP8,
        "SCALES": max(1, TILE // group) if group else 0,
        "OUTPUTS": 128 if many else 64,
        "TOKENS": tokens,
        "TILE": TILE,
        "MIDDLE": MIDDLE,
        "PRECISION": "tf32x3" if fast and dtype == torch.float32 else "ieee",
        "num_warps": 8 if many else 4,
        "num_stages": 3 if many or wide else 5,
    }


def has_scaled_product(x: Tensor, out_features: int) -> bool:
    """Whether to round x [T, in] to fp8, too: for enough tokens, on a GPU that multiplies fp8. torch's product with
    row-wise scales needs bfloat16, and sizes that are multiples of 16."""
    if len(x) < SCALED_TOKENS or x.dtype != torch.bfloat16 or x.shape[1] % 16 or out_features % 16:
        return False
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 9)


def scaled_product(x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [T, in], rounded to fp8 with one scale for each token, by an fp8 weight: bfloat16 [T, out]."""
    rounded, token_scales = round_tokens(x)
    return torch._scaled_mm(
        rounded, packed[:, : x.shape[1]].t(), token_scales, scales, bias=bias, out_dtype=torch.bfloat16
    )


def round_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [T, in] to float8_e4m3fn. Returns: [T, in], and float32 scales [T, 1]."""
    scales = row_scales(x, torch.finfo(FP8).max)[:, None]
    return (x / scales).clamp(torch.finfo(FP8).min, torch.finfo(FP8).max).to(FP8), scales


# An operator, which torch.compile does not look into: its launches depend on the number of tokens, and compiled layers
# have only two versions for all numbers.
library = torch.library.Library("nanopage", "FRAGMENT")
library.define(
    "quantized_linear(Tensor x, Tensor packed, Tensor scales, Tensor? offsets, Tensor? bias, int bits, int group, "
    "bool zero_points) -> Tensor"
)
library.impl("quantized_linear", product, "CompositeExplicitAutograd")


@torch.library.register_fake("nanopage::quantized_linear", lib=library)
def _(x, packed, scales, offsets, bias, bits, group, zero_points):
    return x.new_empty(x.shape[0], packed.shape[0])
