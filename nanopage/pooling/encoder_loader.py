"""Weights of an encoder, from safetensors. The checks are those of loader.py."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from nanopage.files.model_files import memory_errors
from nanopage.files.safetensors_checkpoint import read_tensors
from nanopage.pooling.encoder import Encoder, slots
from nanopage.pooling.encoder_config import EncoderConfig, find_encoder
from nanopage.weights.allocation import materialize
from nanopage.weights.loader import check_fit, fill, stored_tensors_of


def load_encoder(
    path: Path,
    config: EncoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Callable[[int, int], None] | None = None,
) -> Encoder:
    """Build an encoder and fill it from a directory. Raises: as `loader.load_model`."""
    family = find_encoder(config.architecture)
    if family is None:
        raise ValueError(f"architecture {config.architecture!r} is not supported")
    with torch.device("meta"):
        model = Encoder(config)
    wanted = slots(model, family.HEAD_PLACES)
    # A model with a head has a prefix before the names of all other weights.
    named = {tensor: tensor.name.removeprefix(family.PREFIX) for tensor in stored_tensors_of(path)}
    used = {tensor: name for tensor, name in named.items() if name in wanted or name not in family.UNUSED}
    if len(set(used.values())) < len(used):
        raise ValueError(f"{path} has tensors with the same name, with and without {family.PREFIX!r}")
    check_fit(wanted, [replace(tensor, name=name) for tensor, name in used.items()], path)
    with memory_errors(path):
        materialize(model, dtype, device)
    names = {tensor.name: name for tensor, name in used.items()}
    files = {name: tensor.file for tensor, name in used.items()}
    pieces = ((names[name], start, piece) for name, start, piece in read_tensors(used))
    fill(model, slots(model, family.HEAD_PLACES), pieces, files, on_progress)
    return model.eval().requires_grad_(False)
