"""Decoder layers compiled just in time, for a GPU: torch.compile of what comes before and what comes after attention.

Attention itself stays between the two as it is: its kernels have nothing beside them to be fused with, and without it a
graph depends on nothing but the number of tokens. So one compilation serves all layers in all steps, decodes and
prompts alike, and another one a single token, whose shape torch specializes on. Both are made at start, and nothing is
compiled while serving. torch keeps what Inductor makes on disk: a later start takes seconds. Products stay cuBLAS's.

On a CPU layers are compiled ahead of time instead (compiler.py).
"""

import logging
import time
from functools import partial
from types import FunctionType
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from nanopage.config import ModelConfig

logger = logging.getLogger("nanopage")


def compile_model(model: Any, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Compile a model's layers, and what is around them, in place. Takes up to a minute the first time.

    Args:
        dtype: of weights and activations.
    """
    started = time.perf_counter()
    inner = model.model
    parts = [(layer, name) for layer in inner.layers for name in ("before", "after")]
    parts += [(inner.rotary, "forward"), (inner.norm, "forward")]
    compiled: dict[tuple[type, str], Any] = {}
    for module, name in parts:
        key = type(module), name
        if key not in compiled:  # weights are inputs of the graph: one serves all modules of a kind
            compiled[key] = compile_afresh(getattr(type(module), name))
        setattr(module, name, partial(compiled[key], module))
    warm_up(model, config, dtype, device)
    logger.info(f"compiled the decoder layer in {time.perf_counter() - started:.1f} s")


def compile_afresh(function: Any) -> Any:
    """torch.compile for this engine alone. torch keeps eight graphs of a function at most, and a size that is not the
    one it has seen before (by the function's name and place) becomes dynamic: engines must not share them."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{uuid4().hex}")
    return torch.compile(FunctionType(code, function.__globals__, closure=function.__closure__), fullgraph=True)


@torch.inference_mode()
def warm_up(model: Any, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Call every compiled part with several tokens and with one, so that there is nothing left to compile."""

    def zeros(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return any_length(torch.zeros(shape, dtype=kind, device=device))

    inner, layer = model.model, model.model.layers[0]
    for num_tokens in (32, 1):
        x = zeros(num_tokens, config.hidden_size)
        cos, sin = map(any_length, inner.rotary(zeros(num_tokens, kind=torch.int64), dtype))
        layer.before(x, cos, sin)
        layer.after(x, zeros(num_tokens, config.num_heads, config.head_dim))
        inner.norm(x)


def any_length(tensor: Tensor) -> Tensor:
    """Tell torch.compile that there may be any number of rows, unless it is one: that is a shape of its own."""
    if len(tensor) > 1:
        torch._dynamo.mark_dynamic(tensor, 0)
    return tensor
