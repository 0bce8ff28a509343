"""Options that do not fit the model or the device, in one table. It is read before anything is loaded.

config/options.py checks each option by itself, and lists those that exclude each other. build.py checks what must be
known before other processes start: the length of the context, and the options of embeddings and scores.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from nanopage.checks.speculation import HEADS
from nanopage.checks.stored_quantization import STORED_QUANTIZATIONS
from nanopage.config.model import ModelConfig
from nanopage.config.options import EngineConfig


def refused(
    config: EngineConfig, model_config: ModelConfig, device: torch.device, dtype: torch.dtype, path: Path
) -> Iterator[str]:
    """What does not fit. Args: dtype: of weights and activations. path: of the model."""
    yield from _refused_by_model(config, model_config, path)
    on_gpu, exact, has_experts = device.type == "cuda", dtype == torch.float64, model_config.experts is not None
    option, cache = f"quantization={config.quantization!r}", f"kv_cache_dtype={config.kv_cache_dtype!r}"
    if not on_gpu and config.quantize_to == "fp8":
        yield "quantization='fp8' works on a GPU only, but this engine runs on a CPU: use 'int8'"
    if on_gpu and model_config.latent is not None:
        yield f"{path} has latent attention, which does not run on a GPU yet: use device='cpu'"
    if "buckets" in model_config.mixer and on_gpu:  # of T5
        yield f"{path} has attention with a bias for each distance, which does not run on a GPU yet: use device='cpu'"
    if "buckets" in model_config.mixer and dtype == torch.float16:
        yield f"dtype='float16' does not work with {path}, whose hidden states exceed its range: use 'bfloat16'"
    if config.kv_cache_dtype != "auto" and model_config.latent is not None:
        yield f"{cache} does not work with latent attention, and {path} has it"
    if has_experts and on_gpu and config.quantize_to:
        yield f"{option} on a GPU does not quantize experts, and {path} has some"
    if has_experts and on_gpu and exact:
        yield f"dtype='float64' on a GPU does not work with experts, and {path} has some"
    if not on_gpu and config.kv_cache_dtype != "auto" and not config.enforce_eager:
        yield f"{cache} on a CPU needs enforce_eager=True: compiled layers do not read fp8"
    if on_gpu and config.kv_cache_dtype != "auto" and (have := torch.cuda.get_device_capability(device)) < (8, 9):
        yield f"{cache} needs a GPU of compute capability 8.9 or later, and this one has {have[0]}.{have[1]}"
    if on_gpu and config.block_size & (config.block_size - 1):
        yield f"block_size={config.block_size} must be a power of two on a GPU"
    if on_gpu and config.quantize_to and exact:
        yield f"{option} on a GPU does not work in float64"
    if on_gpu and config.enable_lora and has_experts:
        yield f"enable_lora on a GPU does not work with experts, and {path} has some"
    if on_gpu and config.enable_lora and exact:
        yield "enable_lora on a GPU does not work in float64"
    sized = config.kv_cache_gib is not None or config.num_gpu_blocks_override is not None
    method = None if config.speculation is None else config.speculation.method
    if on_gpu and not sized and method not in (None, "ngram"):
        yield (
            f"speculative_config: on a GPU, method={method!r} needs kv_cache_gib or num_gpu_blocks_override, so that "
            f"there is memory left for the {'pages of the head' if method in HEADS else 'draft model'}"
        )


def _refused_by_model(config: EngineConfig, model_config: ModelConfig, path: Path) -> Iterator[str]:
    """What does not fit the model, whatever the device is."""
    has = None if model_config.quantization is None else model_config.quantization.method
    option = f"quantization={config.quantization!r}"
    if config.quantization in STORED_QUANTIZATIONS and config.quantization != has:
        kind = "are not quantized" if has is None else f"are quantized by {has}"
        yield f"{option}, but the weights of {path} {kind}"
    if has and config.quantize_to:
        yield f"{option}, but the weights of {path} already are ({has})"
    if has and config.load_format == "dummy":
        yield (
            f"load_format='dummy' draws weights that are not quantized, but {path} is ({has}): give a config.json "
            "without quantization_config, and quantization='int4'"
        )
    if has and model_config.pooling is not None:
        yield f"embeddings and scores need weights that are not quantized, and those of {path} are ({has})"
    if config.enable_lora and model_config.experts is not None and model_config.experts.swiglu is not None:
        yield f"enable_lora does not work with the experts of {path}, whose matrices are transposed in files"
    if model_config.state and config.enable_lora:
        yield f"enable_lora does not work here: {path} has layers with a state"
    if (speculation := config.speculation) is not None and speculation.method in HEADS:
        method = f"speculative_config: method={speculation.method!r}"
        if model_config.model_impl == "transformers":
            yield f"{method} does not work with model_impl='transformers': its modules keep their hidden states"
        if model_config.mixer.get("input_size") or None not in model_config.sliding_windows:
            yield f"{method} does not work with {path}: its layers look up the tokens, or all have a window or a state"
    if model_config.encoded_positions:
        yield from _refused_by_encoder(config, model_config, path)
    if model_config.mixer.get("input_size"):  # of Gemma 4: inputs of layers
        for name in config.given("enable_prompt_embeds", "enable_prompt_adapter"):
            yield f"{name} does not work with {path}: each of its layers looks up the tokens"
    if model_config.model_impl == "transformers":
        for name in config.given("enable_prompt_embeds", "enable_prompt_adapter"):
            yield f"{name} does not work with model_impl='transformers': its modules take tokens"
    if model_config.experts is None and config.enable_expert_parallel:
        yield f"enable_expert_parallel=True, but {path} has no experts"


def _refused_by_encoder(config: EngineConfig, model_config: ModelConfig, path: Path) -> Iterator[str]:
    """What does not fit a model whose decoder attends to what an encoder has read."""
    if model_config.pooling is not None:
        yield f"runner='pooling' does not work with {path}: its decoder writes text, and nothing makes embeddings of it"
    if config.pipeline_parallel_size > 1:
        yield f"pipeline_parallel_size={config.pipeline_parallel_size} does not work with the encoder of {path}"
    for name in config.given("enable_prompt_embeds", "enable_prompt_adapter"):
        yield f"{name} does not work with {path}: an encoder reads its prompts"
    if (speculation := config.speculation) is not None and speculation.method != "ngram":
        yield f"speculative_config: method={speculation.method!r} does not work with {path}: no draft knows its encoder"
    if config.kv_cache_dtype != "auto":
        yield f"kv_cache_dtype={config.kv_cache_dtype!r} does not work with the encoder of {path}"
