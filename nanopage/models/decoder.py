"""A decoder-only transformer: the part that all model families share.

token ids ─▶ embed_tokens ─▶ layers ─▶ hidden states ─▶ norm ─▶ lm_head ─▶ logits

a layer:   x = x + attention(norm(x))
           x = x + mlp(norm(x))
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nanopage.config.model import ModelConfig
from nanopage.layers.attention import Scoring, StepContext
from nanopage.layers.embedding import Embedding
from nanopage.layers.linear import Linear
from nanopage.layers.mlp import MLP
from nanopage.layers.norm import RMSNorm
from nanopage.layers.rotary import RotaryEmbedding, rotate


class Decoder(nn.Module):
    """Computes the hidden states of tokens. `logits` makes logits of them.

    Args:
        layers: `config.num_layers` decoder layers.
    """

    def __init__(self, config: ModelConfig, layers: Sequence[nn.Module]):
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions: Embedding | None = None  # of a family that learns an embedding of each position
        full_dim = config.head_dim if config.full_heads is None else config.full_heads[1]
        self.rotary = RotaryEmbedding((full_dim, config.rope), (config.head_dim, config.other_rope))
        self.layers = nn.ModuleList(layers)
        self.norm = make_norm(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.embedding_scale = config.embedding_scale
        self.logit_divisor, self.logit_softcap = config.logit_divisor, config.logit_softcap
        self.encoders: dict[str, nn.Module] = {}  # by kind of item; payloads -> [N, length, hidden_size]
        self.score: Linear | None = None  # the head of a model that classifies, instead of `lm_head`

    def forward(self, input_ids: Tensor, step: StepContext) -> Tensor:
        """Compute the hidden states of the tokens of a step, the output of the last layer.

        Args: input_ids: int64 [T].
        Returns: [T, hidden_size], or [len(step.rows), hidden_size]: the last layer drops the tokens that nothing is
            sampled from, once their K and V are written.
        """
        x = self.embed(input_ids, step.positions, step.embeds)
        step.rotations = self.rotary(step.positions, x.dtype)
        return self.run_layers(x, step)

    def run_layers(self, x: Any, step: StepContext) -> Tensor:
        """The only loop over layers in Python. x: what the first layer takes."""
        for index, layer in enumerate(self.layers):
            if index in step.taps:
                step.taps[index] = self.hidden_of(x, step)
            x = layer(x, step)
        if len(self.layers) in step.taps:
            step.taps[len(self.layers)] = x
        return x

    def hidden_of(self, x: Any, step: StepContext) -> Tensor:
        """The hidden states in what a layer takes, [T, hidden_size]."""
        return x

    def take(self, decoder: "Decoder") -> None:
        """Use the modules of another decoder."""
        self.embed_tokens, self.rotary, self.layers = decoder.embed_tokens, decoder.rotary, decoder.layers
        self.norm, self.lm_head, self.score = decoder.norm, decoder.lm_head, decoder.score
        self.embed_positions = decoder.embed_positions
        self.embedding_scale = decoder.embedding_scale
        self.logit_divisor, self.logit_softcap = decoder.logit_divisor, decoder.logit_softcap

    def embed(self, input_ids: Tensor, positions: Tensor, embeds: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """input_ids and positions [T] -> the input of the first layer, [T, hidden_size]. embeds: as in StepContext"""
        x = self.embed_tokens(input_ids)
        if self.embedding_scale != 1:
            x = x * torch.full((), self.embedding_scale, dtype=x.dtype, device=x.device)  # rounded, as in transformers
        x = x if self.embed_positions is None else x + self.embed_positions(positions)
        return x if embeds is None else x.index_copy(0, *embeds)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden_size] -> [T, vocab_size]"""
        return scale_logits(self.lm_head(self.norm(hidden)), self.logit_divisor, self.logit_softcap)


def make_norm(config: ModelConfig, size: int | None = None) -> RMSNorm:
    """A norm of this family. size: of the last dimension. None: hidden_size."""
    return RMSNorm(size or config.hidden_size, config.rms_norm_eps, config.norm_offset)


def scale_logits(logits: Tensor, divisor: float, softcap: float) -> Tensor:
    """What some families do with the logits of the head (see ModelConfig)."""
    if divisor != 1:
        logits = logits / divisor
    return softcap * torch.tanh(logits / softcap) if softcap else logits


class DecoderLayer(nn.Module):
    """Attention and a feed-forward layer, each after a norm. Args: mlp: None: a feed-forward layer with a gate."""

    def __init__(self, config: ModelConfig, self_attn: "SelfAttention", mlp: nn.Module | None = None):
        super().__init__()
        self.input_layernorm = make_norm(config)
        self.self_attn = self_attn
        self.post_attention_layernorm = make_norm(config)
        self.mlp = mlp or MLP(config.hidden_size, config.intermediate_size, config.mlp_bias, config.activation)

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """x [T, hidden_size] -> same; of the last layer, only the rows that `step.keep` keeps"""
        q, k, v = self.before(x, *step.rotations[self.self_attn.rope])
        step.write(self.self_attn, k, v)
        attended = step.attend(self.self_attn, q)
        return self.after(*step.keep(self.self_attn, x, attended))

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The part before attention: q, k and v, rotated (see `SelfAttention.rotated`)."""
        return self.self_attn.rotated(self.heads(x), cos, sin)

    def heads(self, x: Tensor) -> Tensor:
        """The part before the rotation: q, k and v of every head (see `SelfAttention.heads`)."""
        return self.self_attn.heads(self.input_layernorm(x))

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        """The part after attention: x [T, hidden_size] and attended [T, num_heads, head_dim] -> [T, hidden_size]."""
        x = x + self.self_attn.o_proj(attended.flatten(1))
        return x + self.mlp(self.post_attention_layernorm(x))


class SelfAttention(nn.Module):
    """The projections around grouped-query attention with rotary positions.

    Args:
        index: of the layer, and of its part of the KV cache.
        qkv_bias, o_bias: whether the projections to q, k and v, and the output projection, have biases.
    """

    def __init__(self, config: ModelConfig, index: int, qkv_bias: bool = False, o_bias: bool = False):
        super().__init__()
        self.index = index
        self.num_heads, (self.num_kv_heads, self.head_dim) = config.num_heads, config.heads[index]
        window = config.sliding_windows[index]
        self.rope = int(index in config.other_rope_layers)  # in StepContext.rotations
        # The loader adds the scales that a checkpoint has for K and V.
        self.scoring = Scoring(window, config.attention_scale, config.attention_softcap)
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = Linear(config.hidden_size, parts, qkv_bias)
        self.o_proj = Linear(q_size, config.hidden_size, o_bias)
        self.has_norms = config.head_norms
        if self.has_norms:
            self.q_norm, self.k_norm = make_norm(config, self.head_dim), make_norm(config, self.head_dim)

    def heads(self, x: Tensor) -> Tensor:
        """Compute the heads of q, of k and of v, before the rotation: [T, num_heads + 2 * num_kv_heads, head_dim]."""
        return self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))

    def head_norms(self) -> tuple[RMSNorm, RMSNorm] | None:
        """The norms of each head of q and of each head of k before the rotation. None: there are none."""
        return (self.q_norm, self.k_norm) if self.has_norms else None

    def rotated(self, heads: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normalize and rotate `heads`: q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim].

        On a GPU, `kernels.rotate_and_write` computes the same for compiled layers.
        """
        norms = self.head_norms()
        if norms is None:
            qk, v = heads.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
            q, k = rotate(qk, cos, sin).split([self.num_heads, self.num_kv_heads], dim=1)
            return q, k, v
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        q_norm, k_norm = norms
        return rotate(q_norm(q), cos, sin), rotate(k_norm(k), cos, sin), v
