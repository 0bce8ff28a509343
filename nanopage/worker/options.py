"""Options that do not fit the model or the device, in one table. It is read before anything is loaded.

Whether options are valid by themselves, and fit each other, is checked in config/options.py.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from nanopage.config.model import STORED_QUANTIZATIONS, ModelConfig
from nanopage.config.options import EngineConfig


def refused(
    config: EngineConfig, model_config: ModelConfig, device: torch.device, dtype: torch.dtype, path: Path
) -> Iterator[str]:
    """What does not fit. Args: dtype: of weights and activations. path: of the model."""
    on_gpu, exact, has_experts = device.type == "cuda", dtype == torch.float64, model_config.experts is not None
    has = None if model_config.quantization is None else model_config.quantization.method
    option, tp_size = f"quantization={config.quantization!r}", config.tensor_parallel_size
    if config.quantization in STORED_QUANTIZATIONS and config.quantization != has:
        kind = "are not quantized" if has is None else f"are quantized by {has}"
        yield f"{option}, but the weights of {path} {kind}"
    if has and config.quantize_to:
        yield f"{option}, but the weights of {path} already are ({has})"
    if has and tp_size > 1:
        yield (
            f"tensor_parallel_size={tp_size} does not divide quantized weights, and those of {path} are ({has}): use "
            "pipeline_parallel_size"
        )
    if has and config.load_format == "dummy":
        yield (
            f"load_format='dummy' draws weights that are not quantized, but {path} is ({has}): give a config.json "
            "without quantization_config, and quantization='int4'"
        )
    if not on_gpu and config.quantize_to == "fp8":
        yield "quantization='fp8' works on a GPU only, but this engine runs on a CPU: use 'int8'"
    if not has_experts and config.enable_expert_parallel:
        yield f"enable_expert_parallel=True, but {path} has no experts"
    if has_experts and config.enable_lora:
        yield f"enable_lora does not work with experts, and {path} has some"
    if has_experts and on_gpu and config.quantize_to:
        yield f"{option} on a GPU does not quantize experts, and {path} has some"
    if has_experts and on_gpu and has:
        yield f"{path} has experts quantized by {has}, which do not run on a GPU: use device='cpu'"
    if has_experts and on_gpu and exact:
        yield f"dtype='float64' on a GPU does not work with experts, and {path} has some"
    if not on_gpu and config.kv_cache_dtype != "auto" and not config.enforce_eager:
        option = f"kv_cache_dtype={config.kv_cache_dtype!r}"
        yield f"{option} on a CPU needs enforce_eager=True: compiled layers do not read fp8"
    if on_gpu and config.block_size & (config.block_size - 1):
        yield f"block_size={config.block_size} must be a power of two on a GPU"
    if on_gpu and config.quantize_to and exact:
        yield f"{option} on a GPU does not work in float64"
    if on_gpu and config.enable_lora and exact:
        yield "enable_lora on a GPU does not work in float64"
