"""The weights of LoRA adapters, from PEFT's safetensors into the slots of a model."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanopage.config import ModelConfig
from nanopage.lora import read_adapter
from nanopage.models.adapted import PLACES, AdaptedDecoder
from nanopage.step import AdapterLoad
from nanopage.weights.safetensors_checkpoint import StoredTensor, stored_bytes

logger = logging.getLogger("nanopage")


DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _read(file: Path) -> Iterator[tuple[StoredTensor, Tensor]]:
    """The tensors of an adapter's file, read into memory one at a time. Raises: ValueError, OSError."""
    with open(file, "rb") as content:
        for stored in stored_bytes(content, file):
            content.seek(stored.begin)
            data = bytearray(content.read(stored.end - stored.begin))
            if len(data) != stored.end - stored.begin or stored.tensor.dtype not in DTYPES:
                raise ValueError(f"{file} has changed while it was read")
            yield stored.tensor, torch.frombuffer(data, dtype=DTYPES[stored.tensor.dtype]).view(stored.tensor.shape)


class AdapterLoader:
    """Loads adapters into the slots of a model.

    Args: max_rank: the rank of the slots.
    """

    def __init__(self, model: AdaptedDecoder, model_config: ModelConfig, max_rank: int):
        self.model, self.model_config, self.max_rank = model, model_config, max_rank

    def load(self, loads: list[AdapterLoad]) -> dict[int, str]:
        """Load adapters.

        The engine has checked their files. If one has changed since and cannot be loaded, its slot is filled with NaN:
        steps that have been submitted with it already yield no tokens.

        Returns: why adapters could not be loaded, by their indexes in `loads`.
        """
        failed = {}
        for index, load in enumerate(loads):
            try:
                self._load(load.slot, Path(load.path))
            except (ValueError, OSError) as error:
                logger.error(f"the adapter {load.path} could not be loaded, so its requests fail: {error}")
                self._clear(load.slot, torch.nan)
                failed[index] = str(error)
        return failed

    def _load(self, slot: int, path: Path) -> None:
        adapter = read_adapter(path, self.model_config, self.max_rank)
        self._clear(slot)
        names = {tensor.name: place for place, tensor in adapter.tensors.items()}
        halves: dict[tuple[int, str], Tensor] = {}  # A or B, until the other one has been read
        for stored, tensor in _read(adapter.file):
            if names.get(stored.name) is None or stored != adapter.tensors[names[stored.name]]:
                raise ValueError(f"{adapter.file} has changed while it was read")
            layer, module, kind = names[stored.name]
            if (layer, module) not in halves:
                halves[layer, module] = tensor
                continue
            other = halves.pop((layer, module))
            a, b = (tensor, other) if kind == "A" else (other, tensor)
            # Scaled in at least float32, before it is rounded to the dtype of the slots.
            scaled = b.to(torch.promote_types(b.dtype, torch.float32)) * adapter.scale
            self._fill(slot, layer, module, a, scaled)

    def _fill(self, slot: int, layer: int, module: str, a: Tensor, b: Tensor) -> None:
        parent, _, part = module.partition(".")
        owner: Any = getattr(self.model.layers[layer], parent)
        if part in ("q_proj", "k_proj", "v_proj"):
            owner.qkv_proj.fill(slot, part, a, b)
        elif part in ("gate_proj", "up_proj"):
            owner.gate_up_proj.fill(slot, part, a, b)
        else:
            getattr(owner, part).fill(slot, "", a, b)

    def _clear(self, slot: int, value: float = 0.0) -> None:
        for layer in self.model.layers:
            for place in PLACES:
                linear: Any = layer.get_submodule(place)
                linear.clear(slot, value)
