"""A decoder-only transformer: the part that all model families share.

token ids ─▶ embed_tokens ─▶ layers ─▶ hidden states ─▶ norm ─▶ lm_head ─▶ logits

a layer:   x = x + attention(norm(x))
           x = x + mlp(norm(x))
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nanopage.config import ModelConfig
from nanopage.layers.attention import Attention
from nanopage.layers.embedding import Embedding
from nanopage.layers.linear import Linear
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
        self.rotary = RotaryEmbedding(config.head_dim, config.rope)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        attention: Attention,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Compute the hidden states of T tokens, the output of the last layer.

        Args:
            input_ids, positions: [T].
            kv_cache: [layers, 2, blocks, kv_heads, head_dim * block_size]; written in place.
            attention: the attention of this step.
            rows: return only these rows. The last layer then drops the others after attention. None: all.

        Returns: [T, hidden_size], or [len(rows), hidden_size].
        """
        x = self.embed_tokens(input_ids)
        cos, sin = self.rotary(positions, x.dtype)
        last = len(self.layers) - 1
        for index, (layer, cache) in enumerate(zip(self.layers, kv_cache.unbind(0), strict=True)):
            x = layer(x, cos, sin, cache, attention, rows if index == last else None)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden_size] -> [T, vocab_size]"""
        return self.lm_head(self.norm(hidden))


class DecoderLayer(nn.Module):
    """Attention and a feed-forward layer, each after a norm."""

    def __init__(self, config: ModelConfig, self_attn: "SelfAttention", mlp: nn.Module):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    @property
    def window(self) -> int | None:
        """How many of the last tokens attention sees; None for all."""
        return self.self_attn.window

    @property
    def kv_scales(self) -> tuple[float, float]:
        """The scales of K and V in a cache in fp8 (see kernels/pages.py)."""
        return self.self_attn.kv_scales

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_cache: Tensor,
        attention: Attention,
        rows: Tensor | None = None,
    ) -> Tensor:
        q, k, v = self.before(x, cos, sin)
        attention.write(k, v, kv_cache, self.kv_scales)
        attended = attention.attend(q, kv_cache, self.window, self.kv_scales)
        if rows is not None:
            x, attended = x[rows], attended[rows]
        return self.after(x, attended)

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
        index: of the layer.
        qkv_bias, o_bias: whether the projections to q, k and v, and the output projection, have biases.
    """

    def __init__(self, config: ModelConfig, index: int, qkv_bias: bool = False, o_bias: bool = False):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.window = config.sliding_windows[index]
        self.kv_scales = (1.0, 1.0)  # the loader sets those of the checkpoint
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = Linear(config.hidden_size, parts, qkv_bias)
        self.o_proj = Linear(q_size, config.hidden_size, o_bias)

    def heads(self, x: Tensor) -> Tensor:
        """Compute the heads of q, of k and of v, before the rotation: [T, num_heads + 2 * num_kv_heads, head_dim]."""
        return self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))

    def head_norms(self) -> tuple[RMSNorm, RMSNorm] | None:
        """The norms of each head of q and of each head of k before the rotation. None: there are none."""
        return None

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


def meta_model(config: ModelConfig) -> Decoder:
    """Build the model without memory for weights (on the meta device). Raises: ValueError for an unknown family."""
    from nanopage.models import find_family

    family = find_family(config.architecture)
    if family is None:
        raise ValueError(f"architecture {config.architecture!r} is not supported")
    with torch.device("meta"):
        return Decoder(config, [family.make_layer(config, index) for index in range(config.num_layers)])
