"""Weights of 4 or 8 bits as the Triton kernel reads them (quantized_linear.py), and their conversion to floats.

    weight = scale * (integer - zero)  or  scale * integer - offset  or  scale * float8

Rows are outputs. TILE bytes of a row are one tile of a program: TILE inputs of 8 bits, or twice as many of 4 bits. With
4 bits, the low halves of the bytes are the first TILE inputs and the high halves are the next TILE, so that no weight
has to move to another thread. Scales, and offsets or zeros, are [groups, out], so that programs read adjacent numbers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopage.cpu import tile_linear
from nanopage.cpu.tile_linear import Blocks

TILE = 64  # bytes
MIDDLE = 128  # added to integers of 8 bits, which are signed
FP8 = torch.float8_e4m3fn
CHUNK = 2**24  # weights that are rounded at once, because float32 takes more memory


@dataclass
class QuantizedMatrix:
    """The integers and scales of a matrix [out, in].

    packed: [out, bytes], rows padded to a multiple of TILE bytes. Of 4 bits: uint8, 0 to 15. Of 8 bits: uint8, the
        integer plus MIDDLE. Of fp8: float8_e4m3fn.
    scales: a floating type [groups, out]. Padding beyond `in_features` may have any scale.
    offsets: a floating type [groups, out], or None for zeros.
    zero_points: whether `offsets` are zero points, in units of the integers.
    bits: 4 or 8.
    group: adjacent inputs that share a scale: 16, 32, or a multiple of TILE; or `in_features`, all inputs. The last
        group may have fewer.
    """

    packed: Tensor
    scales: Tensor
    offsets: Tensor | None
    zero_points: bool
    bits: int
    group: int
    in_features: int

    def to(self, device: torch.device) -> "QuantizedMatrix":
        packed, scales, offsets = (
            None if tensor is None else tensor.to(device) for tensor in (self.packed, self.scales, self.offsets)
        )
        assert packed is not None and scales is not None
        return replace(self, packed=packed, scales=scales, offsets=offsets)


def pack(
    integers: Tensor, scales: Tensor, offsets: Tensor | None, zero_points: bool, bits: int, group: int
) -> QuantizedMatrix:
    """Args: integers: int8 or uint8 [out, in], from 0 to 15 or signed. The others as in QuantizedMatrix."""
    in_features = integers.shape[1]
    if bits == 8:
        packed = F.pad(integers, (0, -in_features % TILE)).view(torch.uint8) ^ MIDDLE  # adds MIDDLE
    else:
        low, high = F.pad(integers, (0, -in_features % (2 * TILE))).unflatten(1, (-1, 2, TILE)).unbind(2)
        packed = (low | high << 4).flatten(1).view(torch.uint8)
    return QuantizedMatrix(packed, scales, offsets, zero_points, bits, group, in_features)


def from_blocks(blocks: Blocks) -> QuantizedMatrix:
    """Convert a weight in the form that tiles on a CPU have. Scales and offsets become float16."""
    group = blocks.integers.shape[1] // blocks.scales.shape[1]
    scales, offsets = (
        None if part is None else part.T.to(torch.float16).contiguous() for part in (blocks.scales, blocks.offsets)
    )
    assert scales is not None
    return pack(blocks.integers, scales, offsets, False, blocks.bits, group)


def round_to_int4(weight: Tensor) -> QuantizedMatrix:
    """Round a weight [out, in] of any floating type to 4 bits, with a scale and an offset for each INT4_GROUP inputs.
    in: a multiple of INT4_GROUP."""
    return join([from_blocks(tile_linear.round_to_int4(part)) for part in _chunks(weight)])


def round_to_int8(weight: Tensor) -> QuantizedMatrix:
    """Round a weight [out, in] of any floating type to 8 bits, with one scale for each output."""
    return join([_rounded(part, 127, torch.int8) for part in _chunks(weight)])


def round_to_fp8(weight: Tensor) -> QuantizedMatrix:
    """Round a weight [out, in] of any floating type to float8_e4m3fn, with one scale for each output."""
    return join([_rounded(part, torch.finfo(FP8).max, FP8) for part in _chunks(weight)])


def _rounded(weight: Tensor, most: float, dtype: torch.dtype) -> QuantizedMatrix:
    values = weight.float()
    scales = tile_linear.row_scales(values, most)
    values, in_features = values / scales[:, None], weight.shape[1]
    if dtype == torch.int8:
        return pack(values.round().to(dtype), scales[None], None, False, 8, in_features)
    packed = F.pad(values, (0, -in_features % TILE)).to(dtype)
    return QuantizedMatrix(packed, scales[None], None, False, 8, in_features, in_features)


def _chunks(weight: Tensor) -> Iterator[Tensor]:
    yield from weight.split(max(1, CHUNK // weight.shape[1]))


def join(parts: list[QuantizedMatrix]) -> QuantizedMatrix:
    """Join the rows of all parts, which have the same format, to one weight."""
    first = parts[0]
    packed = torch.cat([part.packed.view(torch.uint8) for part in parts]).view(first.packed.dtype)
    scales = torch.cat([part.scales for part in parts], 1)
    offsets = (
        None if first.offsets is None else torch.cat([part.offsets for part in parts if part.offsets is not None], 1)
    )
    return QuantizedMatrix(packed, scales, offsets, first.zero_points, first.bits, first.group, first.in_features)


def dequantize(weight: Any, rows: Tensor | slice = slice(None)) -> Tensor:
    """Rows of a weight in float32: [rows, in].

    Args: weight: a QuantizedMatrix, or a QuantizedWeight, which has the same fields.
    """
    packed = weight.packed[rows]
    scales, offsets = (
        None if part is None else part.T[rows].float().repeat_interleave(weight.group, 1)[:, : weight.in_features]
        for part in (weight.scales, weight.offsets)
    )
    assert scales is not None
    if packed.dtype == FP8:
        values = packed.float()
    elif weight.bits == 8:
        values = packed.float() - MIDDLE
    else:
        values = torch.stack([packed & 15, packed >> 4], 1).unflatten(2, (-1, TILE)).transpose(1, 2).flatten(1).float()
    values = values[:, : weight.in_features]
    if offsets is None:
        return values * scales
    return (values - offsets) * scales if weight.zero_points else values * scales - offsets
