"""The safetensors files of a Hugging Face directory: which they are, what their headers say, and their tensors.

Files are read, not mapped: where another process shortens a mapped file, reading it kills this process. Tensors come in
pieces of some megabytes in one buffer, which costs less than the page faults of a mapping. The headers are parsed here
and not trusted: tensors must follow each other without gap or overlap, and end where the file ends.
"""

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from nanopage.files.model_files import check_file, exists, is_plain_name, memory_errors, parse_json, read_json, shown

if TYPE_CHECKING:
    from torch import Tensor

MAX_HEADER = 2**25  # bytes; 150 for each tensor is usual, and parsing takes several times as much memory
MAX_DIMENSIONS = 8  # of a tensor; multiplying 400,000 sizes takes seconds
MAX_SIZE = 2**63 - 1  # of a dimension, and of an offset
MAX_MATRICES = 2**20  # of a checkpoint, each expert's counted: a small file must not become many objects
MAX_FUSED_EXPERTS = 2**12  # in a tensor
PIECE_BYTES = 2**22  # read at once: few enough for a core's cache
# Types by their names in files: the name in torch, and the bytes of a number. Other types are never read.
DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
}

FUSED_EXPERTS = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)(_bias)?")
GRANITE = {"moe.input_linear.weight": "moe.experts.gate_up_proj", "moe.output_linear.weight": "moe.experts.down_proj"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a file says about one of its tensors."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as the file calls it
    file: Path


def stored_tensors(files: list[Path]) -> list[StoredTensor]:
    """The tensors of all files, by their headers. Raises: ValueError naming the file."""
    tensors: list[StoredTensor] = []
    for file in files:
        with opened(file) as content:
            for entry in stored_bytes(content, file):
                for name, _, shape in parts_of(entry.tensor):
                    tensors.append(StoredTensor(name, shape, entry.tensor.dtype, file))
                if len(tensors) > MAX_MATRICES:
                    raise ValueError(f"{file} has more than {MAX_MATRICES:,} tensors, each expert's counted")
    return tensors


def read_tensors(
    stored: Iterable[StoredTensor], slices: Mapping[str, tuple[slice, ...]] = MappingProxyType({})
) -> Iterator[tuple[str, int, "Tensor"]]:
    """(name, first row, rows) of tensors that `stored_tensors` has found, in pieces of at most 4 MiB, or of one row if
    that is more. Each piece overwrites the previous one. Of a tensor in `slices`, only the slice is yielded, and rows
    count from its beginning.

    Raises: ValueError naming the file, also if it has changed since.
    """
    by_file: dict[Path, dict[str, StoredTensor]] = {}
    for tensor in stored:
        by_file.setdefault(tensor.file, {})[tensor.name] = tensor
    buffer = memoryview(bytearray(PIECE_BYTES))
    for file, wanted in by_file.items():
        with opened(file) as content:
            for entry in stored_bytes(content, file):
                for name, first, shape in parts_of(entry.tensor):
                    if name not in wanted:
                        continue
                    if wanted.pop(name) != StoredTensor(name, shape, entry.tensor.dtype, file):
                        raise _changed(file)
                    row_bytes = math.prod(shape[1:]) * DTYPES[entry.tensor.dtype][1]
                    if row_bytes > len(buffer):
                        with memory_errors(f"{file}: {shown(name)}"):
                            buffer = memoryview(bytearray(row_bytes))
                    rows, *others = slices.get(name, (slice(0, shape[0] if shape else 1),))
                    step = len(buffer) // row_bytes if row_bytes else rows.stop
                    for start in range(rows.start, rows.stop, step):
                        count = min(step, rows.stop - start)
                        piece = buffer[: count * row_bytes]
                        read_into(piece, content, entry.begin + (first + start) * row_bytes, file)
                        values = as_tensor(piece, entry.tensor.dtype, (count, *shape[1:]) if shape else ())
                        yield name, start - rows.start, values[:, *others] if others else values
        if wanted:
            raise _changed(file)


def read_into(buffer: memoryview | bytearray, content: FileIO, begin: int, file: Path) -> None:
    """Fill `buffer` with the bytes of an open file from `begin` on. Raises: ValueError naming the file."""
    content.seek(begin)
    if content.readinto(buffer) != len(buffer):
        raise _changed(file)


def read_whole(content: FileIO, entry: "StoredBytes") -> "Tensor":
    """A tensor of an open file. Raises: ValueError naming the file."""
    with memory_errors(f"{entry.tensor.file}: {shown(entry.tensor.name)}"):
        buffer = bytearray(entry.end - entry.begin)
    read_into(buffer, content, entry.begin, entry.tensor.file)
    return as_tensor(buffer, entry.tensor.dtype, entry.tensor.shape)


def as_tensor(data: memoryview | bytearray, dtype: str, shape: tuple[int, ...]) -> "Tensor":
    """Stored bytes as a tensor that shares their memory. Args: dtype: a key of DTYPES."""
    import torch  # reading headers does not need it

    of_type = getattr(torch, DTYPES[dtype][0])
    return torch.frombuffer(data, dtype=of_type).view(shape) if len(data) else torch.empty(shape, dtype=of_type)


def parts_of(stored: StoredTensor) -> list[tuple[str, int, tuple[int, ...]]]:
    """What a stored tensor consists of: itself, or the matrices of each expert, which transformers 5 may have fused:
    gate_up_proj [experts, 2 * intermediate_size, hidden_size] and down_proj [experts, hidden_size, intermediate_size].
    GPT-OSS also has their biases, which lack the last dimension. Its matrices are transposed, but divided all the same.
    Granite has other names for them.

    Returns: for each part its name, how many rows of all experts are before it, and its shape.
    """
    place, _, last = stored.name.rpartition("_sparse_")
    name = f"{place}_sparse_{GRANITE[last]}" if last in GRANITE else stored.name
    shape, match = stored.shape, FUSED_EXPERTS.fullmatch(name)
    if match is None or len(shape) != (2 if match[3] else 3) or shape[0] > MAX_FUSED_EXPERTS:
        return [(stored.name, 0, shape)]
    kind = "bias" if match[3] else "weight"
    parts = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" and not match[3] else (match[2],)
    num_rows = shape[1] // len(parts)
    if num_rows * len(parts) != shape[1]:
        return [(stored.name, 0, shape)]
    return [
        (f"{match[1]}.{expert}.{part}.{kind}", expert * shape[1] + index * num_rows, (num_rows, *shape[2:]))
        for expert in range(shape[0])
        for index, part in enumerate(parts)
    ]


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """A tensor of a file, and where its bytes are: from `begin` to `end`."""

    tensor: StoredTensor
    begin: int
    end: int


def stored_bytes(content: FileIO, file: Path) -> list[StoredBytes]:
    """The tensors of an open file in the order of their bytes, by its header. Raises: ValueError naming the file."""
    size, count = os.fstat(content.fileno()).st_size, int.from_bytes(content.read(8), "little")
    tensors, position = [], 0
    try:
        if count > MAX_HEADER:
            raise ValueError(f"its header has {count:,} bytes")
        fields = parse_json(content.read(count).decode("utf-8"))
        fields.pop("__metadata__", None)
        for name, entry in sorted(fields.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = entry["data_offsets"]
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            if len(shape) > MAX_DIMENSIONS:
                raise ValueError(f"{shown(name)} has {len(shape):,} dimensions; supported: at most {MAX_DIMENSIONS}")
            if not all(type(number) is int and 0 <= number <= MAX_SIZE for number in (begin, end, *shape)):
                raise ValueError(f"the sizes of {shown(name)} are not valid")
            if not isinstance(dtype, str) or not re.fullmatch(r"\w{1,16}", dtype, re.ASCII):
                raise ValueError(f"{shown(name)} is of the unknown type {shown(dtype)}")
            if begin != position or end < begin:
                raise ValueError(f"the place of {shown(name)} is not valid")
            if dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype][1]:
                raise ValueError(f"the bytes of {shown(name)} are not those of its shape")
            tensors.append(StoredBytes(StoredTensor(name, shape, dtype, file), 8 + count + begin, 8 + count + end))
            position = end
        if 8 + count + position != size:
            raise ValueError(f"it has {size:,} bytes, and its header says {8 + count + position:,}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is not a readable safetensors file (truncated?): {str(error)[:300]}") from None
    return tensors


@contextmanager
def opened(file: Path) -> Iterator[FileIO]:
    """A file that stays as it is while it is open. Raises: ValueError naming the file."""
    check_file(file)
    try:
        with memory_errors(file), open(file, "rb", buffering=0) as content:
            before = os.fstat(content.fileno())
            yield content
            after = os.fstat(content.fileno())
    except OSError as error:
        raise ValueError(f"{file} is not a readable safetensors file: {error.strerror}") from None
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise _changed(file)


def _changed(file: Path) -> ValueError:
    return ValueError(f"{file} has changed while it was read")


def safetensors_files(directory: Path) -> list[Path]:
    """The weight files of a Hugging Face directory: the index's shards, model.safetensors, or the only
    .safetensors file. Or a single file, which is given in place of a directory.

    Raises: FileNotFoundError, ValueError; both name the file or the directory.
    """
    if directory.suffix == ".safetensors" and directory.is_file():
        return [directory]
    index = directory / "model.safetensors.index.json"
    if exists(index):
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index} has no weight_map")
        for name in weight_map.values():
            if not is_plain_name(name):
                raise ValueError(f"{index} names {shown(name)}, which is not the plain name of a file")
        files = [directory / name for name in sorted(set(weight_map.values()))]
        if missing := [file.name for file in files if not exists(file)]:
            raise ValueError(f"{index} names shards that are not there: {', '.join(missing):.500}")
        return files
    files = sorted(directory.glob("*.safetensors"))
    if (directory / "model.safetensors") in files:
        return [directory / "model.safetensors"]
    if len(files) == 1:
        return files
    if files:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{directory} has several safetensors files ({names:.100}): it needs {index.name}")
    unsafe = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in directory.glob(pattern))
    if unsafe:
        raise ValueError(
            f"{directory} has only pickled weights ({', '.join(unsafe)}), which can run code when loaded: "
            "convert them to safetensors"
        )
    gguf = sorted(file.name for file in directory.glob("*.gguf"))
    raise ValueError(f"{directory} has no .safetensors weights" + (f": give the file {gguf[0]} in it" if gguf else ""))
