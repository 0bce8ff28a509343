"""Reads the integers, scales and offsets of quantized tensors of a GGUF file, without converting them to floats.

The layouts of blocks are those of ggml-common.h in https://github.com/ggml-org/ggml. A weight is scale * integer -
offset, as in tile_linear.Blocks. In the K types, scales are integers, too, and those of a block share a float16.
"""

from collections.abc import Callable

import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from nanopage.cpu.tile_linear import Blocks


def split_blocks(kind: Kind, data: Tensor) -> Blocks:
    """Split rows of a tensor of one of the KINDS into integers, scales and offsets.

    Args: data: uint8 [rows, bytes of a row].
    """
    _, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = KINDS[kind](data.view(-1, block_bytes))
    rows = len(data)
    return Blocks(
        blocks.integers.reshape(rows, -1),
        blocks.scales.reshape(rows, -1),
        None if blocks.offsets is None else blocks.offsets.reshape(rows, -1),
        blocks.bits,
    )


def with_one_format(parts: list[Blocks]) -> Blocks:
    """Join the rows of `parts` to one weight, in the smallest format that holds them exactly."""
    groups = [part.integers.shape[1] // part.scales.shape[1] for part in parts]
    bits, group = max(part.bits for part in parts), min(groups)
    repeats = [own // group for own in groups]
    scales = [part.scales.repeat_interleave(n, 1) for part, n in zip(parts, repeats, strict=True)]
    offsets = None
    if any(part.offsets is not None for part in parts):
        known = [torch.zeros_like(part.scales) if part.offsets is None else part.offsets for part in parts]
        offsets = torch.cat([offset.repeat_interleave(n, 1) for offset, n in zip(known, repeats, strict=True)])
    return Blocks(torch.cat([part.integers for part in parts]), torch.cat(scales), offsets, bits)


# Each takes blocks, uint8 [blocks, bytes of a block].


def _q4_0(data: Tensor) -> Blocks:
    scales = _halves(data, 0)
    return Blocks(_nibbles(data[:, 2:18]), scales, 8 * scales, 4)


def _q4_1(data: Tensor) -> Blocks:
    return Blocks(_nibbles(data[:, 4:20]), _halves(data, 0), -_halves(data, 2), 4)


def _q5_0(data: Tensor) -> Blocks:
    return Blocks((_nibbles(data[:, 6:22]) | _bits(data[:, 2:6]) << 4) - 16, _halves(data, 0), None, 8)


def _q5_1(data: Tensor) -> Blocks:
    return Blocks(_nibbles(data[:, 8:24]) | _bits(data[:, 4:8]) << 4, _halves(data, 0), -_halves(data, 2), 8)


def _q8_0(data: Tensor) -> Blocks:
    return Blocks(data[:, 2:].contiguous().view(torch.int8), _halves(data, 0), None, 8)


def _q4_k(data: Tensor) -> Blocks:
    return Blocks(_nibbles(data[:, 16:144], 32), *_scales_and_offsets(data), 4)


def _q5_k(data: Tensor) -> Blocks:
    low, high = _nibbles(data[:, 48:176], 32).unflatten(1, (-1, 32)), data[:, None, 16:48]
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]  # each bit of a high byte belongs to a different group
    integers = low | ((high >> shifts) & 1).view(torch.int8) << 4
    return Blocks(integers.flatten(1), *_scales_and_offsets(data), 8)


def _q6_k(data: Tensor) -> Blocks:
    low, high = _nibbles(data[:, :128], 64).unflatten(1, (2, 4, 32)), data[:, 128:192].unflatten(1, (2, 1, 32))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    integers = (low | ((high >> shifts) & 3).view(torch.int8) << 4) - 32
    scales = data[:, 192:208].contiguous().view(torch.int8).float()
    return Blocks(integers.flatten(1), scales * _halves(data, 208), None, 8)


def _halves(data: Tensor, position: int) -> Tensor:
    """The float16 at a position of each block: float32 [blocks, 1]."""
    return data[:, position : position + 2].contiguous().view(torch.float16).float()


def _nibbles(data: Tensor, run: int = 16) -> Tensor:
    """The halves of bytes, int8: of each `run` bytes, first the low halves and then the high halves."""
    runs = data.unflatten(1, (-1, run))
    return torch.stack([runs & 15, runs >> 4], 2).flatten(1).view(torch.int8)


def _bits(data: Tensor) -> Tensor:
    """The bits of bytes, int8, the lowest first."""
    return ((data[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1).view(torch.int8)


def _scales_and_offsets(data: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and offsets of blocks of Q4_K and Q5_K: eight each, of 6 bits, in 12 bytes."""
    first, second, third = data[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat([first & 63, (third & 15) | first >> 6 << 4], 1)
    offsets = torch.cat([second & 63, third >> 4 | second >> 6 << 4], 1)
    return scales.float() * _halves(data, 0), offsets.float() * _halves(data, 2)


KINDS: dict[Kind, Callable[[Tensor], Blocks]] = {
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q5_0: _q5_0,
    Kind.Q5_1: _q5_1,
    Kind.Q8_0: _q8_0,
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
    Kind.Q6_K: _q6_k,
}
