"""The safetensors files of a Hugging Face directory: which they are, what their headers say, and their tensors.

The safetensors library checks that a header fits its file: sizes and offsets, no overlap, no gap.
"""

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from safetensors import safe_open
from torch import Tensor

from nanopage.model_files import check_file, exists, read_json, rust_errors, shown

MAX_HEADER = 2**25  # bytes; 150 for each tensor is usual, and parsing takes several times as much memory


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
        with opened(file) as content:
            for name in content.keys():  # noqa: SIM118 (not a dict)
                view = content.get_slice(name)
                tensors.append(StoredTensor(name, tuple(view.get_shape()), view.get_dtype(), file))
    return tensors


def read_tensors(
    files: list[Path],
    names: Container[str] | None = None,
    slices: Mapping[str, tuple[slice, ...]] = MappingProxyType({}),
) -> Iterator[tuple[str, int, Tensor]]:
    """(name, 0, tensor) of the tensors of these names, or of all, one at a time, in the form of GGUFCheckpoint.pieces.
    Of tensors in `slices`, only these are read.

    Raises: ValueError naming the file.
    """
    for file in files:
        with opened(file) as content:
            for name in content.keys():  # noqa: SIM118 (not a dict)
                if names is None or name in names:
                    whole = name not in slices
                    yield name, 0, content.get_tensor(name) if whole else content.get_slice(name)[slices[name]]


@contextmanager
def opened(file: Path):
    """An open file, as the safetensors library reads it. Raises: ValueError naming the file."""
    check_file(file)
    with rust_errors(f"{file} is not a readable safetensors file (truncated?)"):
        with open(file, "rb") as head:
            header_bytes = int.from_bytes(head.read(8), "little")
        if header_bytes > MAX_HEADER:
            raise ValueError(f"its header has {header_bytes:,} bytes")
        with safe_open(file, framework="pt", device="cpu") as content:
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
