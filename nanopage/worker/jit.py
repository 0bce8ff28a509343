"""Compiles decoder layers for a GPU with torch.compile, when the engine starts.

The code before attention and the code after it are compiled separately. Attention itself is not compiled: its kernels
would not be fused with anything, and without it a graph depends only on the number of tokens. One compilation therefore
serves all layers and all steps, decodes and prompts alike. A second one serves steps of a single token, because torch
specializes on that shape. Nothing is compiled while serving. Inductor caches its code on disk, so a later start takes
seconds. cuBLAS still computes the matrix products.

On a CPU, layers are compiled ahead of time instead (aot.py).
"""

import logging
import time
from collections.abc import Callable
from types import FunctionType
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn

from nanopage.config import ModelConfig
from nanopage.layers.quantized import format_of
from nanopage.models.decoder import Decoder, DecoderLayer
from nanopage.sampling.table import SamplingTable

logger = logging.getLogger("nanopage")


def compile_model(model: Decoder, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Replace a model's layers, rotary embedding and last norm by compiled ones. Takes a minute or less the first time.

    Args:
        dtype: of weights and activations.
    """
    started = time.perf_counter()
    compiled: dict[tuple, Callable] = {}

    def compiled_once(module: nn.Module, name: str) -> Callable:
        key = type(module), name, format_of(module)
        if key not in compiled:  # weights are inputs of a graph, so it serves all modules of a type and format
            compiled[key] = compile_afresh(getattr(type(module), name))
        return compiled[key]

    model.layers = nn.ModuleList(
        CompiledLayer(layer, compiled_once(layer, "before"), compiled_once(layer, "after")) for layer in model.layers
    )
    for name in ("rotary", "norm"):
        module = getattr(model, name)
        setattr(model, name, CompiledModule(module, compiled_once(module, "forward")))
    warm_up(model, config, dtype, device)
    logger.info(f"compiled the decoder layer in {time.perf_counter() - started:.1f} s")


class CompiledLayer(DecoderLayer):
    """Wraps a decoder layer and runs compiled code before and after attention."""

    def __init__(self, layer: nn.Module, before: Callable, after: Callable):
        nn.Module.__init__(self)  # not DecoderLayer's: the modules are those of `layer`
        self.layer: Any = layer
        self.compiled_before, self.compiled_after = before, after

    @property
    def window(self) -> int | None:
        return self.layer.window

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.compiled_before(self.layer, x, cos, sin)

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        return self.compiled_after(self.layer, x, attended)


class CompiledModule(nn.Module):
    """Wraps a module and runs compiled code in place of its `forward`."""

    def __init__(self, module: nn.Module, compiled: Callable):
        super().__init__()
        self.module, self.compiled = module, compiled

    def forward(self, *inputs: Any) -> Any:
        return self.compiled(self.module, *inputs)


def compile_afresh(function: Any) -> Any:
    """torch.compile a copy of a function under a new name, so that engines do not share its graphs.

    torch identifies a function by its name and place. It keeps at most eight graphs of a function, and it makes a size
    dynamic if it has seen another one before. Without the filter, it would compile again whenever torch's number of CPU
    threads has changed, as an engine on the CPU of the same process changes it.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{uuid4().hex}")
    options: dict[str, Any] = {
        "guard_filter_fn": lambda guards: [guard.guard_type != "GLOBAL_STATE" for guard in guards]
    }
    copy = FunctionType(code, function.__globals__, closure=function.__closure__)
    return torch.compile(copy, fullgraph=True, options=options)


@torch.inference_mode()
def warm_up(model: Decoder, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Call every compiled part with several tokens and with one, so that nothing is left to compile while serving."""

    def zeros(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return any_length(torch.zeros(shape, dtype=kind, device=device))

    layers: dict[tuple, Any] = {format_of(layer): layer for layer in model.layers}
    for num_tokens in (32, 1):
        x = zeros(num_tokens, config.hidden_size)
        cos, sin = map(any_length, model.rotary(zeros(num_tokens, kind=torch.int64), dtype))
        for layer in layers.values():
            layer.before(x, cos, sin)
            layer.after(x, zeros(num_tokens, config.num_heads, config.head_dim))
        model.norm(x)


@torch.inference_mode()
def warm_up_sampling(
    sample_all: Callable[..., Tensor], sampling: SamplingTable, dtype: torch.dtype, device: torch.device
) -> None:
    """Call the sampler as `warm_up` calls the layers, with logits as they come from the model and from penalties.

    Args: sampling: of a sequence table; its first row is sampled.
    """
    for kind in dict.fromkeys((dtype, torch.promote_types(dtype, torch.float32))):
        for num_rows in (32, 1):
            logits = any_length(torch.zeros(num_rows, sampling.vocab_size, dtype=kind, device=device))
            rows, positions = map(any_length, torch.zeros(2, num_rows, dtype=torch.int64, device=device))
            sample_all(logits, rows, positions, sampling.temperature, sampling.seed, sampling.limits)


def any_length(tensor: Tensor) -> Tensor:
    """Mark the number of rows as dynamic for torch.compile, unless it is 1: torch compiles that separately."""
    if len(tensor) > 1:
        torch._dynamo.mark_dynamic(tensor, 0)
    return tensor
