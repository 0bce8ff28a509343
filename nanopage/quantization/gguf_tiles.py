"""Repacks the matrices of a GGUF file into tiles (cpu/tile_linear.py) without changing their integers.

The first start of a model writes the tiles to a safetensors file in the cache, `$XDG_CACHE_HOME/nanopage/tiles` or
`~/.cache/nanopage/tiles`. Later starts map that file, which takes milliseconds, and several processes share its memory.
Matrices without integers of 4 or 8 bits, such as those of Q2_K or F16, become bfloat16.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from torch import Tensor

import nanopage
from nanopage.cpu import tile_linear
from nanopage.cpu.packed_linear import TILE
from nanopage.cpu.tile_linear import Blocks
from nanopage.cpu.tiled import TiledWeight
from nanopage.device import check_weights_fit
from nanopage.files.private_files import check_private, private_cache
from nanopage.layers.embedding import Embedding
from nanopage.layers.linear import Linear, replace_weights
from nanopage.layers.weight import Floats, Weight
from nanopage.models.decoder import Decoder
from nanopage.quantization import gguf_blocks, quantized_weights
from nanopage.quantization.gguf_checkpoint import GGUFCheckpoint
from nanopage.quantization.quantized import QuantizedWeight
from nanopage.quantization.quantized_checkpoint import names_of_matrices

logger = logging.getLogger("nanopage")

ROWS = 32 * TILE  # rows repacked at once: few enough that temporary tensors are small
HEADER_BYTES = 256  # the most bytes of a tensor in the header
DTYPES = {torch.uint8: "U8", torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
SUFFIX, PARTIAL = ".safetensors", ".partial"


def is_quantized(checkpoint: GGUFCheckpoint) -> bool:
    """Whether the file has a matrix with integers of 4 or 8 bits."""
    return any(tensor.kind in gguf_blocks.KINDS and len(tensor.shape) == 2 for tensor in checkpoint.weights.values())


def place(
    model: Decoder,
    whole: Decoder,
    checkpoint: GGUFCheckpoint,
    packed: bool,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Put the weights of the file into a model on the meta device, with their integers.

    Args: packed: whether to pack the weights as a GPU reads them. False: in tiles, for a CPU. The others: as in `pack`
        and `tile`.
    Raises: as `pack` and `tile`.
    """
    if packed:
        pack(model, checkpoint, dtype, device, on_progress)
    else:
        tile(model, whole, checkpoint, dtype, on_progress)


def tile(
    model: Decoder,
    whole: Decoder,
    checkpoint: GGUFCheckpoint,
    dtype: torch.dtype,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Put the weights of all linear layers and embeddings into a model on the meta device, in tiles.

    Args:
        whole: the whole model. `model` may have only some of its layers; the file in the cache has all.
        dtype: the dtype of activations.
        on_progress: as in `load_model`.

    Raises:
        ValueError: a tensor has values that are not finite. The message names the file and the tensor.
        MemoryError: there is less free memory than the tiles take.
        OSError: there is no place for the repacked weights.
    """
    matrices = names_of_matrices(whole)
    tensors = _read_or_make(checkpoint, matrices, on_progress)
    places = {module: place for place, module in model.named_modules()}

    def tiled(layer: Linear | Embedding) -> TiledWeight:
        tiles, scales = (tensors[f"{places[layer]}.{kind}"] for kind in ("tiles", "scales"))
        out_features, in_features = layer.weight.matrix.shape
        return TiledWeight(out_features, in_features, tiles, scales, dtype)

    replace_weights(model, tiled)
    if isinstance(model.embed_tokens.weight, Floats):  # not tied
        model.embed_tokens.weight = tiled(model.embed_tokens)


def pack(
    model: Decoder,
    checkpoint: GGUFCheckpoint,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Put the weights of linear layers into a model on the meta device, one at a time, and the embedding's weight if it
    is tied to one of them. Weights without integers of 4 or 8 bits stay as they are.

    Raises: ValueError as `tile`; MemoryError if there is less free memory than the blocks take.
    """
    matrices = names_of_matrices(model)
    places = {module: place for place, module in model.named_modules()}
    sizes = [checkpoint.weights[name].num_bytes for names in matrices.values() for name in names]
    check_weights_fit(sum(sizes), device)
    done = 0

    def replace(linear: Linear) -> Weight:
        nonlocal done
        names = matrices[places[linear]]
        if not has_blocks(checkpoint, names):
            return linear.weight
        parts = []
        for blocks in blocks_of(checkpoint, names):
            parts.append(quantized_weights.from_blocks(blocks).to(device))
            for values in (parts[-1].scales, parts[-1].offsets):
                if values is not None:
                    _check_finite(checkpoint, names, values)
        done += sum(checkpoint.weights[name].num_bytes for name in names)
        if on_progress is not None:
            on_progress(done, sum(sizes))
        return QuantizedWeight(quantized_weights.join(parts), dtype)

    replace_weights(model, replace)
    if on_progress is not None:
        on_progress(sum(sizes), sum(sizes))


def _read_or_make(
    checkpoint: GGUFCheckpoint, matrices: dict[str, list[str]], on_progress: Callable[[int, int], None] | None
) -> dict[str, Tensor]:
    try:
        file = private_cache("tiles") / _file_name(checkpoint)
        with FileLock(file.with_suffix(".lock"), mode=0o600):  # another process may repack the same
            if file.exists():
                check_private(file)
                try:
                    return _read(file)
                except SafetensorError as error:
                    logger.warning(f"{file} is damaged, and will be made again: {error}")
            _remove_older(file)
            _write(file, checkpoint, matrices, on_progress)
        return _read(file)
    except OSError as error:
        logger.warning(f"the repacked weights of {checkpoint.path} cannot be kept: {error}")
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "tiles" + SUFFIX)
        _write(file, checkpoint, matrices, on_progress)
        return _read(file)  # it stays mapped


def _read(file: Path) -> dict[str, Tensor]:
    check_weights_fit(file.stat().st_size, torch.device("cpu"))
    with safe_open(file, framework="pt", device="cpu") as content:
        return {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 (not a dict)


def _write(
    file: Path,
    checkpoint: GGUFCheckpoint,
    matrices: dict[str, list[str]],
    on_progress: Callable[[int, int], None] | None,
) -> None:
    """Write a safetensors file, one matrix after another, so that only one of them is in memory."""
    sizes = {place: sum(prod(checkpoint.weights[name].shape) for name in names) for place, names in matrices.items()}
    header: dict[str, dict[str, Any]] = {}
    header_bytes = -(-2 * len(matrices) * HEADER_BYTES // 4096) * 4096 - 8  # so that tensors begin at multiples of 64
    descriptor, partial = tempfile.mkstemp(dir=file.parent, prefix=file.stem, suffix=PARTIAL)
    done = begin = 0
    try:
        with open(descriptor, "wb") as output:
            output.seek(8 + header_bytes)
            for place, names in matrices.items():
                tiles, scales = zip(*tiles_of(checkpoint, names), strict=True)
                for kind, parts in (("tiles", tiles), ("scales", scales)):
                    shape = [sum(map(len, parts)), *parts[0].shape[1:]]
                    end = begin + sum(part.nbytes for part in parts)
                    entry = {"dtype": DTYPES[parts[0].dtype], "shape": shape, "data_offsets": [begin, end]}
                    header[f"{place}.{kind}"] = entry
                    for part in parts:
                        output.write(part.view(torch.uint8).numpy())
                    begin = end
                done += sizes[place]
                if on_progress is not None:
                    on_progress(done, sum(sizes.values()))
            output.seek(0)
            output.write(header_bytes.to_bytes(8, "little") + json.dumps(header).encode().ljust(header_bytes))
            output.flush()
            os.fsync(output.fileno())
        os.replace(partial, file)
    finally:
        Path(partial).unlink(missing_ok=True)


def tiles_of(checkpoint: GGUFCheckpoint, names: list[str]) -> Iterator[tuple[Tensor, Tensor]]:
    """Tiles and scales of a matrix that joins the rows of several tensors, ROWS rows at a time, or all at once.

    Raises: ValueError naming the file and a tensor with values that are not finite.
    """
    if not has_blocks(checkpoint, names):
        pieces = [torch.from_numpy(piece) for name in names for _, _, piece in checkpoint.pieces([name])]
        tiles, scales = tile_linear.tile(torch.cat(pieces), torch.bfloat16)
        _check_finite(checkpoint, names, tiles)
        yield tiles, scales
        return
    for blocks in blocks_of(checkpoint, names):
        tiles, scales = tile_linear.tile_blocks(blocks)
        _check_finite(checkpoint, names, scales)
        yield tiles, scales


def has_blocks(checkpoint: GGUFCheckpoint, names: list[str]) -> bool:
    """Whether tensors have integers of 4 or 8 bits."""
    return all(checkpoint.weights[name].kind in gguf_blocks.KINDS for name in names)


def blocks_of(checkpoint: GGUFCheckpoint, names: list[str]) -> Iterator[Blocks]:
    """A matrix that joins the rows of several tensors, ROWS rows at a time. All blocks have one format."""
    kinds = [checkpoint.weights[name].kind for name in names]
    rows = [torch.from_numpy(checkpoint.stored_rows(name)) for name in names]
    formats = [gguf_blocks.split_blocks(kind, data[:1]) for kind, data in zip(kinds, rows, strict=True)]
    num_rows = sum(map(len, rows))
    for begin in range(0, num_rows, ROWS):
        end, first, parts = min(begin + ROWS, num_rows), 0, []
        for kind, data, a_row in zip(kinds, rows, formats, strict=True):
            part = data[max(begin - first, 0) : max(end - first, 0)]
            # Include an empty part of every tensor, so that all tiles of the matrix have one format.
            parts.append(gguf_blocks.split_blocks(kind, part) if len(part) else a_row.without_rows())
            first += len(data)
        yield gguf_blocks.with_one_format(parts)


def _check_finite(checkpoint: GGUFCheckpoint, names: list[str], values: Tensor) -> None:
    if not values.isfinite().all():
        raise ValueError(f"{checkpoint.path}: {' or '.join(names)} has values that are NaN, infinite or too large")


def _file_name(checkpoint: GGUFCheckpoint) -> str:
    """A name that begins with a digest of the path, and changes with the .gguf file and with the code that repacks."""
    status = checkpoint.path.stat()
    state = hashlib.sha256(repr((status.st_size, status.st_mtime_ns, version("gguf"))).encode())
    package, family = Path(nanopage.__file__).parent, checkpoint.family.__file__
    sources = [*package.glob("quantization/gguf_*.py"), *package.glob("cpu/*.py"), package / "models" / "decoder.py"]
    for source in [*sorted(sources), Path(family or "")]:
        state.update(source.read_bytes())
    path = hashlib.sha256(os.fsencode(checkpoint.path.resolve())).hexdigest()
    return f"{path[:16]}-{state.hexdigest()[:16]}{SUFFIX}"


def _remove_older(file: Path) -> None:
    """Remove the files made from earlier versions of the same .gguf file, and files of processes that were killed."""
    for old in file.parent.glob(f"{file.name.split('-')[0]}-*"):
        if old.suffix in (SUFFIX, PARTIAL) and old != file:
            old.unlink(missing_ok=True)
