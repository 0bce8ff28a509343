"""MXFP4: reads the experts of GPT-OSS in safetensors files, as floats.

32 inputs of an output share a scale, which is a power of two. A number of 4 bits has a sign, 2 bits of an exponent and
one bit of a mantissa (E2M1), so bfloat16 holds number * scale exactly. The tensors of a layer, of type uint8:

    gate_up_proj_blocks, down_proj_blocks  [experts, out, in / 32, 16]  two numbers in a byte, the lower bits first
    gate_up_proj_scales, down_proj_scales  [experts, out, in / 32]      127 more than the exponent (E8M0); 255: NaN

Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

import math
from collections.abc import Container, Iterator
from contextlib import ExitStack
from io import FileIO
from itertools import repeat

import torch
from torch import Tensor
from torch.nn import functional as F

from nanopage.files.safetensors_checkpoint import StoredBytes, StoredTensor, opened, parts_of, read_into, stored_bytes
from nanopage.quantization.layouts import E2M1

NUMBERS = torch.tensor([*E2M1, *(-number for number in E2M1)], dtype=torch.bfloat16) / 2
PAIRS = torch.stack((NUMBERS.repeat(16), NUMBERS.repeat_interleave(16)), 1)  # [256, 2], of each byte
POWERS = torch.tensor([math.ldexp(1.0, exponent) for exponent in range(-127, 129)], dtype=torch.bfloat16)
LARGEST = 252  # of the scales: 6 * 2 ** (LARGEST - 127) is finite in bfloat16


def as_floats(stored: list[StoredTensor]) -> list[StoredTensor]:
    """The tensors of a checkpoint, where each pair of blocks and scales is replaced by what it holds: the matrices of
    the experts in bfloat16, as a checkpoint of floats has them."""
    by_name = {tensor.name: tensor for tensor in stored}
    for matrix, parts in matrices_of(stored).items():
        if by_name.keys().isdisjoint(parts):
            file = by_name.pop(f"{matrix}_blocks").file
            del by_name[f"{matrix}_scales"]
            by_name |= {name: StoredTensor(name, shape, "BF16", file) for name, shape in parts.items()}
    return [*by_name.values()]


def matrices_of(stored: list[StoredTensor]) -> dict[str, dict[str, tuple[int, ...]]]:
    """The matrices that have blocks, and scales that fit them, each with the names and shapes of its parts."""
    shapes, found = {tensor.name: tensor.shape for tensor in stored if tensor.dtype == "U8"}, {}
    for tensor in stored:
        name, shape = tensor.name.removesuffix("_blocks"), shapes.get(tensor.name, ())
        if name != tensor.name and len(shape) == 4 and shape == (*shapes.get(f"{name}_scales", ()), 16):
            floats = StoredTensor(name, (shape[0], 32 * shape[2], shape[1]), "BF16", tensor.file)
            found[name] = {part: part_shape for part, _, part_shape in parts_of(floats)}
    return found


def dequantized(stored: list[StoredTensor], wanted: Container[str]) -> Iterator[tuple[str, int, Tensor]]:
    """The matrices of the experts that are `wanted`, as pieces (see loader.py), expert by expert.

    Raises: ValueError naming the file, which has changed, or has a scale that is NaN or too large.
    """
    named = {tensor.name: tensor for tensor in stored}
    with ExitStack() as stack:
        entries: dict[StoredTensor, tuple[FileIO, StoredBytes]] = {}
        for file in {tensor.file for tensor in stored}:
            content = stack.enter_context(opened(file))
            entries |= {entry.tensor: (content, entry) for entry in stored_bytes(content, file)}
        for matrix, parts in matrices_of(stored).items():
            blocks, scales = (entries.get(named[f"{matrix}_{kind}"]) for kind in ("blocks", "scales"))
            if blocks is None or scales is None:
                raise ValueError(f"{named[f'{matrix}_blocks'].file} has changed while it was read")
            names, num_experts = [*parts], blocks[1].tensor.shape[0]
            each = len(names) // num_experts
            for expert in range(num_experts):
                if names[expert * each] in wanted:
                    weight = dequantize(read_expert(*blocks, expert), read_expert(*scales, expert)).T
                    yield from zip(names[expert * each :], repeat(0, each), weight.chunk(each), strict=False)


def read_expert(content: FileIO, entry: StoredBytes, expert: int) -> Tensor:
    """The part of a tensor that belongs to an expert."""
    shape = entry.tensor.shape[1:]
    buffer = bytearray(math.prod(shape))
    read_into(buffer, content, entry.begin + expert * len(buffer), entry.tensor.file)
    values = torch.frombuffer(buffer, dtype=torch.uint8).view(shape)
    if len(shape) == 2 and values.max() > LARGEST:
        raise ValueError(f"{entry.tensor.file}: {entry.tensor.name} has scales that are NaN or too large for floats")
    return values


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks uint8 [out, in / 32, 16], scales uint8 [out, in / 32] -> bfloat16 [out, in]"""
    return (F.embedding(blocks.int(), PAIRS) * POWERS[scales.int()][..., None, None]).flatten(1)
