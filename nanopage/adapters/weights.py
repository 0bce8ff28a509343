"""The weights of LoRA adapters, from PEFT's safetensors into the slots of a model."""

import logging
from pathlib import Path

import torch
from torch import Tensor

from nanopage.adapters.files import GATE_UP, read_adapter
from nanopage.adapters.model import AdaptedDecoder
from nanopage.config.model import ModelConfig
from nanopage.files.safetensors_checkpoint import opened, read_whole, stored_bytes
from nanopage.step import AdapterLoad

logger = logging.getLogger("nanopage")


class AdapterLoader:
    """Loads adapters into the slots of a model.

    Args: max_rank: the rank of the slots.
    """

    def __init__(self, model: AdaptedDecoder, model_config: ModelConfig, max_rank: int):
        self.model, self.model_config, self.max_rank = model, model_config, max_rank

    def load(self, loads: list[AdapterLoad]) -> dict[int, str]:
        """Load adapters.

        The engine has checked their files. If a file has changed since and cannot be loaded, the adapter's slot is
        filled with NaN: steps that have already been submitted with the adapter then yield no tokens.

        Returns: index in `loads` -> why this adapter could not be loaded.
        """
        failed = {}
        for index, load in enumerate(loads):
            try:
                self._load(load.slot, Path(load.path))
            except (ValueError, OSError) as error:
                logger.error(f"the adapter {load.path} could not be loaded, so its requests fail: {error}")
                self.model.clear(load.slot, torch.nan)
                failed[index] = str(error)
        return failed

    def _load(self, slot: int, path: Path) -> None:
        adapter = read_adapter(path, self.model_config, self.max_rank)
        self.model.clear(slot)
        names = {tensor.name: place for place, tensor in adapter.tensors.items()}
        halves: dict[tuple[int, str], Tensor] = {}  # holds A or B until the other one has been read
        with opened(adapter.file) as content:
            for entry in stored_bytes(content, adapter.file):
                place = names.get(entry.tensor.name)
                if place is None or entry.tensor != adapter.tensors[place]:
                    raise ValueError(f"{adapter.file} has changed while it was read")
                layer, module, kind = place
                tensor = read_whole(content, entry)
                if (layer, module) not in halves:
                    halves[layer, module] = tensor
                    continue
                other = halves.pop((layer, module))
                a, b = (tensor, other) if kind == "A" else (other, tensor)
                # Scale B in at least float32, before rounding it to the dtype of the slots.
                scale = adapter.gate_up_scale if module == GATE_UP else adapter.scale
                self.model.fill(slot, layer, module, a, b.to(torch.promote_types(b.dtype, torch.float32)) * scale)
