"""How weights are stored: the one place that chooses. It also replaces the floats of a loaded model. The loader places
the integers that a checkpoint has.

floats                 as they are; on a CPU in oneDNN's layout (cpu/packed.py)
16 bits                on a CPU that computes in float32, in tiles (cpu/tiled.py)
floats in tiles        on a CPU with `batch_invariant`: oneDNN divides products by their number of rows
fewer bits             rounded as `quantization` says; on a CPU in tiles, on a GPU as in quantization/quantized.py
the checkpoint's own   integers of a .gguf file or of a quantized checkpoint, which the loader places as they are
"""

import logging
from pathlib import Path

import torch

from nanopage.cpu.aot_products import CompiledProduct, tile_product
from nanopage.cpu.packed import pack
from nanopage.cpu.packed_linear import can_pack
from nanopage.cpu.tiled import TiledWeight, has_only_float16, tile
from nanopage.cpu.tiled_experts import TiledExperts, can_join, join_experts
from nanopage.models.decoder import Decoder
from nanopage.quantization.quantized import quantize
from nanopage.weights.loader import Checkpoint
from nanopage.worker.setup import Setup

logger = logging.getLogger("nanopage")

BLOCKS = "block-quantized"  # weights of a .gguf file or a quantized checkpoint in its own integers
Storage = tuple[str | None, CompiledProduct | None]
"""(kind, product). kind: what `tile` (on a GPU: `quantize`) makes of floats, or BLOCKS. None: they stay floats.
product: on a CPU, what multiplies by weights in tiles. The weights of experts are always in tiles."""


def choose_storage(setup: Setup, checkpoint: Checkpoint) -> Storage:
    """Choose, before the weights are loaded."""
    config, model_config, name = setup.config, setup.model_config, setup.path.name
    if (stored := model_config.quantization) is not None:
        in_tiles = stored.fits_tiles and model_config.dtype in ("bfloat16", "float16")
        quantized = stored.method != "mxfp4" and (setup.on_gpu or in_tiles)
    elif isinstance(checkpoint, Path):
        quantized = False
    else:
        from nanopage.quantization.gguf_tiles import is_quantized  # imports gguf, which takes long

        quantized = is_quantized(checkpoint)
    divided = config.tensor_parallel_size > 1
    if divided and quantized:
        logger.info(f"tensor_parallel_size={config.tensor_parallel_size}: the integers of {name} become floats")
    if setup.on_gpu and quantized and model_config.experts is not None:
        logger.info(f"on a GPU, the integers of the experts of {name} become floats")
    blocks = quantized and not divided and not config.quantize_to and config.load_format != "dummy"
    if setup.on_gpu:
        return BLOCKS if blocks and setup.dtype != torch.float64 else config.quantize_to, None
    # In float32, reading the weights takes most of the time of a decode. The checkpoint's 16 bits lose nothing, but for
    # products of a quantized checkpoint's numbers and scales, which bfloat16 rounds.
    halves = setup.dtype == torch.float32 and model_config.dtype in ("bfloat16", "float16")
    compiles = can_pack(setup.dtype) and not config.enforce_eager
    product = None
    if compiles and (blocks or halves or config.quantize_to or config.batch_invariant or joins_experts(setup)):
        product = tile_product(setup.dtype)
    if product is None and config.batch_invariant:
        raise RuntimeError("batch_invariant=True needs products that are compiled: the log says why they are not")
    if blocks and product is not None:
        return BLOCKS, product
    # Without a compiled product, every step would widen the 16 bits anew, which takes longer than reading 32.
    floats = str(setup.dtype).removeprefix("torch.") if config.batch_invariant else None
    return config.quantize_to or (model_config.dtype if halves and product is not None else floats), product


def joins_experts(setup: Setup) -> bool:
    """Whether one operator may compute all experts of a layer (cpu/tiled_experts.py). It knows nothing of adapters, and
    chooses experts by a softmax alone, and has one activation."""
    config, experts = setup.config, setup.model_config.experts
    divided_or_adapted = config.tensor_parallel_size > 1 or config.enable_lora
    plain = experts is not None and experts.is_plain and experts.swiglu is None
    return plain and not setup.on_gpu and not divided_or_adapted


def store(setup: Setup, model: Decoder, kind: str | None, product: CompiledProduct | None) -> Storage:
    """Replace the floats of a loaded model as `kind` says. Returns: how its weights are stored now."""
    if setup.on_gpu:
        if setup.config.quantize_to is not None:
            quantize(model, setup.config.quantize_to, setup.device)
            model.to(setup.device)
        torch.cuda.empty_cache()  # of what rounding took
        return kind, None
    if kind == "float16" and setup.config.load_format != "dummy" and not has_only_float16(model):
        # config.json says float16, but the file has other numbers
        kind = "float32" if setup.config.batch_invariant else None
        product = product if kind or joins_experts(setup) else None
    if kind == BLOCKS:  # the head is usually not quantized; products in bfloat16 do not read float16
        exact = setup.dtype != torch.bfloat16 and has_only_float16(model)
        tile(model, "float16" if exact else "bfloat16")
    elif kind is not None:
        tile(model, kind)
    if product is not None and joins_experts(setup) and can_join(model):
        join_experts(model, setup.dtype)
    if kind is None and can_pack(setup.dtype):
        pack(model)
    if product is None:
        return kind, None
    for module in model.modules():
        if isinstance(module, TiledWeight):
            module.multiply = product
        elif isinstance(module, TiledExperts):
            module.product = product.experts
    return kind, product


def why_eager(setup: Setup, model: Decoder) -> str | None:
    """How steps run on a CPU where layers with these weights are not compiled, and why. None: they are."""
    if not can_pack(setup.dtype):
        return f"eagerly: {str(setup.dtype).removeprefix('torch.')} is not compiled on this CPU"
    if any(hasattr(module, "sinks") for module in model.modules()):
        return "eagerly: attention with sinks is not compiled"
    if any(hasattr(module, "distances") for module in model.modules()):  # of T5
        return "eagerly: attention with a bias for each distance is not compiled"
    experts_apart = not any(isinstance(module, TiledExperts) for module in model.modules())
    if setup.model_config.experts is not None and experts_apart:
        adapters = " with adapters" if setup.config.enable_lora else ""
        return f"eagerly: the experts of this model{adapters} are not compiled"
    return None
