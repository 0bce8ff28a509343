"""AWQ and GPTQ: reads the integers of linear layers in safetensors files, without converting them to floats.

A weight is scale * (integer - zero point). `group_size` inputs of an output share both. Integers of 4 bits (AWQ, GPTQ)
or 8 (GPTQ) are packed into int32, the lowest bits first:

            qweight                          qzeros                              scales
    AWQ     [in, out * bits / 32]            [groups, out * bits / 32]           [groups, out]
    GPTQ    [in * bits / 32, out]            [groups, out * bits / 32]           [groups, out]

The eight numbers in an int32 of AWQ belong to the outputs 0, 2, 4, 6, 1, 3, 5, 7. GPTQ's numbers are in order. GPTQ's
first format stores zero points minus one. GPTQ's g_idx [in] names the group of each input: with act-order (desc_act),
the inputs of a group are not adjacent.

Sources: AutoAWQ's WQLinear_GEMM, AutoGPTQ's QuantLinear and GPTQModel's conversion between GPTQ's formats.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from typing import Any

import torch
from torch import Tensor

from nanopage.checks.stored_quantization import StoredQuantization
from nanopage.config.model import ModelConfig
from nanopage.cpu import tile_linear
from nanopage.cpu.tile_linear import Blocks
from nanopage.cpu.tiled import TiledWeight
from nanopage.device import check_weights_fit
from nanopage.files.safetensors_checkpoint import StoredBytes, StoredTensor, opened, read_whole, stored_bytes
from nanopage.layers.linear import Linear
from nanopage.layers.weight import Weight
from nanopage.models.decoder import Decoder
from nanopage.quantization import quantized_weights
from nanopage.quantization.quantized import QuantizedWeight
from nanopage.quantization.quantized_weights import QuantizedMatrix

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
WORD = 32  # bits
BLOCK = 32  # inputs of a group of `Blocks`


@dataclass
class Matrix:
    """A weight [out, in] of integers: weight = scale * (integer - zero point).

    integers: uint8 [out, in]. Inputs of a group are adjacent.
    scales: float [groups, out], as stored. zeros: int32 [groups, out].
    order: int64 [in], the input that each column belongs to; None if columns are in order.
    """

    integers: Tensor
    scales: Tensor
    zeros: Tensor
    order: Tensor | None = None

    def dequantized(self) -> Tensor:
        """The weight, float32 [out, in], with columns in order."""
        groups = self.integers.T.unflatten(0, (len(self.scales), -1))
        weight = ((groups - self.zeros[:, None]) * self.scales.float()[:, None]).flatten(0, 1).T
        return weight if self.order is None else torch.empty_like(weight).index_copy_(1, self.order, weight)

    def packed(self, bits: int) -> QuantizedMatrix:
        """The weight for a GPU, without rounding anything. Its columns stay in the order of `integers`."""
        shift = 128 if bits == 8 else 0  # there, integers of 8 bits are signed
        integers = (self.integers.to(torch.int16) - shift).to(torch.int8)
        zeros = (self.zeros - shift).to(torch.float16)
        group = integers.shape[1] // len(self.scales)
        return quantized_weights.pack(integers, self.scales, zeros, True, bits, group)

    def blocks(self, bits: int) -> Blocks:
        """The weight for tiles on a CPU, whose groups have 32 inputs. Tiles round offsets, scale * zero point, to
        float16. Only for a matrix without `order`."""
        shift = 128 if bits == 8 else 0  # Blocks of 8 bits are signed
        repeats = self.integers.shape[1] // len(self.scales) // BLOCK
        scales = self.scales.float().T.repeat_interleave(repeats, 1)
        offsets = scales * (self.zeros.T - shift).repeat_interleave(repeats, 1)
        return Blocks((self.integers.to(torch.int16) - shift).to(torch.int8), scales, offsets, bits)


def fits_tiles(config: ModelConfig) -> bool:
    """Whether tiles on a CPU (cpu/tile_linear.py) can hold the model. Tiles need inputs in order, groups that are
    multiples of 32, and a head that is not float32."""
    stored_as = config.quantization
    assert stored_as is not None
    sizes = [config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim]
    if config.experts is not None:
        sizes += [config.experts.intermediate_size, config.experts.shared_size]
    in_order = stored_as.group_size is None or not stored_as.desc_act
    return in_order and config.dtype in ("bfloat16", "float16") and not any(size % BLOCK for size in sizes)


def linears(model: Decoder) -> Iterator[tuple[Linear, list[str]]]:
    """The linear layers that are stored as integers, all but the head, with the names of their parts in the files."""
    for place, linear in model.named_modules():
        if isinstance(linear, Linear) and linear is not model.lm_head:
            parent, _, name = place.rpartition(".")
            yield linear, [f"model.{parent}.{part or name}" for part in linear.parts]


def expected(
    model: Decoder, slots: dict[str, Tensor], stored: list[StoredTensor], stored_as: StoredQuantization
) -> dict[str, Tensor]:
    """The `slots` of a model, on the meta device, where the weights of quantized layers are replaced by the tensors
    that the files should have. For GPTQ, this adds g_idx, and biases that a file has but the model does not.

    Raises: ValueError naming a layer whose sizes are not multiples of the group size or of what an int32 holds.
    """
    wanted, names = dict(slots), {tensor.name for tensor in stored}
    per_word = WORD // stored_as.bits
    for linear, parts in linears(model):
        in_features = linear.in_features
        group = stored_as.group_size or in_features
        for part, out_features in zip(parts, linear.parts.values(), strict=True):
            if in_features % group or in_features % per_word or out_features % per_word:
                needed = f"a multiple of {max(group, per_word)} and one of {per_word}"
                raise ValueError(
                    f"{part} has {in_features} inputs and {out_features} outputs; {stored_as.method} with group_size="
                    f"{stored_as.group_size or -1} needs {needed}; the checkpoint that is not quantized runs"
                )
            del wanted[f"{part}.weight"]
            packed = in_features, out_features // per_word
            if stored_as.method == "gptq":
                packed = in_features // per_word, out_features
            shapes = {
                "qweight": packed,
                "qzeros": (in_features // group, out_features // per_word),
                "scales": (in_features // group, out_features),
                "g_idx": (in_features,),
                "bias": (out_features,),
            }
            for kind, shape in shapes.items():
                optional = kind in ("g_idx", "bias")
                if not optional or (stored_as.method == "gptq" and f"{part}.{kind}" in names):
                    dtype = torch.float32 if kind in ("scales", "bias") else torch.int32
                    wanted.setdefault(f"{part}.{kind}", torch.empty(shape, dtype=dtype, device="meta"))
    return wanted


class Reader:
    """Reads the matrices of an AWQ or GPTQ checkpoint, one at a time. A context manager: it keeps the files open."""

    def __init__(self, stored: list[StoredTensor], stored_as: StoredQuantization):
        self.files = {tensor.name: tensor.file for tensor in stored}
        self.stored_as = stored_as
        self._stack = ExitStack()
        self._stored = {tensor.name: tensor for tensor in stored}
        self._entries: dict[str, tuple[FileIO, StoredBytes]] = {}

    def __enter__(self) -> "Reader":
        for file in set(self.files.values()):
            content = self._stack.enter_context(opened(file))
            for entry in stored_bytes(content, file):
                if entry.tensor != self._stored.get(entry.tensor.name, entry.tensor):
                    raise ValueError(f"{file} has changed while it was read")
                self._entries[entry.tensor.name] = content, entry
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def read(self, linear: Linear, parts: list[str]) -> Matrix:
        """The matrix of a linear layer: the rows of all its parts. The headers of the files have been checked.

        Raises: ValueError naming the file and the tensor: scales that are not finite; a g_idx that does not name each
            group `group_size` times, is out of order without desc_act, or differs between parts; a bias other than 0
            that the model does not have.
        """
        matrices = [self._part(name, linear.in_features, linear.bias is None) for name in parts]
        first = matrices[0].order
        for name, matrix in zip(parts, matrices, strict=True):
            same = matrix.order is None if first is None else matrix.order is not None and matrix.order.equal(first)
            if not same:
                place = self.files[f"{name}.qweight"]
                raise ValueError(f"{place}: the g_idx of {parts[0]} and {name} differ, which share their input here")
        return Matrix(
            torch.cat([matrix.integers for matrix in matrices]),
            torch.cat([matrix.scales for matrix in matrices], 1),
            torch.cat([matrix.zeros for matrix in matrices], 1),
            first,
        )

    def _part(self, name: str, in_features: int, without_bias: bool) -> Matrix:
        if without_bias and (bias := self._optional(f"{name}.bias")) is not None and bias.any():
            raise ValueError(f"{self.files[f'{name}.bias']}: {name}.bias is not zero, but the model has no bias there")
        qweight, qzeros, scales = (self._tensor(f"{name}.{kind}") for kind in ("qweight", "qzeros", "scales"))
        if not scales.isfinite().all():
            raise ValueError(f"{self.files[f'{name}.scales']}: {name}.scales has values that are NaN or infinite")
        bits = self.stored_as.bits
        if self.stored_as.method == "awq":
            awq = torch.tensor(AWQ_ORDER).argsort()
            integers, zeros = (unpack(words, bits)[..., awq].flatten(1) for words in (qweight, qzeros))
            return Matrix(integers.T.contiguous(), scales, zeros.int())
        integers = unpack(qweight.T.contiguous(), bits).flatten(1)
        # Adding 1 to all numbers of a word at once undoes the borrow that a zero point of 0 left in the next number.
        ones = sum(1 << shift for shift in range(0, WORD, bits)) * self.stored_as.zero_offset
        zeros = unpack(qzeros + ones, bits).flatten(1)
        order = self._order(name, in_features)
        return Matrix(integers if order is None else integers[:, order], scales, zeros.int(), order)

    def _order(self, name: str, in_features: int) -> Tensor | None:
        group = self.stored_as.group_size or in_features
        g_idx = self._optional(f"{name}.g_idx")
        in_order = torch.arange(in_features) // group
        if g_idx is None or g_idx.equal(in_order.int()):
            return None
        place = f"{self.files[f'{name}.g_idx']}: {name}.g_idx"
        order = g_idx.argsort(stable=True)
        if not g_idx[order].equal(in_order.int()):
            raise ValueError(f"{place} does not have {in_features // group} groups of {group} inputs")
        if not self.stored_as.desc_act:
            raise ValueError(f"{place} is not in order, but config.json says that desc_act is false")
        return order

    def _tensor(self, name: str) -> Tensor:
        if name not in self._entries:
            raise ValueError(f"{self.files[name]} has changed while it was read")
        return read_whole(*self._entries[name])

    def _optional(self, name: str) -> Tensor | None:
        return self._tensor(name) if name in self.files else None


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [..., words] -> uint8 [..., words, numbers in a word], the number in the lowest bits first."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & (2**bits - 1)).to(torch.uint8)


def place(
    model: Decoder,
    stored: list[StoredTensor],
    stored_as: StoredQuantization,
    packed: bool,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Put the weights of the quantized linear layers into a model on the meta device, one at a time.

    Args:
        packed: whether to pack the weights as a GPU reads them. False: in tiles, for a CPU.
        dtype: the dtype of activations.

    Raises: ValueError as `Reader.read`; MemoryError if the integers do not fit on the device.
    """
    found = list(linears(model))
    sizes = [linear.in_features * linear.out_features for linear, _ in found]
    check_weights_fit(sum(sizes) * stored_as.bits // 8, device)
    with Reader(stored, stored_as) as reader:
        for i, (linear, parts) in enumerate(found):
            linear.weight = _weight(reader.read(linear, parts), stored_as.bits, packed, dtype, device)
            if on_progress is not None:
                on_progress(sum(sizes[: i + 1]), sum(sizes))


def _weight(matrix: Matrix, bits: int, packed: bool, dtype: torch.dtype, device: torch.device) -> Weight:
    if packed:
        order = None if matrix.order is None else matrix.order.to(device)
        return QuantizedWeight(matrix.packed(bits).to(device), dtype, order)
    out_features, in_features = matrix.integers.shape
    return TiledWeight(out_features, in_features, *tile_linear.tile_blocks(matrix.blocks(bits)), dtype)


def dequantized(
    model: Decoder, stored: list[StoredTensor], stored_as: StoredQuantization
) -> Iterator[tuple[str, int, Tensor]]:
    """The weights of the quantized linear layers, float32, as pieces (see loader.py)."""
    with Reader(stored, stored_as) as reader:
        for linear, parts in linears(model):
            weight = reader.read(linear, parts).dequantized()
            for part, rows in zip(parts, weight.split(list(linear.parts.values())), strict=True):
                yield f"{part}.weight", 0, rows
