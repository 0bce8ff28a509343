"""The safetensors files of a Hugging Face directory: which they are, what their headers say, and their tensors.

The safetensors library checks that a header fits its file: sizes and offsets, no overlap, no gap.
"""

import json
import math
import os
import re
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, BinaryIO

from safetensors import safe_open

from nanopage.config import MAX_MATRICES, MAX_SIZES
from nanopage.model_files import check_file, exists, read_json, rust_errors, shown

if TYPE_CHECKING:
    from torch import Tensor

MAX_HEADER = 2**25  # bytes; 150 for each tensor is usual, and parsing takes several times as much memory

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1}  # others are not checked

FUSED_EXPERTS = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a file says about one of its tensors."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as the file calls it
    file: Path


def stored_tensors(files: list[Path]) -> list[StoredTensor]:
    """The tensors of all files, by their headers. Raises: ValueError naming the file."""
    tensors = []
    for file in files:
        with opened(file, "numpy") as content:
            for name in content.keys():  # noqa: SIM118 (not a dict)
                view = content.get_slice(name)
                for part, _, shape in parts_of(name, tuple(view.get_shape())):
                    tensors.append(StoredTensor(part, shape, view.get_dtype(), file))
                if len(tensors) > MAX_MATRICES:
                    break
        if len(tensors) > MAX_MATRICES:
            raise ValueError(f"{file} has more than {MAX_MATRICES:,} tensors, each expert's counted")
    return tensors


def read_tensors(
    files: list[Path],
    names: Container[str] | None = None,
    slices: Mapping[str, tuple[slice, ...]] = MappingProxyType({}),
) -> Iterator[tuple[str, int, "Tensor"]]:
    """(name, 0, tensor) of the tensors of these names, or of all, one at a time, in the form of GGUFCheckpoint.pieces.
    Of tensors in `slices`, only these are read.

    Raises: ValueError naming the file.
    """
    for file in files:
        with opened(file) as content:
            for stored in content.keys():  # noqa: SIM118 (not a dict)
                view = content.get_slice(stored)
                for name, place, shape in parts_of(stored, tuple(view.get_shape())):
                    if names is not None and name not in names:
                        continue
                    if stored == name:
                        yield name, 0, view[slices[name]] if name in slices else content.get_tensor(name)
                        continue
                    expert, first = place
                    rows, columns = slices.get(name, (slice(0, shape[0]), slice(0, shape[1])))
                    yield name, 0, view[expert, first + rows.start : first + rows.stop, columns]


def parts_of(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, int], tuple[int, ...]]]:
    """What a stored tensor consists of: itself, or the matrices of each expert, which transformers 5 may have fused:
    gate_up_proj [experts, 2 * intermediate_size, hidden_size] and down_proj [experts, hidden_size, intermediate_size].

    Returns: for each part its name, its place, that is, the expert and the first row, and its shape.
    """
    match = FUSED_EXPERTS.fullmatch(name)
    if match is None or len(shape) != 3 or shape[0] > MAX_SIZES["num_experts"]:
        return [(name, (0, 0), shape)]
    kinds = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
    num_rows = shape[1] // len(kinds)
    if num_rows * len(kinds) != shape[1]:
        return [(name, (0, 0), shape)]
    return [
        (f"{match[1]}.{expert}.{kind}.weight", (expert, index * num_rows), (num_rows, shape[2]))
        for expert in range(shape[0])
        for index, kind in enumerate(kinds)
    ]


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """A tensor of a file, and where its bytes are: from `begin` to `end`."""

    tensor: StoredTensor
    begin: int
    end: int


def stored_bytes(content: BinaryIO, file: Path) -> list[StoredBytes]:
    """The tensors of an open file, by its header. Unlike `stored_tensors`, this maps nothing into memory: where another
    process shortens a mapped file, reading it kills this process.

    Raises: ValueError naming the file.
    """
    size, count = os.fstat(content.fileno()).st_size, int.from_bytes(content.read(8), "little")
    if count > MAX_HEADER:
        raise ValueError(f"{file} is not a readable safetensors file (truncated?): its header has {count:,} bytes")
    tensors, position = [], 0
    try:
        fields = json.loads(content.read(count))
        fields.pop("__metadata__", None)
        for name, entry in sorted(fields.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = entry["data_offsets"]
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)) or end < begin:
                raise ValueError(f"{name[:200]}: its sizes are not valid")
            if begin != position or (dtype in DTYPE_BYTES and end - begin != math.prod(shape) * DTYPE_BYTES[dtype]):
                raise ValueError(f"{name[:200]}: its place does not fit")
            tensors.append(StoredBytes(StoredTensor(name, shape, str(dtype), file), 8 + count + begin, 8 + count + end))
            position = end
        if 8 + count + position != size:
            raise ValueError(f"it has {size:,} bytes, and its header says {8 + count + position:,}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is not a readable safetensors file (truncated?): {str(error)[:300]}") from None
    return tensors


@contextmanager
def opened(file: Path, framework: str = "pt"):
    """An open file, as the safetensors library reads it. Raises: ValueError naming the file.

    Args: framework: of the tensors. With "numpy", headers are read without torch.
    """
    check_file(file)
    with rust_errors(f"{file} is not a readable safetensors file (truncated?)"):
        with open(file, "rb") as head:
            header_bytes = int.from_bytes(head.read(8), "little")
        if header_bytes > MAX_HEADER:
            raise ValueError(f"its header has {header_bytes:,} bytes")
        with safe_open(file, framework=framework, device="cpu") as content:
            yield content


def safetensors_files(directory: Path) -> list[Path]:
    """The weight files of a Hugging Face directory: the index's shards, model.safetensors, or the only
    .safetensors file.

    Raises: FileNotFoundError, ValueError; both name the file or the directory.
    """
    index = directory / "model.safetensors.index.json"
    if exists(index):
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index} has no weight_map")
        for name in weight_map.values():
            if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
                raise ValueError(f"{index} names {shown(name)}, which is not the plain name of a file")
        files = [directory / name for name in sorted(set(weight_map.values()))]
        if missing := [file.name for file in files if not exists(file)]:
            raise ValueError(f"{index} names shards that are not there: {', '.join(missing)}")
        return files
    files = sorted(directory.glob("*.safetensors"))
    if (directory / "model.safetensors") in files:
        return [directory / "model.safetensors"]
    if len(files) == 1:
        return files
    if files:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{directory} has several safetensors files and no index to tell which to load: {names}")
    unsafe = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in directory.glob(pattern))
    if unsafe:
        raise ValueError(
            f"{directory} has only pickled weights ({', '.join(unsafe)}), which can run code when loaded: "
            "convert them to safetensors"
        )
    raise ValueError(f"{directory} has no .safetensors weights")
