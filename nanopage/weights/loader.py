"""Loads weights into the modules of nanopage.models: safetensors (one file or shards), GGUF, or random ones.

Every parameter of a model has one or more slots, named as checkpoints name them (`Linear.parts` fuses q, k and v into
one matrix). The headers of the files are compared with the slots before anything is allocated: one error names the
missing, unexpected and mis-shaped tensors, up to 50. Then each tensor is copied into its slot, which converts and moves
it. The scales of K and V (see state/pages.py) are numbers, not parameters.
Tensors of a .gguf file come in pieces, so that none of them ever exists twice. The matrices of a quantized checkpoint
become floats, or their integers are placed as they are before the rest is allocated.
"""

import hashlib
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from nanopage.config.model import ModelConfig
from nanopage.distributed.part import WHOLE, Part, Slice
from nanopage.experts.moe import GroupedExperts, group_experts
from nanopage.files.model_files import memory_errors, shown
from nanopage.files.safetensors_checkpoint import StoredTensor, read_tensors, safetensors_files, stored_tensors
from nanopage.layers.weight import Floats, own_parameters
from nanopage.models.decoder import Decoder
from nanopage.models.meta import family_of, meta_model
from nanopage.quantization import mxfp4, quantized_checkpoint
from nanopage.quantization.quantized_checkpoint import FLOATS, TYPES
from nanopage.reading.config import config_from_directory
from nanopage.weights.allocation import all_finite, materialize

if TYPE_CHECKING:
    from nanopage.quantization.gguf_checkpoint import GGUFCheckpoint

logger = logging.getLogger("nanopage")
SAMPLES, SAMPLE_BYTES = 64, 2**16  # of a file, for its fingerprint
DUMMY_STD = 0.02  # the usual initializer_range
# The scales of K and V of a layer, as compressed-tensors, vLLM and ModelOpt name them.
KV_SCALE = re.compile(r"model\.layers\.(\d{1,4})\.self_attn\.(?:attn\.|k_proj\.(?=k)|v_proj\.(?=v))?([kv])_scale")

Checkpoint: TypeAlias = "Path | GGUFCheckpoint"
"""A directory, or an open .gguf file. `read_config` and `load_model` also take the path of a .gguf file."""
Pieces = Iterable[tuple[str, int, Tensor]]
"""Rows of tensors: (the tensor's name in transformers, the first row, the rows)."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the metadata of a .gguf file, once for its config, tokenizer and weights. A directory is returned as it is.

    Raises: as GGUFCheckpoint.
    """
    if path.suffix != ".gguf":
        return path
    from nanopage.quantization.gguf_checkpoint import GGUFCheckpoint  # imports gguf, which takes long

    return GGUFCheckpoint(path)


def path_of(checkpoint: Checkpoint) -> Path:
    """The directory, or the path of the .gguf file."""
    return checkpoint if isinstance(checkpoint, Path) else checkpoint.path


def read_config(checkpoint: Checkpoint, overrides: dict | None = None) -> ModelConfig:
    """Raises: as config_from_directory and GGUFCheckpoint. Args: overrides: as in config_from_dict."""
    checkpoint = open_checkpoint(checkpoint) if isinstance(checkpoint, Path) else checkpoint
    if not isinstance(checkpoint, Path):
        return checkpoint.model_config(overrides)
    return config_from_directory(checkpoint, overrides)


@dataclass(frozen=True)
class Loading:
    """How a model is loaded.

    load_format: as in EngineConfig.
    keep_integers: keep the matrices of a quantized checkpoint in its own integers: in "tiles" for a CPU, if tiles can
        hold them, or "packed" for a GPU. None: floats.
    on_host: leave the weights on the CPU, from where they are moved to the device later.
    part: what is built. Only its slices of the tensors are read.
    group: fuse the weights of experts, as a GPU needs them (see experts/moe.py).
    """

    load_format: str = "auto"
    keep_integers: str | None = None
    on_host: bool = False
    part: Part = WHOLE
    group: bool = False


def load_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    how: Loading = Loading(),
    on_progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """Build the model of `config`, or a part of it, and fill it from `checkpoint`, or with `dummy_tensors`.

    Args: on_progress: called while weights load, with the number of weights read so far and the total.

    Raises:
        ValueError: missing, unexpected or mis-shaped tensors; a value that is not finite; a broken file; weights in a
            format that is not safe.
        MemoryError: the device has too little memory for the weights; nothing has been allocated then.
        OSError: there is no place for the repacked weights of a .gguf file.
    """
    checkpoint = open_checkpoint(checkpoint) if isinstance(checkpoint, Path) else checkpoint
    whole = meta_model(config)
    model = whole if how.part == WHOLE and not how.group else how.part.model(config)
    if how.group:
        group_experts(model)
    slices = _slices(model, whole, how.part)
    names = {} if how.load_format == "dummy" else _check(checkpoint, whole, config)
    stored = {name: tensor for tensor, name in names.items()}
    with memory_errors(path_of(checkpoint)):
        if how.keep_integers is not None:
            packed = how.keep_integers == "packed"
            if config.quantization is not None:
                quantized_checkpoint.place(model, stored, config.quantization, packed, dtype, device, on_progress)
            elif not isinstance(checkpoint, Path):
                from nanopage.quantization import gguf_tiles  # imports gguf, which takes long

                gguf_tiles.place(model, whole, checkpoint, packed, dtype, device, on_progress)
            on_progress = None  # the rest is small
        how.part.strip(model, config.tie_word_embeddings)
        if how.load_format == "dummy":
            pieces = _sliced(((name, 0, tensor) for name, tensor in dummy_tensors(config, dtype, device)), slices)
        else:
            pieces = _read(checkpoint, names, _wanted(model), slices)
        if config.quantization is not None and how.load_format != "dummy":
            floats = quantized_checkpoint.dequantized(_wanted(model), stored, config.quantization)
            pieces = chain(pieces, _sliced(floats, slices))
        materialize(model, dtype, torch.device("cpu") if how.on_host else device, for_use=not how.on_host)
        files = {name: tensor.file for name, tensor in stored.items()}
        fill(model, _wanted(model), pieces, files, on_progress)
    if how.load_format == "dummy" and device.type == "cuda":
        torch.cuda.empty_cache()  # the KV cache gets the free memory, and torch still caches the memory of the draws
    return model.eval().requires_grad_(False)


def _check(checkpoint: Checkpoint, whole: Decoder, config: ModelConfig) -> dict[StoredTensor, str]:
    """The tensors of a checkpoint, each with its name in a model with a language-model head. Raises: as `check_fit`."""
    names = {tensor: tensor.name for tensor in stored_tensors_of(checkpoint)}
    if config.pooling is not None and not config.is_encoder:
        # Without a language-model head, names lack the prefix "model.". A head for text that is not used is left out.
        for tensor, name in names.items():
            names[tensor] = name if name.startswith(("model.", "lm_head.", "score.")) else f"model.{name}"
        if config.pooling.answers is None:
            names = {tensor: name for tensor, name in names.items() if name != "lm_head.weight"}
    if (rename := getattr(family_of(config), "rename", None)) is not None:
        renamed = {tensor: new for tensor, name in names.items() if (new := rename(name, config)) is not None}
        if unused := [tensor.name for tensor in names if tensor not in renamed]:
            logger.info(f"{path_of(checkpoint)}: {len(unused)} tensors are not used, such as {shown(unused[0])}")
        names = renamed
    if len({*names.values()}) < len(names):
        raise ValueError(f"{path_of(checkpoint)} has tensors with the same name, with and without a prefix")
    wanted, stored = slots(whole), [replace(tensor, name=name) for tensor, name in names.items()]
    if config.quantization is not None and config.quantization.method == "mxfp4":
        stored = mxfp4.as_floats(stored)
    elif config.quantization is not None:
        wanted = quantized_checkpoint.expected(wanted, {tensor.name: tensor for tensor in stored}, config.quantization)
    check_fit(wanted, stored, path_of(checkpoint))
    return names


def _read(
    checkpoint: Checkpoint, names: dict[StoredTensor, str], wanted: dict[str, Tensor], slices: Mapping[str, Slice]
) -> Pieces:
    """The tensors of a checkpoint that have a slot, and the scales of K and V, under the names of the model."""
    used = {
        tensor.name: name
        for tensor, name in names.items()
        if tensor.dtype in FLOATS and (name in wanted or KV_SCALE.fullmatch(name))
    }
    slices = {tensor.name: slices[name] for tensor, name in names.items() if name in slices}
    for name, start, rows in pieces_of(checkpoint, [tensor for tensor in names if tensor.name in used], slices):
        yield used[name], start, rows


def fingerprint(checkpoint: Checkpoint, load_format: str = "auto") -> str:
    """A digest of a model's files by which workers notice that theirs differ: names, sizes and samples of the contents.

    Args: load_format: with "dummy", config.json alone counts.
    """
    if not isinstance(checkpoint, Path):
        files = [checkpoint.path]
    else:
        files = [checkpoint / "config.json", *(safetensors_files(checkpoint) if load_format != "dummy" else [])]
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with open(file, "rb") as content:
            for sample in range(SAMPLES):
                content.seek(sample * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
                digest.update(content.read(SAMPLE_BYTES))
    return digest.hexdigest()


def slots(model: Decoder) -> dict[str, Tensor]:
    """Checkpoint name -> the part of a parameter that it fills."""
    views: dict[str, Tensor] = {}
    seen: set[int] = set()
    for place, module in model.named_modules():
        plain = place in ("lm_head", "score") or not isinstance(model, Decoder)
        path = place if plain else f"model.{place}"  # as transformers names them
        if isinstance(module, GroupedExperts):
            views |= {f"{path}.{name}": view for name, view in module.slots()}
            continue
        for kind, parameter in own_parameters(module).items():
            if id(parameter) in seen:
                continue  # tied
            seen.add(id(parameter))
            if hasattr(module, "slots"):
                parent = path.rpartition(".")[0]
                for part, view in module.slots(parameter.data).items():
                    views[f"{parent}.{part}.{kind}" if part else f"{path}.{kind}"] = view
            else:
                views[f"{path}.{kind}"] = parameter.data
    return views


def stored_tensors_of(checkpoint: Checkpoint) -> list[StoredTensor]:
    """The tensors as the files' headers describe them.

    Raises: FileNotFoundError; ValueError naming a file that is broken or of a kind that can run code, or a tensor that
        two files have.
    """
    if not isinstance(checkpoint, Path):
        weights = checkpoint.weights.items()
        return [StoredTensor(name, tensor.shape, "F32", checkpoint.path) for name, tensor in weights]
    # Old Llama checkpoints store the rotary table. It is computed from config.json.
    found = stored_tensors(safetensors_files(checkpoint))
    stored = [tensor for tensor in found if not tensor.name.endswith("rotary_emb.inv_freq")]
    first: dict[str, Path] = {}
    for tensor in stored:
        if first.setdefault(tensor.name, tensor.file) != tensor.file:
            names = f"{first[tensor.name].name} and {tensor.file.name}"
            raise ValueError(f"{checkpoint} has the tensor {shown(tensor.name)} in two files: {names}")
    return stored


def pieces_of(
    checkpoint: Checkpoint, stored: list[StoredTensor], slices: Mapping[str, Slice] = MappingProxyType({})
) -> Pieces:
    """The pieces of these tensors. Of a tensor in `slices`, only the slice."""
    if isinstance(checkpoint, Path):
        return read_tensors(stored, slices)
    pieces = checkpoint.pieces(tensor.name for tensor in stored)
    return _sliced(((name, start, torch.from_numpy(piece)) for name, start, piece in pieces), slices)


def _slices(model: Decoder, whole: Decoder, part: Part) -> dict[str, Slice]:
    """Which slice of each divided tensor a part of a model has."""
    shapes = {name: tuple(slot.shape) for name, slot in _wanted(whole).items()}
    mine = {name: tuple(slot.shape) for name, slot in _wanted(model).items()}
    return {name: part.slice_of(shape, shapes[name]) for name, shape in mine.items() if shape != shapes[name]}


def _sliced(pieces: Pieces, slices: Mapping[str, Slice]) -> Pieces:
    """Cut pieces of tensors in `slices` down to the slice. Other tensors stay whole."""
    for name, start, rows in pieces:
        if name not in slices:
            yield name, start, rows
            continue
        first, *others = slices[name]
        begin, end = max(first.start, start), min(first.stop, start + len(rows))
        if begin < end:
            yield name, begin - first.start, rows[begin - start : end - start][:, *others]


def check_fit(wanted: dict[str, Tensor], stored: list[StoredTensor], source: Path) -> None:
    """Compare a checkpoint's tensors with a model's slots. Raises: ValueError naming the tensors that do not fit, up to
    50."""
    wanted, found, problems = _with_tied_head(wanted), set(), []
    known = _with_other_names(wanted)
    for tensor in stored:
        slot = known.get(tensor.name)
        if KV_SCALE.fullmatch(tensor.name) and math.prod(tensor.shape) == 1 and tensor.dtype in FLOATS:
            continue
        if slot is None:
            problems.append(f"unexpected: {shown(tensor.name)[1:-1]} {list(tensor.shape)}")
            continue
        found.add(id(slot))
        if tensor.shape != slot.shape:
            shapes = f"is {list(tensor.shape)}, the model wants {list(slot.shape)}"
            problems.append(f"mis-shaped: {tensor.name} {shapes}")
        elif tensor.dtype not in (types := TYPES.get(slot.dtype, FLOATS)):
            problems.append(f"type not supported: {tensor.name} is {tensor.dtype}; supported: {', '.join(types)}")
    problems += [f"missing: {name} {list(slot.shape)}" for name, slot in wanted.items() if id(slot) not in found]
    if problems:
        text = "\n  ".join(problems[:50])
        more = f"\n  and {len(problems) - 50} more" if len(problems) > 50 else ""
        raise ValueError(f"the weights of {source} do not fit its configuration:\n  {text}{more}")


def fill(
    model: nn.Module,
    wanted: dict[str, Tensor],
    pieces: Pieces,
    files: Mapping[str, Path],
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Copy pieces of tensors into the model's slots, `wanted`. `check_fit` has compared their shapes.

    Args: files: where each tensor is from.

    Raises: ValueError naming the file and the tensor, for a value that is not finite, for tied matrices that differ,
        and for a scale of K or V that is not above 0 or belongs to no layer.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    filled: dict[int, str] = {}  # address of a slot -> the tensor in it
    done = 0
    for name, start, piece in pieces:
        slot = wanted.get(name)
        if slot is None:
            if match := KV_SCALE.fullmatch(name):
                set_kv_scale(cast(Decoder, model), int(match[1]), match[2], float(piece), f"{files[name]}: {name}")
            continue
        rows = slot[start : start + len(piece)]
        first = filled.setdefault(slot.data_ptr(), name)
        if first != name:
            if not torch.equal(rows, piece.to(rows)):
                raise ValueError(f"{files[name]}: tied, yet different: {first} and {name}")
            continue
        rows.copy_(piece)
        if not all_finite(rows):
            dtype = str(rows.dtype).removeprefix("torch.")
            raise ValueError(f"{files.get(name)}: {name} has values that are NaN or infinite in {dtype}")
        done += rows.numel()
        if on_progress is not None:
            on_progress(done, total)


def _wanted(model: Decoder) -> dict[str, Tensor]:
    """The slots of a model by all names that a checkpoint may have for them. A head of integers has no slot."""
    found = _with_other_names(slots(model))
    has_slot = model.lm_head is not None and isinstance(model.lm_head.weight, Floats)
    return _with_tied_head(found) if has_slot else found


def set_kv_scale(model: Decoder, layer: int, kind: str, scale: float, name: str) -> None:
    """Set the scale of a layer's K or V ("k" or "v"), also in the layers that share them. Raises: ValueError whose
    message begins with `name`."""
    if layer >= len(model.layers):
        raise ValueError(f"{name} belongs to no layer: the model has {len(model.layers)}")
    if not 0 < scale < math.inf:
        raise ValueError(f"{name} is {scale}: a scale must be finite and above 0")
    for index, each in enumerate(model.layers):
        part: Any = getattr(each, "self_attn", None)  # None: another stage has the layer
        if part is not None and getattr(part, "source", index) == layer:
            k_scale, v_scale = part.scoring.kv_scales
            part.scoring = replace(part.scoring, kv_scales=(scale, v_scale) if kind == "k" else (k_scale, scale))


def _with_tied_head(wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint of a model with a tied head may name the shared matrix by either name, or by both."""
    if "lm_head.weight" in wanted or "model.embed_tokens.weight" not in wanted:  # not tied
        return wanted
    return wanted | {"lm_head.weight": wanted["model.embed_tokens.weight"]}


def _with_other_names(wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """Mixtral's own checkpoints have names of their own for experts. Checkpoints that transformers 5 fused have the
    usual names."""
    others = {}
    for name, slot in wanted.items():
        if ".block_sparse_moe." in name:
            other = name.replace(".block_sparse_moe.", ".mlp.")
            for theirs, usual in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
                other = other.replace(f".{theirs}.", f".{usual}.")
            others[other] = slot
    return wanted | others


def dummy_tensors(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every tensor a checkpoint of `config` would have, in `dtype` on `device`, one at a time: random
    matrices, norms of one, biases of zero. The same at every call, on the same kind of device."""
    generator = torch.Generator(device).manual_seed(0)
    for name, slot in slots(meta_model(config)).items():
        tensor = torch.empty(slot.shape, dtype=dtype, device=device)
        if name.lower().endswith("norm.weight"):
            tensor.fill_(1 - (config.norm_offset or 0))
        elif name.endswith(".bias"):
            tensor.zero_()
        else:
            tensor.normal_(0, DUMMY_STD, generator=generator)
        yield name, tensor
