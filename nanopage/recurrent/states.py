"""States: what a layer keeps of each sequence in place of K and V, in tensors of fixed size, such as the last inputs of
a convolution or the matrix of linear attention.

A state takes the place of a block's K and V. state/layer_kinds.py says which blocks a sequence has, and
worker/state_pages.py which of them a step reads and writes. The numbers are in float32, or in float64 if the model
computes in it, because a state sums up all tokens of a sequence.

cpu/aot_compile.py exports layers for steps in which every sequence has one token. There, a mixer looks at the `sources`
and `targets` of StatePages only, and asks for sizes with `x.shape[0]`: `len(x)` would fix them.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from nanopage.config.model import ModelConfig
from nanopage.layers.attention import StepContext
from nanopage.models.decoder import make_norm
from nanopage.state.pages import movable

GGUF_MIXER = {  # tensors of mixers in GGUF files: in checkpoints
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_dt.bias": "dt_bias",
    "ssm_conv1d": "conv1d",
    "ssm_in": "in_proj",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}


class MixerLayer(nn.Module):
    """A decoder layer with something in place of attention that keeps a state.

    Args:
        name: of the mixer in checkpoints.
        mixer: called with x [T, hidden_size] and the step. It has the `index` of its layer.
    """

    def __init__(self, config: ModelConfig, name: str, mixer: nn.Module, mlp: nn.Module):
        super().__init__()
        self.input_layernorm = make_norm(config)
        self.add_module(name, mixer)
        self.post_attention_layernorm = make_norm(config)
        self.mlp, self.name, self.residual_scale = mlp, name, config.residual_scale

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """As `DecoderLayer.forward`."""
        mixer = self.get_submodule(self.name)
        x, mixed = step.keep(mixer, x, mixer(self.input_layernorm(x), step))
        x = x + mixed * self.residual_scale
        return x + self.mlp(self.post_attention_layernorm(x)) * self.residual_scale


def read_state(step: StepContext, mixer: Any, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    """The tensors of a layer's state before the step, for its B sequences: [B, *shape] each, in float32 at least. Zeros
    for a sequence that begins. Args: mixer: of the layer. dtype: of the model."""
    pages: Any = step.attention_of(mixer)
    numbers = movable(step.kv_caches[mixer.index]).index_select(1, pages.sources.clamp(min=0)).movedim(0, 1).flatten(1)
    numbers = numbers.view(torch.promote_types(dtype, torch.float32)).masked_fill(pages.sources[:, None] < 0, 0)
    sizes = [prod(shape) for shape in shapes]
    parts = numbers[:, : sum(sizes)].split(sizes, dim=1)
    return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]


def write_state(step: StepContext, mixer: Any, *tensors: Tensor) -> None:
    """Write the tensors of a layer's state after the step, as `read_state` returns them."""
    pages: Any = step.attention_of(mixer)
    cache = movable(step.kv_caches[mixer.index])
    numbers = torch.cat([tensor.flatten(1) for tensor in tensors], dim=1)
    page = cache.new_zeros(numbers.shape[0], cache[:, 0].numel())
    page.view(numbers.dtype)[:, : numbers.shape[1]] = numbers
    cache.index_copy_(1, pages.targets, page.view(-1, len(cache), *cache.shape[2:]).movedim(1, 0))


def causal_conv(x: Tensor, before: Tensor, weight: Tensor, pages: Any) -> tuple[Tensor, Tensor]:
    """Convolve each sequence of a step with its own past, each channel by itself.

    Args:
        x: [T, channels], the sequences one after the other.
        before: [B, channels, width - 1], the inputs before the step.
        weight: [channels, width]; the last column is for the present token.
        pages: of the layer's states (StatePages).

    Returns: [T, channels], and `before` of the next step.
    """
    past = weight.shape[1] - 1
    if x.shape[0] == before.shape[0]:  # a token of each sequence
        taps = [*before.to(x.dtype).unbind(2), x]
        out = x * weight[:, past]
        for index in range(past):
            out += taps[index] * weight[:, index]
        return out, torch.cat((before, x[..., None].to(before.dtype)), dim=2)[..., 1:]
    counts = torch.from_numpy(pages.counts).to(x.device)
    rows, window = torch.arange(len(counts), device=x.device), torch.arange(past, device=x.device)
    starts = counts.cumsum(0) - counts + rows * past  # of sequences among the inputs, each behind its past
    places = torch.arange(len(x), device=x.device) + (pages.sequence + 1) * past  # of tokens there
    inputs = x.new_empty(len(x) + len(counts) * past, x.shape[1])
    inputs[starts[:, None] + window] = before.transpose(1, 2).to(x.dtype)
    inputs[places] = x
    out = x * weight[:, past]
    for index in range(past):
        out += inputs[places - (past - index)] * weight[:, index]
    kept = torch.from_numpy(pages.kept).to(x.device)
    return out, inputs[(starts + kept)[:, None] + window].transpose(1, 2).to(before.dtype)


def fit_block_size(
    config: ModelConfig, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype, on_gpu: bool = False
) -> int:
    """`block_size`, or its least multiple by a power of two whose blocks have room for the state of a layer.

    If the state is K and V of an encoder's positions, a block also has room for a whole sequence. On a CPU, it is then
    the least multiple.

    Args: dtype: of activations.
    """
    if config.encoded_positions and not on_gpu:
        return -(-max(config.encoded_positions, config.max_position_embeddings) // block_size) * block_size
    token_bytes = config.kv_parts * config.num_kv_heads * config.head_dim * kv_dtype.itemsize
    state_bytes = config.state_size * torch.promote_types(dtype, torch.float32).itemsize
    if config.encoded_positions:
        state_bytes = token_bytes * max(config.encoded_positions, config.max_position_embeddings)
    while block_size * token_bytes < state_bytes:
        block_size *= 2
    return block_size
