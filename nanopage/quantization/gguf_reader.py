"""The metadata and the table of tensors of a GGUF file, versions 2 and 3, read without trusting the file.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every length and count is compared with the
number of remaining bytes before anything is read, so reading takes at most a few times the memory of the metadata.
Tensors do not overlap, so the weights of a model are never much larger than its file.
"""

import struct
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from nanopage.files.model_files import check_file, memory_errors, shown

MAX_METADATA = 2**27  # bytes before the weights. A vocabulary of 200,000 tokens with its merges takes about 2**24
MAX_FIELDS = 2**16
MAX_TENSORS = 2**16  # 1,024 layers of 64 tensors
MAX_DIMENSIONS = 4  # ggml's GGML_MAX_DIMS

NUMBERS: dict[GGUFValueType, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
    GGUFValueType.BOOL: np.dtype("<u1"),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The place, the type and the shape of a tensor's data in the file."""

    name: str
    shape: tuple[int, ...]  # rows first, as in torch; the file has the reverse order
    kind: GGMLQuantizationType
    offset: int  # of the data, in bytes from the start of the file
    num_bytes: int


@dataclass(frozen=True)
class Header:
    """The part of a GGUF file before the weights.

    fields: key -> a number, a bool, a string, a list of strings, or a numpy array of numbers or bools.
    tensors: by name, in the file's order. Their data is within the file and does not overlap.
    state: the file's `state_of` before it was read.
    """

    fields: dict[str, Any]
    tensors: dict[str, TensorInfo]
    state: tuple[int, ...]


def read_header(path: Path) -> Header:
    """Read everything but the weights.

    Raises: FileNotFoundError; ValueError naming the file and, where there is one, the field or the tensor.
    """
    check_file(path)
    try:
        with memory_errors(path), open(path, "rb") as file:
            return _Reader(file, state_of(path)).header()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except _Malformed as error:
        raise ValueError(f"{path} is not a readable GGUF file: {error}") from None


def state_of(path: Path) -> tuple[int, ...]:
    """What changes when a file is written or replaced: its size, the time of its last change, and its inode."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def read_rows(path: Path, tensor: TensorInfo, start: int, stop: int, state: tuple[int, ...]) -> np.ndarray:
    """The stored bytes of rows `start` to `stop` of a tensor's last dimension: uint8 [stop - start, bytes of a row].
    The rows are read, not mapped: if another process shortened a mapped file, reading it would kill this process.

    Args: state: the header's. Raises: ValueError if the file has changed since.
    """
    row_bytes = tensor.num_bytes // prod(tensor.shape[:-1])
    count = (stop - start) * row_bytes
    try:
        with memory_errors(f"{path}: {shown(tensor.name)}"):
            data = np.fromfile(path, np.uint8, count, offset=tensor.offset + start * row_bytes)
        changed = state_of(path) != state
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if changed or len(data) < count:
        raise ValueError(f"{path} has changed while it was read, at tensor {shown(tensor.name)}")
    return data.reshape(stop - start, row_bytes)


class _Malformed(Exception):
    """What is wrong with the file. `read_header` adds its name."""


class _Reader:
    """Reads the header from its beginning to its end. `place` says what is being read, for error messages."""

    def __init__(self, file: BinaryIO, state: tuple[int, ...]):
        self.file, self.state = file, state
        self.size = state[0]
        self.position = 0
        self.place = "the header"

    def header(self) -> Header:
        magic = self.take(4)
        if magic != b"GGUF":
            raise _Malformed(f"it begins with {magic!r}, not with b'GGUF'")
        version = self.integer("<I")
        if version and version & 0xFFFF == 0:
            raise _Malformed("it is big-endian: gguf-convert-endian makes it little-endian")
        if version not in (2, 3):
            raise _Malformed(f"its version is {version}; supported: 2 and 3; convert the model again")
        num_tensors, num_fields = self.integer("<Q"), self.integer("<Q")
        self.check_count(num_fields, 13, MAX_FIELDS, "fields")
        self.check_count(num_tensors, 33, MAX_TENSORS, "tensors")
        fields = self.fields(num_fields)
        table = [self.tensor() for _ in range(num_tensors)]
        return Header(fields, self.placed(table, fields.get("general.alignment", 32)), self.state)

    def fields(self, count: int) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for number in range(count):
            self.place = f"the key of field {number}"
            key = self.string()
            self.place = f"field {shown(key)}"
            if key in fields:
                raise _Malformed(f"{self.place} occurs twice")
            fields[key] = self.value(self.value_type())
        return fields

    def value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind != GGUFValueType.ARRAY:
            return self.numbers(kind, 1)[0].item()
        kind, count = self.value_type(), self.integer("<Q")
        if kind == GGUFValueType.STRING:
            return self.strings(count)
        if kind == GGUFValueType.ARRAY:
            raise _Malformed(f"{self.place} is an array of arrays, which is not supported")
        return self.numbers(kind, count)

    def value_type(self) -> GGUFValueType:
        number = self.integer("<I")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise _Malformed(f"{self.place} is of the unknown type {number}") from None

    def numbers(self, kind: GGUFValueType, count: int) -> np.ndarray:
        dtype = NUMBERS[kind]
        values = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        if kind != GGUFValueType.BOOL:
            return values
        if count and values.max() > 1:
            raise _Malformed(f"{self.place} is a bool of value {values.max()}")
        return values.astype(bool)

    def strings(self, count: int) -> list[str]:
        self.check_count(count, 8, MAX_METADATA, f"strings in {self.place}")
        return [self.string() for _ in range(count)]

    def string(self) -> str:
        (length,) = struct.unpack("<Q", self.take(8))
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise _Malformed(f"{self.place} is not valid UTF-8: {error.reason}") from None

    def integer(self, form: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        if count > self.size - self.position:
            raise _Malformed(f"it ends within {self.place} (truncated?)")
        if count > MAX_METADATA - self.position:
            raise _Malformed(f"{self.place} ends beyond {MAX_METADATA >> 20} MiB, the most that is read before weights")
        data = self.file.read(count)
        if len(data) < count:
            raise _Malformed(f"{self.place} was changed while it was read")
        self.position += count
        return data

    def check_count(self, count: int, least: int, most: int, what: str) -> None:
        """Check that `count` things of at least `least` bytes each fit into the rest of the file."""
        if count * least > self.size - self.position:
            raise _Malformed(f"it is too short for {count:,} {what} (truncated?)")
        if count > most:
            raise _Malformed(f"it has {count:,} {what}, more than {most:,}")

    def tensor(self) -> TensorInfo:
        """The next entry of the table. Its offset is from the beginning of the data."""
        self.place = "the table of tensors"
        name = self.string()
        self.place = f"tensor {shown(name)}"
        num_dimensions = self.integer("<I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise _Malformed(f"{self.place} has {num_dimensions} dimensions; supported: 1 to {MAX_DIMENSIONS}")
        shape = tuple(self.integer("<Q") for _ in range(num_dimensions))[::-1]
        number, offset = self.integer("<I"), self.integer("<Q")
        if not all(shape):
            raise _Malformed(f"{self.place} has the shape {list(shape)}")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise _Malformed(f"{self.place} is of the unknown type {number}: a newer gguf may have it") from None
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block_size:
            raise _Malformed(f"{self.place} has rows of {shape[-1]}, not a multiple of {kind.name}'s {block_size}")
        return TensorInfo(name, shape, kind, offset, prod(shape) // block_size * block_bytes)

    def placed(self, table: list[TensorInfo], alignment: Any) -> dict[str, TensorInfo]:
        """The tensors by name, with offsets from the file's start. Checks that they are inside and do not overlap."""
        if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment < 1 or alignment.bit_count() > 1:
            raise _Malformed(f"general.alignment must be a power of two, got {shown(alignment)}")
        start = -(-self.position // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for entry in table:
            place = f"tensor {shown(entry.name)}"
            if entry.name in tensors:
                raise _Malformed(f"{place} occurs twice")
            if entry.offset % alignment:
                raise _Malformed(f"{place} begins at {entry.offset}, not a multiple of general.alignment={alignment}")
            if start + entry.offset + entry.num_bytes > self.size:
                raise _Malformed(f"{place} of {entry.num_bytes:,} bytes ends beyond the file (truncated?)")
            tensors[entry.name] = replace(entry, offset=start + entry.offset)
        for first, second in pairwise(sorted(tensors.values(), key=lambda tensor: tensor.offset)):
            if first.offset + first.num_bytes > second.offset:
                raise _Malformed(f"the tensors {shown(first.name)} and {shown(second.name)} overlap")
        return tensors
