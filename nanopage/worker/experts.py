"""Which options do not work with mixtures of experts (layers/moe.py)."""

from pathlib import Path

import torch

from nanopage.config.model import ModelConfig
from nanopage.config.options import EngineConfig


def check_experts(config: EngineConfig, model_config: ModelConfig, device: torch.device, path: Path) -> None:
    """Raises: ValueError naming an option that does not work with this model's experts, or needs some.

    Args: path: of the model, for messages.
    """
    if model_config.experts is None:
        if config.enable_expert_parallel:
            raise ValueError(f"enable_expert_parallel=True, but {path} has no experts")
        return
    if config.enable_lora:
        raise ValueError(f"enable_lora does not work with experts, and {path} has some")
    if device.type == "cpu":
        return
    if config.quantize_to is not None:
        raise ValueError(
            f"quantization={config.quantization!r} on a GPU does not quantize experts, and {path} has some"
        )
    if model_config.quantization is not None:
        method = model_config.quantization.method
        raise ValueError(f"{path} has experts quantized by {method}, which do not run on a GPU: use device='cpu'")
    if (model_config.dtype if config.dtype == "auto" else config.dtype) == "float64":
        raise ValueError(f"dtype='float64' on a GPU does not work with experts, and {path} has some")
