"""Quantized matrices in safetensors files: which they are, and how they are read, in integers or as floats.

Each matrix of the model that the files store in the tensors of a layout (layouts.py) is quantized, whatever config.json
calls it; the others are floats. The integers of linear layers stay as they are where a device can multiply by them:
`place` puts them into the model. `dequantized` reads all other quantized matrices, such as those of experts on a GPU.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from io import FileIO
from typing import Any, cast

import torch
from torch import Tensor

from nanopage.checks.stored_quantization import StoredQuantization
from nanopage.device import check_weights_fit
from nanopage.files.safetensors_checkpoint import StoredBytes, StoredTensor, opened, read_whole, stored_bytes
from nanopage.layers.embedding import Embedding
from nanopage.layers.linear import Linear
from nanopage.models.decoder import Decoder
from nanopage.quantization import mxfp4
from nanopage.quantization.layouts import LAYOUTS, SCALES_OF_ACTIVATIONS, WORD
from nanopage.quantization.matrix import Matrix, join

logger = logging.getLogger("nanopage")

# The types that floats may have in a file, and those of other tensors by their types in torch.
FLOATS = ("F64", "F32", "F16", "BF16")
TYPES = {
    torch.float8_e4m3fn: ("F8_E4M3",),
    torch.int64: ("I64", "I32"),
    torch.int32: ("I32",),
    torch.int8: ("I8",),
    torch.uint8: ("U8",),
}
MARKS = ("qweight", "qzeros", "scales", "weight_packed", "weight_scale", "weight_scale_inv")  # of quantized matrices

Stored = Mapping[str, StoredTensor]
"""The tensors of the files by their names in the model."""


def is_quantized(name: str, stored: Stored) -> bool:
    """Whether the files store a matrix, such as "model.layers.0.mlp.up_proj.weight", in another way than as floats."""
    prefix, weight = name.removesuffix("weight"), stored.get(name)
    is_float = weight is None or weight.dtype in FLOATS
    return name.endswith(".weight") and (not is_float or any(f"{prefix}{mark}" in stored for mark in MARKS))


def expected(slots: Mapping[str, Tensor], stored: Stored, how: StoredQuantization) -> dict[str, Tensor]:
    """The `slots` of a model, on the meta device, where quantized matrices are replaced by the tensors that the files
    should have. For GPTQ, this adds biases that a file has but the model does not.

    Raises: ValueError naming a layer whose sizes are not multiples of the group size or of what an int32 holds.
    """
    wanted = dict(slots)
    for name, slot in slots.items():
        if slot.dim() != 2 or not is_quantized(name, stored):
            continue
        prefix, (out_features, in_features) = name.removesuffix("weight"), slot.shape
        _check_sizes(prefix[:-1], out_features, in_features, how)
        del wanted[name]
        tensors = LAYOUTS[how.layout].tensors(how, out_features, in_features) | SCALES_OF_ACTIVATIONS
        if how.layout == "gptq":
            tensors["bias?"] = torch.float32, ((out_features,),)
        for kind, (dtype, shapes) in tensors.items():
            found = stored.get(prefix + _kind(prefix, kind, stored))
            if found is not None or not kind.endswith("?"):
                shape = found.shape if found is not None and found.shape in shapes else shapes[0]
                tensor = torch.empty(shape, dtype=dtype, device="meta")
                wanted.setdefault(prefix + _kind(prefix, kind, stored), tensor)
    return wanted


def _kind(prefix: str, kind: str, stored: Stored) -> str:
    """The name of a tensor in a layout, as the files have it."""
    kinds = kind.removesuffix("?").split("|")
    return next((one for one in kinds if prefix + one in stored), kinds[0])


def _check_sizes(place: str, out_features: int, in_features: int, how: StoredQuantization) -> None:
    if how.layout in ("fp8", "int8"):
        return
    per_word = 2 if how.layout == "nvfp4" else WORD // how.bits
    inputs, outputs = max(how.group_size or 1, per_word), per_word if how.layout in ("awq", "gptq") else 1
    if in_features % inputs or out_features % outputs:
        raise ValueError(
            f"{place} has {in_features} inputs and {out_features} outputs; {how.method} with group_size="
            f"{how.group_size or -1} needs a multiple of {inputs} and one of {outputs}"
        )


class Reader:
    """Reads quantized matrices, one at a time. A context manager: it keeps the files open."""

    def __init__(self, stored: Stored, how: StoredQuantization):
        self.stored, self.how = stored, how
        self._stack = ExitStack()
        self._entries: dict[StoredTensor, tuple[FileIO, StoredBytes]] = {}

    def __enter__(self) -> "Reader":
        for file in {tensor.file for tensor in self.stored.values()}:
            content = self._stack.enter_context(opened(file))
            for entry in stored_bytes(content, file):
                self._entries[entry.tensor] = content, entry
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def read(self, name: str, has_bias: bool) -> Matrix:
        """A matrix, such as "model.layers.0.mlp.up_proj.weight". The headers of the files have been checked.

        Raises: ValueError naming the file and the tensor: scales that are not finite; a g_idx that does not name each
            group `group_size` times, or is out of order without desc_act; a bias other than 0 that the model does not
            have, by `has_bias`; and as `Layout.read`.
        """
        prefix, layout = name.removesuffix("weight"), LAYOUTS[self.how.layout]
        kinds = [_kind(prefix, kind, self.stored) for kind in layout.tensors(self.how, 1, WORD)]
        tensors = {kind: self._read(prefix + kind) for kind in kinds if prefix + kind in self.stored}
        file = self.stored[prefix + kinds[0]].file
        if not has_bias and f"{prefix}bias" in self.stored and self._read(f"{prefix}bias").any():
            raise ValueError(f"{file}: {prefix}bias is not zero, but the model has no bias there")
        for kind, tensor in tensors.items():
            if tensor.is_floating_point() and kind != "weight" and not tensor.float().isfinite().all():
                raise ValueError(f"{file}: {prefix}{kind} has values that are NaN or infinite")
        try:
            return layout.read(tensors, self.how)
        except ValueError as error:
            raise ValueError(f"{file}: {prefix}{error}") from None

    def _read(self, name: str) -> Tensor:
        tensor = self.stored[name]
        if tensor not in self._entries:
            raise ValueError(f"{tensor.file} has changed while it was read")
        return read_whole(*self._entries[tensor])


def place(
    model: Decoder,
    stored: Stored,
    how: StoredQuantization,
    packed: bool,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Put the weights of quantized linear layers into a model on the meta device, one at a time. A weight that tiles
    cannot hold stays as it is, and a line in the log counts such weights.

    Args:
        packed: whether to pack the weights as a GPU reads them. False: in tiles, for a CPU.
        dtype: the dtype of activations.

    Raises: ValueError as `Reader.read`; MemoryError if the integers do not fit on the device.
    """
    modules, found = dict(model.named_modules()), []
    for path, names in names_of_matrices(model).items():
        if isinstance(modules[path], Linear) and all(is_quantized(name, stored) for name in names):
            found.append((cast(Linear, modules[path]), names))
    sizes = [linear.in_features * linear.out_features for linear, _ in found]
    check_weights_fit(sum(sizes) * (8 if how.layout == "nvfp4" else how.bits) // 8, device)
    left = 0
    with Reader(stored, how) as reader:
        for i, (linear, names) in enumerate(found):
            matrix = join([reader.read(name, linear.bias is not None) for name in names])
            weight: Any = None
            if matrix is not None:
                weight = matrix.on_gpu(dtype, device) if packed else matrix.tiled(dtype)
            linear.weight = linear.weight if weight is None else weight
            left += weight is None
            if on_progress is not None:
                on_progress(sum(sizes[: i + 1]), sum(sizes))
    if left:
        logger.info(f"{left} of {len(found)} matrices of {how.method} become floats: their groups do not fit")


def names_of_matrices(model: Decoder) -> dict[str, list[str]]:
    """Place of a linear layer or embedding in the model -> the names of the file's tensors that form its rows."""
    names: dict[str, list[str]] = {}
    for place, module in model.named_modules():
        path = place if place == "lm_head" else f"model.{place}"  # as transformers names them
        if isinstance(module, Linear):
            parent = path.rpartition(".")[0]
            names[place] = [f"{parent}.{part}.weight" if part else f"{path}.weight" for part in module.parts]
        elif isinstance(module, Embedding):
            names[place] = [f"{path}.weight"]
    if model.lm_head.weight is model.embed_tokens.weight:
        names["lm_head"] = names.pop("embed_tokens")
    return names


def dequantized(
    slots: Mapping[str, Tensor], stored: Stored, how: StoredQuantization
) -> Iterator[tuple[str, int, Tensor]]:
    """The quantized matrices among the `slots` of a model, float32, as pieces (see loader.py)."""
    if how.method == "mxfp4":
        yield from mxfp4.dequantized([*stored.values()], slots)
        return
    with Reader(stored, how) as reader:
        for name in slots:
            if is_quantized(name, stored):
                yield name, 0, reader.read(name, name.removesuffix("weight") + "bias" in slots).dequantized()
