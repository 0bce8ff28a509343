"""Weights as a user gives them, as files that any worker can read."""

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from nanopage.files.model_files import shown

Weights = str | Path | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
FILE_BYTES = 2**30  # of a file, unless a tensor is larger


@contextlib.contextmanager
def as_files(weights: Weights) -> Iterator[Path]:
    """A directory or a file with these weights. Tensors are written to a temporary directory, where TMPDIR says.

    Raises:
        FileNotFoundError: neither a directory nor a .safetensors file.
        TypeError, ValueError: no pairs (name, tensor), or a name that is there twice.
        OSError: the files could not be written.
    """
    if isinstance(weights, str | Path):
        path = Path(weights).expanduser()
        if not (path.is_dir() or (path.suffix == ".safetensors" and path.is_file())):
            raise FileNotFoundError(f"no weights at {path}: give a directory or a .safetensors file")
        yield path.absolute()
        return
    if not isinstance(weights, Iterable):
        raise TypeError(f"weights must be a path or pairs (name, tensor), not {shown(weights)}")
    with tempfile.TemporaryDirectory(prefix="nanopage-") as directory:
        _write(weights.items() if isinstance(weights, Mapping) else weights, Path(directory))
        yield Path(directory)


def _write(pairs: Iterable[tuple[str, Tensor]], directory: Path) -> None:
    """Write tensors as files of at most FILE_BYTES or one tensor, with their index."""
    files: dict[str, str] = {}  # name -> the file that has it
    held: dict[str, Tensor] = {}  # of the next file
    size = number = 0
    for pair in pairs:
        name, tensor = _checked(pair)
        if name in files:
            raise ValueError(f"weights: {shown(name)} is there twice")
        if held and size + tensor.nbytes > FILE_BYTES:
            _save(held, directory / f"{number}.safetensors")
            held, size, number = {}, 0, number + 1
        files[name] = f"{number}.safetensors"
        # A copy: tied tensors share memory, which files cannot.
        held[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        size += tensor.nbytes
    if not held:
        raise ValueError("weights: there are none")
    _save(held, directory / f"{number}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def _checked(pair: object) -> tuple[str, Tensor]:
    """Raises: TypeError for what is no pair (name, tensor)."""
    if not (isinstance(pair, tuple | list) and len(pair) == 2):
        raise TypeError(f"weights must be pairs (name, tensor), not {shown(pair)}")
    name, tensor = pair
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise TypeError(f"weights must be pairs (name, tensor), not ({shown(name)}, {type(tensor).__name__})")
    return name, tensor


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    try:
        save_file(tensors, file)
    except SafetensorError as error:
        raise OSError(f"the weights could not be written to {file.parent}: {error}") from None
