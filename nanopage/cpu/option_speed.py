"""Warns if an option that should make an engine faster or smaller makes it slower than the default on this CPU."""

import logging
import time

import torch
from torch import Tensor, nn

from nanopage.config.model import ModelConfig
from nanopage.config.options import EngineConfig
from nanopage.cpu.aot_products import CompiledProduct
from nanopage.cpu.packed import pack
from nanopage.cpu.packed_linear import can_pack
from nanopage.cpu.tiled import tile
from nanopage.device import resolve_dtype
from nanopage.layers.linear import Linear

logger = logging.getLogger("nanopage")

NUM_TOKENS = (1, 64)  # a decode, and a prompt or a batch
SLOWER = 1.25  # times the default's time: less may be chance
SECONDS = 0.003  # the least time that a measurement takes
REPEATS = 5


def warn_of_slow_options(
    config: EngineConfig,
    model_config: ModelConfig,
    layer: nn.Module,
    dtype: torch.dtype,
    product: CompiledProduct | None,
) -> None:
    """Compare the speed of a decoder layer's largest product with its speed under the default options. Does nothing
    unless an option sets a quantization, or a dtype of 16 bits other than the default: larger dtypes are for precision.

    Args:
        layer: a layer of the model under the options.
        dtype: the dtype of its activations.
        product: multiplies by weights in tiles, if there is one.
    """
    default, _ = resolve_dtype("auto", model_config.dtype, torch.device("cpu"))
    options = [f"dtype={config.dtype!r}"] if config.dtype in ("bfloat16", "float16") and dtype != default else []
    options += [f"quantization={config.quantization!r}"] if config.quantize_to else []
    if not options:
        return
    if config.enforce_eager:
        options.append("enforce_eager=True")
    elif config.quantize_to and product is None:
        options.append("products that are not compiled")
    linears = [module for module in layer.modules() if isinstance(module, Linear)]
    linear = max(linears, key=lambda module: module.in_features * module.out_features)
    with torch.device("meta"):
        usual = Linear(linear.in_features, linear.out_features).requires_grad_(False).to(default)
    usual.to_empty(device="cpu").weight.matrix.fill_(1)
    if product is not None and dtype == default == torch.float32 and model_config.dtype in ("bfloat16", "float16"):
        tile(usual, "bfloat16")  # as Worker chooses by itself
        usual.weight.multiply = product
    elif can_pack(default):
        pack(usual)
    slower = []
    for num_tokens in NUM_TOKENS:
        x = torch.ones(num_tokens, linear.in_features)
        # The smallest of several ratios: other work on the machine may disturb either measurement.
        ratio = min(_seconds(linear, x.to(dtype)) / _seconds(usual, x.to(default)) for _ in range(REPEATS))
        if ratio > SLOWER:
            slower.append(f"{ratio:.1f} times as long for {num_tokens} token{'s' * (num_tokens > 1)}")
    if slower:
        names, times = " with ".join(options), " and ".join(slower)
        logger.warning(f"{names} is slower than the default on this CPU: its largest product takes {times}")


@torch.inference_mode()
def _seconds(module: nn.Module, x: Tensor) -> float:
    """The mean time of a product."""
    module(x)
    count, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < SECONDS or not count:
        module(x)
        count += 1
    return passed / count
