"""Weights: safetensors (one file or shards), GGUF or random ones into the modules of nanopage.models.

A model says what it wants: every parameter is one or more slots, named as checkpoints name them (`Linear.parts` fuses
q, k and v into one matrix). Each tensor of the checkpoint is copied into its slot, converted and moved on the way, so
at most one tensor exists twice. Missing, unexpected and mis-shaped tensors are named, all of them, in one error.
"""

import ctypes
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from nanopage.config import ModelConfig
from nanopage.gguf_checkpoint import GGUFCheckpoint
from nanopage.layers.linear import Linear
from nanopage.model_files import read_json

DUMMY_STD = 0.02  # the usual initializer_range


def read_config(path: Path) -> ModelConfig:
    """The ModelConfig of a Hugging Face directory or a .gguf file. Raises as ModelConfig.from_directory."""
    if path.suffix == ".gguf":
        return ModelConfig.from_dict(GGUFCheckpoint(path).config())
    return ModelConfig.from_directory(path)


def load_model(
    path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, load_format: str = "auto"
) -> nn.Module:
    """Build the model of `config` and fill it from `path`, or with `dummy_tensors` (`load_format` as in EngineConfig).

    Raises:
        ValueError: missing, unexpected or mis-shaped tensors; a broken file; weights in a format that is not safe.
    """
    model = build_model(config, dtype, device)
    dummy = load_format == "dummy"
    fill(model, dummy_tensors(config, dtype, device) if dummy else checkpoint_tensors(path), str(path))
    if dummy and device.type == "cuda":
        torch.cuda.empty_cache()  # the KV cache is given what is free, and torch still holds what was drawn
    return model.eval().requires_grad_(False)


def build_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model with its parameters allocated, not yet filled."""
    model = meta_model(config)
    if device.type == "cpu" and sys.platform == "linux":
        sizes = [parameter.numel() * dtype.itemsize for parameter in model.parameters()]
        _prepare_heap(sum(sizes) + max(sizes))  # while they are packed one of them exists twice
    materialized: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay tied
    for layer in model.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if parameter not in materialized:
                empty = torch.empty(parameter.shape, dtype=dtype, device=device)
                materialized[parameter] = nn.Parameter(empty, requires_grad=False)
            layer.register_parameter(name, materialized[parameter])
        for name, buffer in layer.named_buffers(recurse=False):
            layer.register_buffer(name, buffer.to(device), persistent=False)
    return model


def meta_model(config: ModelConfig) -> nn.Module:
    """The model on the meta device: names and shapes, nothing allocated."""
    module = importlib.import_module(f"nanopage.models.{config.family}")
    with torch.device("meta"):
        return getattr(module, f"{config.family.capitalize()}ForCausalLM")(config)


def _prepare_heap(num_bytes: int) -> None:
    """Settings of glibc's malloc that make a CPU faster; process-wide, and without effect under another allocator.

    Activations are not given back to the system after every operator: taking them again costs a page fault for every
    4 KiB, a tenth of the time of a prefill. And the next `num_bytes`, which are the weights, come in pages of 2 MiB,
    where the system allows it: they are then streamed faster, a single request's decoding by a seventh.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    m_trim_threshold, m_mmap_threshold, madv_hugepage = -1, -3, 14  # malloc.h, mman.h
    libc.mallopt(m_mmap_threshold, 2**30)
    libc.mallopt(m_trim_threshold, 2**31 - 1)
    # What is taken from the heap, advised and freed without being touched stays there, advice included.
    malloc, free, madvise = libc.malloc, libc.free, libc.madvise
    malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    free.restype, free.argtypes = None, [ctypes.c_void_p]
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    piece, huge_page = 2**29, 2**21
    pieces = [(malloc(size) or 0, size) for size in [piece] * (num_bytes // piece) + [num_bytes % piece + huge_page]]
    for address, size in pieces:  # address 0: there was no memory
        begin, end = -(-address // huge_page) * huge_page, (address + size) // huge_page * huge_page
        if address and begin < end:
            madvise(begin, end - begin, madv_hugepage)
    for address, _ in pieces:
        free(address)


def slots(model: nn.Module) -> dict[str, Tensor]:
    """Checkpoint name -> the part of a parameter that it fills."""
    views: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue  # tied
            seen.add(id(parameter))
            if isinstance(module, Linear):
                parent = path.rpartition(".")[0]
                rows = parameter.data.split(list(module.parts.values()))
                for part, view in zip(module.parts, rows, strict=True):
                    views[f"{parent}.{part}.{kind}" if part else f"{path}.{kind}"] = view
            else:
                views[f"{path}.{kind}"] = parameter.data
    return views


def fill(model: nn.Module, tensors: Iterator[tuple[str, Tensor]], source: str) -> None:
    """Copy `tensors` into the model's slots. Raises ValueError naming every tensor that does not fit."""
    wanted = slots(model)
    if "lm_head.weight" not in wanted:  # tied: the checkpoint may repeat the shared matrix, but not another one
        wanted["lm_head.weight"] = wanted["model.embed_tokens.weight"]
    filled: dict[int, str] = {}  # address of a slot -> the tensor in it
    problems: list[str] = []
    for name, tensor in tensors:
        if name.endswith("rotary_emb.inv_freq"):
            continue  # old Llama checkpoints store it; it is computed from config.json
        slot = wanted.get(name)
        if slot is None:
            problems.append(f"unexpected: {name} {list(tensor.shape)}")
            continue
        first = filled.get(slot.data_ptr())
        filled.setdefault(slot.data_ptr(), name)
        if slot.shape != tensor.shape:
            problems.append(f"mis-shaped: {name} is {list(tensor.shape)}, the model wants {list(slot.shape)}")
        elif not tensor.is_floating_point():
            problems.append(f"not floating point: {name} is {str(tensor.dtype).removeprefix('torch.')}")
        elif first is None:
            slot.copy_(tensor)
        elif not torch.equal(slot, tensor.to(slot)):
            problems.append(
                f"given twice, and different: {name}" if first == name else f"tied, yet different: {first} and {name}"
            )
    problems += [f"missing: {name} {list(s.shape)}" for name, s in wanted.items() if s.data_ptr() not in filled]
    if problems:
        shown = "\n  ".join(problems[:50])
        more = f"\n  and {len(problems) - 50} more" if len(problems) > 50 else ""
        raise ValueError(f"the weights of {source} do not fit its configuration:\n  {shown}{more}")


def dummy_tensors(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every tensor a checkpoint of `config` would have, in `dtype` on `device`, one at a time: random
    matrices, norms of one, biases of zero. The same at every call, on the same kind of device."""
    generator = torch.Generator(device).manual_seed(0)
    for name, slot in slots(meta_model(config)).items():
        tensor = torch.empty(slot.shape, dtype=dtype, device=device)
        if name.endswith("norm.weight"):
            tensor.fill_(1)
        elif name.endswith(".bias"):
            tensor.zero_()
        else:
            tensor.normal_(0, DUMMY_STD, generator=generator)
        yield name, tensor


def checkpoint_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every tensor of a .gguf file or of a directory's safetensors, one at a time.

    Raises: ValueError naming the file that is broken, missing or of a kind that can run code.
    """
    if path.suffix == ".gguf":
        yield from GGUFCheckpoint(path).tensors()
        return
    for file in safetensors_files(path):
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    yield name, tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:  # OSError: a folder of that name
            raise ValueError(f"{file} is not a readable safetensors file (truncated?): {error}") from error


def safetensors_files(directory: Path) -> list[Path]:
    """The weight files of a Hugging Face directory: the index's shards, or model.safetensors."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index} has no weight_map")
        for name in weight_map.values():
            if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
                raise ValueError(f"{index} names a file outside its directory: {name!r}")
        files = [directory / name for name in sorted(set(weight_map.values()))]
        if missing := [file.name for file in files if not file.exists()]:
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
