"""Compiles a decoder for a GPU with torch.compile, in pieces, when the engine starts.

Attention is not compiled: its kernels would not be fused with anything, and without it a graph depends only on the
number of tokens. The pieces are what lies before, between and after the attention of the layers:

    first     embedding, rotation table, norm and projection of layer 0
    between   output projection and feed-forward layer of a layer, norm and projection of the next one if there is one
    head      norm of the decoder, logits

The sum of a layer's output and its residual is therefore computed in one kernel with the next layer's norm. Weights are
inputs of a graph, so `between` is compiled once for all layers whose weights have the same formats, with experts or
without, and for all steps, decodes and prompts alike. It is compiled again for the last layer, and for steps of a
single token, because torch specializes on that shape.
After the first piece and each `between`, one Triton kernel normalizes and rotates the heads and writes K and V
(kernels/rotate_and_write.py).

Nothing is compiled while serving. Inductor caches its code on disk, so a later start takes seconds. cuBLAS still
computes the matrix products. On a CPU, layers are compiled ahead of time instead (aot.py).
"""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import FunctionType
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn

from nanopage.config.model import ModelConfig
from nanopage.layers.attention import StepContext
from nanopage.models.decoder import Decoder
from nanopage.state.sampling_table import SamplingTable

logger = logging.getLogger("nanopage")

# Guards that are not evaluated, because they take time in each call: more than half of a layer's guards. Nothing here
# violates them, except that an engine on the CPU of the same process changes torch's number of CPU threads.
UNCHECKED = {
    "GLOBAL_STATE",
    "EMPTY_NN_MODULE_HOOKS_DICT",  # no hooks are added to modules
    "NOT_PRESENT_IN_GENERIC_DICT",  # no methods of modules are replaced
    "BUILTIN_MATCH",  # no functions are replaced
    "CLOSURE_MATCH",
    "MODULE_MATCH",  # no Python modules are replaced, under the names that the code has for them
}


def compile_model(model: Decoder, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> "CompiledDecoder":
    """Compile a model in pieces. Takes a minute or less the first time.

    Args: dtype: of weights and activations.
    """
    started = time.perf_counter()
    compiled = CompiledDecoder(model)
    warm_up(compiled, config, dtype, device)
    logger.info(f"compiled the decoder layer in {time.perf_counter() - started:.1f} s")
    return compiled


@dataclass(slots=True)
class Carried:
    """What the layers hand on, for T tokens and any padding behind them.

    x         [T, hidden_size]  the hidden states
    q         [T, heads, head_dim]  of the attention that follows. All layers fill the same tensor
    attended  the same, for the output of that attention
    step      the step with its padding: what pieces read
    run       calls, captures or replays the piece before the attention of layer `index`, which returns a Carried
    """

    x: Tensor
    q: Tensor
    attended: Tensor
    step: StepContext
    run: Callable[[int, Callable[[], "Carried"]], "Carried"] = lambda index, piece: piece()


class CompiledDecoder(Decoder):
    """Computes the same as a Decoder, in compiled pieces and with attention between them.

    Args:
        decoder: its modules are used. Its layers must all be of one kind: the same modules and shapes, except for the
            formats of quantized weights.
    """

    def __init__(self, decoder: Decoder):
        nn.Module.__init__(self)  # not Decoder's: the modules are those of `decoder`
        self.take(decoder)
        self.plain = decoder
        self.first, self.head = compile_afresh(first), compile_afresh(head)
        pairs = [*pairwise([*map(formats_of, decoder.layers), None])]
        pieces = {pair: compile_afresh(between) for pair in dict.fromkeys(pairs)}
        layers = zip(pairwise([*decoder.layers, None]), map(pieces.get, pairs), strict=True)
        self.layers = nn.ModuleList(CompiledLayer(*both, piece, self.place) for both, piece in layers)

    def forward(self, input_ids: Tensor, step: StepContext) -> Tensor:
        """As `Decoder.forward`."""
        if step.embeds is not None:  # which the first piece does not know
            return self.plain(input_ids, step)
        q = self.new_heads(len(input_ids))
        return self.run_layers(self.begin(input_ids, Carried(q, q, torch.empty_like(q), step)), step)

    def begin(self, input_ids: Tensor, carried: Carried) -> Carried:
        """Compute the piece before the attention of the first layer. carried: without x."""
        layers: Any = self.layers
        layer = layers[0].layer
        carried.x, carried.step.rotations, heads = self.first(self, layer, input_ids, carried.step.positions)
        self.place(layer.self_attn, heads, carried)
        return carried

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Decoder.logits`."""
        return self.head(self, hidden)

    def hidden_of(self, x: Carried, step: StepContext) -> Tensor:
        """As `Decoder.hidden_of`. A copy: later graphs reuse the memory."""
        return x.x[: len(step.positions)].clone()

    def new_heads(self, num_tokens: int) -> Tensor:
        """An empty tensor for q or the output of attention: [num_tokens, heads, head_dim]."""
        layers: Any = self.layers
        part = layers[0].layer.self_attn
        return self.norm.weight.new_empty(num_tokens, part.num_heads, part.head_dim)

    def place(self, part: Any, heads: Tensor, carried: Carried) -> None:
        """Normalize and rotate heads, fill q, and write K and V. Padding writes no K and V."""
        from nanopage.kernels.rotate_and_write import rotate_and_write  # imports Triton

        norms, step = part.head_norms(), carried.step
        weights = None if norms is None else (norms[0].weight, norms[1].weight, norms[0].eps, norms[0].offset or 0)
        kv_cache, slots = step.kv_caches[part.index], step.attention_of(part).slot_mapping
        cos, sin = step.rotations[part.rope]
        rotate_and_write(heads, cos, sin, weights, kv_cache, slots, carried.q, part.scoring.kv_scales)


class CompiledLayer(nn.Module):
    """What `run_layers` calls in place of a layer: from its attention up to that of the following layer.

    Args:
        following: None for the last layer.
        piece: `between`, compiled.
        place: as `CompiledDecoder.place`.
    """

    def __init__(self, layer: Any, following: Any, piece: Any, place: Callable[..., None]):
        super().__init__()
        self.layer, self.following, self.piece, self.place = layer, following, piece, place

    def forward(self, carried: Carried, step: StepContext) -> Carried | Tensor:
        """Returns: what the following layer gets. The last layer returns what `Decoder.forward` does."""
        part, num_tokens = self.layer.self_attn, len(step.positions)
        attended = carried.attended[:num_tokens]
        step.attend(part, carried.q[:num_tokens], attended)
        if self.following is None:
            return self.piece(self.layer, None, *step.keep(part, carried.x[:num_tokens], attended))[0]
        return carried.run(part.index + 1, partial(self.go_on, carried))

    def go_on(self, carried: Carried) -> Carried:
        """Compute the piece up to the attention of the following layer."""
        x, heads = self.piece(self.layer, self.following, carried.x, carried.attended)
        self.place(self.following.self_attn, heads, carried)
        return replace(carried, x=x)


def formats_of(layer: nn.Module) -> tuple:
    """The formats of a layer's modules, where they are not floats of plain layers: compiled code depends on them."""
    return tuple(module.format for module in layer.modules() if hasattr(module, "format"))


def first(
    decoder: Decoder, layer: Any, input_ids: Tensor, positions: Tensor
) -> tuple[Tensor, list[tuple[Tensor, Tensor]], Tensor]:
    """Returns: x, the rotations, and the heads of the first layer (see `SelfAttention.heads`)."""
    x = decoder.embed(input_ids, positions)
    return x, decoder.rotary(positions, x.dtype), layer.heads(x)


def between(layer: Any, following: Any, x: Tensor, attended: Tensor) -> tuple[Tensor, Any]:
    """Returns: x after `layer`, and the heads of the layer that follows, if one does."""
    x = layer.after(x, attended)
    return x, None if following is None else following.heads(x)


def head(decoder: Decoder, hidden: Tensor) -> Tensor:
    return Decoder.logits(decoder, hidden)


def compile_afresh(function: Any) -> Any:
    """torch.compile a copy of a function under a new name, so that engines do not share its graphs.

    torch identifies a function by its name and place. It keeps at most eight graphs of a function, and it makes a size
    dynamic if it has seen another size before. Guards that UNCHECKED lists are not evaluated.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{uuid4().hex}")
    options: dict[str, Any] = {
        "guard_filter_fn": lambda guards: [guard.guard_type not in UNCHECKED for guard in guards]
    }
    copy = FunctionType(code, function.__globals__, closure=function.__closure__)
    return torch.compile(copy, fullgraph=True, options=options)


@torch.inference_mode()
def warm_up(model: CompiledDecoder, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Call every piece with several tokens and with one, so that nothing is left to compile while serving."""

    def zeros(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return any_length(torch.zeros(shape, dtype=kind, device=device))

    layers: Any = model.layers
    with without_patterns():
        for num_tokens in (32, 1):
            ids, positions = zeros(num_tokens, kind=torch.int64), zeros(num_tokens, kind=torch.int64)
            model.first(model, layers[0].layer, ids, positions)
            x, attended = zeros(num_tokens, config.hidden_size), zeros(num_tokens, config.num_heads, config.head_dim)
            for one in {layer.piece: layer for layer in layers}.values():
                one.piece(one.layer, one.following, x, attended)
            model.logits(x)


def without_patterns() -> AbstractContextManager:
    """A context in which Inductor compiles pieces as they are written. Its patterns would turn a product plus a
    residual into addmm, for which torch copies the residual before it calls cuBLAS."""
    from torch._inductor import config  # takes long to import

    return config.patch(pattern_matcher=False)


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
