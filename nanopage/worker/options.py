"""Options that do not fit the model or the device, in one table. A worker reads it before it loads anything.

Whether options are valid by themselves, and fit each other, is checked in config/options.py.
"""

from pathlib import Path

import torch

from nanopage.config.model import STORED_QUANTIZATIONS, ModelConfig
from nanopage.config.options import EngineConfig


def check_options(
    config: EngineConfig, model_config: ModelConfig, device: torch.device, dtype: torch.dtype, path: Path
) -> None:
    """Raises: ValueError naming the first option that does not fit.

    Args:
        dtype: of weights and activations.
        path: of the model, for messages.
    """
    on_gpu, exact = device.type == "cuda", dtype == torch.float64
    has = None if model_config.quantization is None else model_config.quantization.method
    has_experts, tp_size, block_size = model_config.experts is not None, config.tensor_parallel_size, config.block_size
    option = f"quantization={config.quantization!r}"
    kind = "are not quantized" if has is None else f"are quantized by {has}"
    refused = (
        (
            config.quantization in STORED_QUANTIZATIONS and config.quantization != has,
            f"{option}, but the weights of {path} {kind}",
        ),
        (has and config.quantize_to, f"{option}, but the weights of {path} already are ({has})"),
        (
            has and tp_size > 1,
            f"tensor_parallel_size={tp_size} does not divide quantized weights, and those of {path} are ({has}): use "
            "pipeline_parallel_size",
        ),
        (
            has and config.load_format == "dummy",
            f"load_format='dummy' draws weights that are not quantized, but {path} is ({has}): give a config.json "
            "without quantization_config, and quantization='int4'",
        ),
        (
            not on_gpu and config.quantize_to == "fp8",
            "quantization='fp8' works on a GPU only, but this engine runs on a CPU: use 'int8'",
        ),
        (
            not has_experts and config.enable_expert_parallel,
            f"enable_expert_parallel=True, but {path} has no experts",
        ),
        (has_experts and config.enable_lora, f"enable_lora does not work with experts, and {path} has some"),
        (
            has_experts and on_gpu and config.quantize_to,
            f"{option} on a GPU does not quantize experts, and {path} has some",
        ),
        (
            has_experts and on_gpu and has,
            f"{path} has experts quantized by {has}, which do not run on a GPU: use device='cpu'",
        ),
        (
            has_experts and on_gpu and exact,
            f"dtype='float64' on a GPU does not work with experts, and {path} has some",
        ),
        (
            not on_gpu and config.kv_cache_dtype != "auto" and not config.enforce_eager,
            f"kv_cache_dtype={config.kv_cache_dtype!r} on a CPU needs enforce_eager=True: compiled layers do not read "
            "fp8",
        ),
        (on_gpu and block_size & (block_size - 1), f"block_size={block_size} must be a power of two on a GPU"),
        (on_gpu and config.quantize_to and exact, f"{option} on a GPU does not work in float64"),
        (on_gpu and config.enable_lora and exact, "enable_lora on a GPU does not work in float64"),
    )
    for applies, message in refused:
        if applies:
            raise ValueError(message)
