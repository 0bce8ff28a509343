"""States: what a layer keeps of each sequence in place of K and V, in tensors of fixed size, such as the last inputs of
a convolution or the matrix of linear attention.

A state takes the place of a block's K and V. state/layer_kinds.py says which blocks a sequence has, and
worker/state_pages.py which of them a step reads and writes. The numbers are in float32, or in float64 if the model
computes in it, because a state sums up all tokens of a sequence.

K and V of a block are two pieces of memory. Each tensor of a state is divided among both along its first dimension: the
first half of the heads, for example, is where K would be. So each head is in one piece, and nothing has to be joined.

cpu/aot_compile.py exports layers, with Sequences of any size. There, mixers ask for sizes with `x.shape[0]`: `len(x)`
would fix them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopage.config.model import ModelConfig
from nanopage.layers.attention import StepContext
from nanopage.layers.linear import Linear
from nanopage.models.decoder import make_norm
from nanopage.recurrent.sequences import Prompts, Sequences, divide

GGUF_MIXER = {  # tensors of mixers in GGUF files: in checkpoints
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_dt.bias": "dt_bias",
    "ssm_conv1d": "conv1d",
    "ssm_in": "in_proj",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}

MANY = 256  # tokens


class MixerLayer(nn.Module):
    """A decoder layer with something in place of attention that keeps a state.

    Args:
        name: of the mixer in checkpoints.
        mixer: as in `mix`.
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
        x, mixed = step.keep(mixer, x, mix(mixer, self.input_layernorm(x), step))
        x = x + mixed * self.residual_scale
        return x + self.mlp(self.post_attention_layernorm(x)) * self.residual_scale


@dataclass(slots=True)
class States:
    """The states of a layer, and the sequences that a mixer computes.

    cache   [parts, num_blocks, numbers] (`state_of`)
    shapes  of the tensors of a state
    """

    cache: Tensor
    shapes: Sequence[tuple[int, ...]]
    sequences: Sequences

    def view(self, index: int) -> Tensor:
        """A tensor of the states of all blocks: [num_blocks, parts, *shape], where the first dimension of the shape is
        divided by the number of parts, and rounded up."""
        begin, end, shape = divided(self.shapes, len(self.cache))[index]
        return self.cache[:, :, begin:end].unflatten(2, shape).movedim(0, 1)

    def read(self, index: int) -> Tensor:
        """A tensor of the states before the step: [B, *shape]. Zeros for a sequence that begins."""
        sources = self.sequences.sources
        tensor = self.view(index).index_select(0, sources.clamp(min=0)).flatten(1, 2)[:, : self.shapes[index][0]]
        if not self.sequences.begin:
            return tensor
        return tensor.masked_fill((sources < 0).view(-1, *[1] * len(self.shapes[index])), 0)

    def write(self, index: int, tensor: Tensor) -> None:
        """Write a tensor of the states after the step, as `read` returns it."""
        parts, targets = len(self.cache), self.sequences.targets
        begin, end, shape = divided(self.shapes, parts)[index]
        if missing := parts * shape[0] - self.shapes[index][0]:
            tensor = F.pad(tensor, (*[0, 0] * (len(shape) - 1), 0, missing))
        tensor = tensor.unflatten(1, (parts, shape[0]))
        if not torch.compiler.is_compiling():
            self.view(index).index_copy_(0, targets, tensor)
            return
        # Number by number: compiled code that writes through a view copies the whole cache.
        ones = [1] * len(shape)
        which, blocks = torch.arange(parts).view(-1, *ones), targets.view(-1, 1, *ones)
        self.cache[which, blocks, torch.arange(begin, end).view(shape)] = tensor


def mix(mixer: Any, x: Tensor, step: StepContext) -> Tensor:
    """Compute a mixer: x [T, hidden_size] -> same.

    Args: mixer: called with rows of x and their States. It has the `index` of its layer, and the `shapes` of its state.
    """
    sequences, cache = divide(step.attention_of(mixer)), state_of(step.kv_caches[mixer.index], x.dtype)
    if len(sequences) == 1:
        return mixer(x, States(cache, mixer.shapes, sequences[0]))
    parts = zip(x.split([part.num_rows for part in sequences]), sequences, strict=True)
    return torch.cat([mixer(rows, States(cache, mixer.shapes, part)) for rows, part in parts])


def state_of(kv_cache: Tensor, dtype: torch.dtype) -> Tensor:
    """A view of one layer's cache, with states in place of K and V: [parts, num_blocks, numbers], in float32 at least.

    Args: dtype: of the model.
    """
    return kv_cache.flatten(2).view(torch.promote_types(dtype, torch.float32))


def divided(shapes: Sequence[tuple[int, ...]], parts: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """Where the tensors of a state are in each part of a block: the first number, the number after the last one, and
    the shape."""
    places, end = [], 0
    for first, *rest in shapes:
        shape = -(-first // parts), *rest
        begin, end = end, end + prod(shape)
        places.append((begin, end, shape))
    return places


def causal_conv(x: Tensor, before: Tensor, weight: Tensor, prompts: Prompts | None) -> tuple[Tensor, Tensor]:
    """Convolve each sequence of a step with its own past, each channel by itself.

    Args:
        x: [T, channels], the sequences one after the other.
        before: [B, channels, width - 1], the inputs before the step.
        weight: [channels, width]; the last column is for the present token.
        prompts: as in Sequences.

    Returns: [T, channels], and `before` of the next step.
    """
    past = weight.shape[1] - 1
    if prompts is None:  # a token of each sequence
        taps = [*before.to(x.dtype).unbind(2), x]
        out = x * weight[:, past]
        for index in range(past):
            out += taps[index] * weight[:, index]
        return out, torch.cat((before, x[..., None].to(before.dtype)), dim=2)[..., 1:]
    sequence, starts, device = prompts.sequence, prompts.starts, x.device
    inputs = torch.cat((before.transpose(1, 2).flatten(0, 1).to(x.dtype), x))

    def rows(sequence: Tensor, token: Tensor) -> Tensor:
        """Where inputs are, by the number of a token in its sequence; negative: before the step."""
        here = before.shape[0] * past + starts[sequence] + token
        return torch.where(token < 0, (sequence + 1) * past + token, here)

    tokens = torch.arange(x.shape[0], device=device) - starts[sequence]
    out = x * weight[:, past]
    for index in range(past):
        out += inputs[rows(sequence, tokens - (past - index))] * weight[:, index]
    numbers, window = torch.arange(before.shape[0], device=device), torch.arange(past, device=device)
    after = inputs[rows(numbers[:, None], prompts.kept[:, None] - past + window)]
    return out, after.transpose(1, 2).to(before.dtype)


class ShortConv(nn.Module):
    """out_proj(c * conv(b * x)), where b, c and x are products of the input. The convolution sees the last tokens."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        (self.channels, past), *_ = config.state
        self.index, self.shapes = index, config.state
        self.in_proj = Linear(self.channels, 3 * self.channels, config.mlp_bias)
        self.conv = nn.Conv1d(self.channels, self.channels, past + 1, groups=self.channels, bias=config.mlp_bias)
        self.out_proj = Linear(self.channels, self.channels, config.mlp_bias)

    def forward(self, x: Tensor, states: States) -> Tensor:
        """x [T, hidden_size] -> same"""
        b, c, x = self.in_proj(x).chunk(3, dim=-1)
        mixed, after = causal_conv(b * x, states.read(0), self.conv.weight[:, 0], states.sequences.prompts)
        states.write(0, after)
        return self.out_proj(c * (mixed if self.conv.bias is None else mixed + self.conv.bias))


def fit_block_size(
    config: ModelConfig, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype, on_gpu: bool = False
) -> int:
    """`block_size`, or its least multiple by a power of two whose blocks have room for the state of a layer.

    If the state is K and V of an encoder's positions, a block also has room for a whole sequence. On a CPU, its size is
    then a multiple of MANY, which makes vector loops of compiled code efficient.

    Args: dtype: of activations.
    """
    if not config.state:
        return block_size
    token_bytes = config.num_kv_heads * config.head_dim * kv_dtype.itemsize  # of K, or of V
    itemsize = torch.promote_types(dtype, torch.float32).itemsize
    state_bytes = divided(config.state, config.kv_parts)[-1][1] * itemsize  # where K would be, or V
    if config.encoded_positions:
        num_tokens = max(config.encoded_positions, config.max_position_embeddings)
        if not on_gpu:
            return -(-num_tokens // (size := lcm(block_size, MANY))) * size
        state_bytes = num_tokens * token_bytes
    while block_size * token_bytes < state_bytes or block_size * token_bytes % itemsize:
        block_size *= 2
    return block_size
