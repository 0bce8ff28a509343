"""The tensors in which checkpoints store a quantized matrix [out, in], and how they become a `Matrix`.

    layout                 tensors
    awq                    qweight [in, out * bits / 32], qzeros [groups, out * bits / 32], scales [groups, out]
    gptq                   qweight [in * bits / 32, out], qzeros and scales as awq, g_idx [in]
    packed                 weight_packed [out, in * bits / 32], weight_scale [out, groups], weight_shape [2],
                           weight_zero_point [out * bits / 32, groups], weight_g_idx [in]
    int8                   weight [out, in], weight_scale [out, 1] or [1], weight_zero_point of the same shape
    fp8                    weight [out, in], weight_scale or weight_scale_inv: [out, 1], [1], or one for each block
    nvfp4                  weight_packed [out, in / 2], weight_scale [out, in / 16], weight_global_scale [1]
    nvfp4 of ModelOpt      weight [out, in / 2], weight_scale [out, in / 16], weight_scale_2 [1]

Integers of 4 or 8 bits are packed into int32, the lowest bits first. The eight numbers in an int32 of AWQ belong to the
outputs 0, 2, 4, 6, 1, 3, 5, 7. GPTQ's first format stores zero points minus one. A g_idx names the group of each input:
with act-order (desc_act), the inputs of a group are not adjacent. Despite its name, weight_scale_inv is a factor.

NVFP4 has numbers of 4 bits (E2M1), two in a byte, the lower bits first; scales are fp8, and their common scale is a
factor in ModelOpt's files and a divisor in compressed-tensors'.

Scales of activations are accepted and not used: activations are not rounded to what the checkpoint says.

Sources: AutoAWQ's WQLinear_GEMM, AutoGPTQ's QuantLinear, GPTQModel's conversion between GPTQ's formats, the compressors
of compressed-tensors, transformers' FP8Linear, and ModelOpt's export.
"""

from collections.abc import Callable, Mapping
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from nanopage.checks.stored_quantization import StoredQuantization
from nanopage.quantization.matrix import Matrix
from nanopage.quantization.quantized_weights import FP8

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
WORD = 32  # bits
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the values; eight more are negative
ONE = ((), (1,), (1, 1))  # shapes of a tensor with one number
Shapes = tuple[torch.dtype, tuple[tuple[int, ...], ...]]
"""The kind of a tensor (float32 stands for floats of 16 bits or more), and the shapes that it may have."""
SCALES_OF_ACTIVATIONS: dict[str, Shapes] = {
    "input_scale?": (torch.float32, ONE),
    "input_global_scale?": (torch.float32, ONE),
    "input_zero_point?": (torch.int8, ONE),
    "activation_scale?": (torch.float32, ONE),
}


class Layout(NamedTuple):
    """tensors: (how, out, in) -> the tensors of a matrix, by the last part of their names. A "?" after a name: a file
        may lack it. "|" separates two names, of which a file has one.
    read: (the tensors by their names, how) -> the matrix. Raises: ValueError that begins with the name of a tensor.
    """

    tensors: Callable[[StoredQuantization, int, int], dict[str, Shapes]]
    read: Callable[[Mapping[str, Tensor], StoredQuantization], Matrix]


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [..., words] -> uint8 [..., words, numbers in a word], the number in the lowest bits first."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & (2**bits - 1)).to(torch.uint8)


def _awq_tensors(how: StoredQuantization, out: int, in_: int) -> dict[str, Shapes]:
    groups, words = in_ // (how.group_size or in_), out * how.bits // WORD
    return {
        "qweight": (torch.int32, ((in_, words),)),
        "qzeros": (torch.int32, ((groups, words),)),
        "scales": (torch.float32, ((groups, out),)),
    }


def _read_awq(tensors: Mapping[str, Tensor], how: StoredQuantization) -> Matrix:
    order = torch.tensor(AWQ_ORDER).argsort()
    integers, zeros = (unpack(tensors[name], how.bits)[..., order].flatten(1) for name in ("qweight", "qzeros"))
    return Matrix(integers.T.contiguous(), tensors["scales"], zeros.int(), how.bits, _group(how, len(integers)))


def _gptq_tensors(how: StoredQuantization, out: int, in_: int) -> dict[str, Shapes]:
    packed = (torch.int32, ((in_ * how.bits // WORD, out),))
    return _awq_tensors(how, out, in_) | {"qweight": packed, "g_idx?": (torch.int32, ((in_,),))}


def _read_gptq(tensors: Mapping[str, Tensor], how: StoredQuantization) -> Matrix:
    integers = unpack(tensors["qweight"].T.contiguous(), how.bits).flatten(1)
    # Adding 1 to all numbers of a word at once undoes the borrow that a zero point of 0 left in the next number.
    ones = sum(1 << shift for shift in range(0, WORD, how.bits)) * how.zero_offset
    zeros = unpack(tensors["qzeros"] + ones, how.bits).flatten(1).int()
    return _ordered(integers, tensors["scales"], zeros, how, tensors.get("g_idx"), "g_idx")


def _packed_tensors(how: StoredQuantization, out: int, in_: int) -> dict[str, Shapes]:
    groups, per_word = in_ // (how.group_size or in_), WORD // how.bits
    found: dict[str, Shapes] = {
        "weight_packed": (torch.int32, ((out, in_ // per_word),)),
        "weight_scale": (torch.float32, ((out, groups),)),
        "weight_shape": (torch.int64, ((2,),)),
    }
    if not how.symmetric:
        found["weight_zero_point"] = torch.int32, ((ceil(out / per_word), groups),)
    if how.desc_act:
        found["weight_g_idx"] = torch.int32, ((in_,),)
    return found


def _read_packed(tensors: Mapping[str, Tensor], how: StoredQuantization) -> Matrix:
    integers, zeros = unpack(tensors["weight_packed"], how.bits).flatten(1), None
    if tensors["weight_shape"].tolist() != list(integers.shape):
        raise ValueError(f"weight_shape is not {list(integers.shape)}, the shape of the numbers in weight_packed")
    if not how.symmetric:
        zeros = unpack(tensors["weight_zero_point"].T.contiguous(), how.bits).flatten(1)[:, : len(integers)].int()
    return _ordered(integers, tensors["weight_scale"].T, zeros, how, tensors.get("weight_g_idx"), "weight_g_idx")


def _ordered(
    integers: Tensor, scales: Tensor, zeros: Tensor | None, how: StoredQuantization, g_idx: Tensor | None, name: str
) -> Matrix:
    """A matrix whose inputs are sorted by their groups. Raises: ValueError if a group has another number of inputs."""
    in_features = integers.shape[1]
    group, in_order = _group(how, in_features), torch.arange(in_features) // _group(how, in_features)
    order = None
    if g_idx is not None and not g_idx.equal(in_order.int()):
        order = g_idx.argsort(stable=True)
        if not g_idx[order].equal(in_order.int()):
            raise ValueError(f"{name} does not have {in_features // group} groups of {group} inputs")
        if not how.desc_act:
            raise ValueError(f"{name} is not in order, but config.json says that desc_act is false")
        integers = integers[:, order]
    return Matrix(integers, scales, zeros, how.bits, group, order)


def _int8_tensors(how: StoredQuantization, out: int, in_: int) -> dict[str, Shapes]:
    shapes = ((out, 1), (out,), *ONE)
    zeros: dict[str, Shapes] = {} if how.symmetric else {"weight_zero_point": (torch.int8, shapes)}
    return {"weight": (torch.int8, ((out, in_),)), "weight_scale": (torch.float32, shapes)} | zeros


def _read_int8(tensors: Mapping[str, Tensor], how: StoredQuantization) -> Matrix:
    weight, zeros = tensors["weight"], None
    out, in_ = weight.shape
    if not how.symmetric:
        zeros = tensors["weight_zero_point"].int().reshape(1, -1).expand(1, out) + 128
    return Matrix(weight.view(torch.uint8) ^ 128, tensors["weight_scale"].reshape(1, -1).expand(1, out), zeros, 8, in_)


def _fp8_tensors(how: StoredQuantization, out: int, in_: int) -> dict[str, Shapes]:
    shapes: tuple[tuple[int, ...], ...] = ((out, 1), (out,), *ONE)
    if how.block_rows is not None and how.group_size is not None:
        shapes = ((ceil(out / how.block_rows), ceil(in_ / how.group_size)),)
    return {"weight": (FP8, ((out, in_),)), "weight_scale_inv|weight_scale": (torch.float32, shapes)}


def _read_fp8(tensors: Mapping[str, Tensor], how: StoredQuantization) -> Matrix:
    weight = tensors["weight"]
    out, in_ = weight.shape
    if (weight.view(torch.uint8) & 127 == 127).any():
        raise ValueError("weight has values that are NaN")
    scales = tensors.get("weight_scale_inv", tensors.get("weight_scale"))
    assert scales is not None
    if how.block_rows is None:
        return Matrix(weight, scales.reshape(1, -1).expand(1, out), None, 8, in_)
    return Matrix(weight, scales.T.repeat_interleave(how.block_rows, 1)[:, :out], None, 8, _group(how, in_))


def _nvfp4_tensors(how: StoredQuantization, out: int, in_: int) -> dict[str, Shapes]:
    weight, common = _nvfp4_names(how)
    return {
        weight: (torch.uint8, ((out, in_ // 2),)),
        "weight_scale": (FP8, ((out, in_ // (how.group_size or in_)),)),
        common: (torch.float32, ONE),
    }


def _read_nvfp4(tensors: Mapping[str, Tensor], how: StoredQuantization) -> Matrix:
    weight, common = _nvfp4_names(how)
    packed, factor = tensors[weight], tensors[common].float().reshape(())
    if how.method != "modelopt":
        if factor == 0:
            raise ValueError(f"{common} is 0")
        factor = 1 / factor
    numbers = torch.stack([packed & 15, packed >> 4], 2).flatten(1)
    values = torch.tensor([128 + value for value in E2M1] + [128 - value for value in E2M1], dtype=torch.uint8)
    scales = tensors["weight_scale"].float().T * (factor / 2)
    return Matrix(values[numbers.int()], scales, None, 8, _group(how, numbers.shape[1]))


def _nvfp4_names(how: StoredQuantization) -> tuple[str, str]:
    return ("weight", "weight_scale_2") if how.method == "modelopt" else ("weight_packed", "weight_global_scale")


def _group(how: StoredQuantization, in_features: int) -> int:
    return how.group_size or in_features


LAYOUTS = {
    "awq": Layout(_awq_tensors, _read_awq),
    "gptq": Layout(_gptq_tensors, _read_gptq),
    "packed": Layout(_packed_tensors, _read_packed),
    "int8": Layout(_int8_tensors, _read_int8),
    "fp8": Layout(_fp8_tensors, _read_fp8),
    "nvfp4": Layout(_nvfp4_tensors, _read_nvfp4),
}
