"""OLMo 2 (2025): Llama's layer with norms after attention and after the feed-forward layer, and norms of q and k."""

from typing import Any

import torch
from torch import Tensor

from nanopage.checks.fields import Fields
from nanopage.config.model import ModelConfig
from nanopage.models.decoder import DecoderLayer, SelfAttention, make_norm

ARCHITECTURES = ("Olmo2ForCausalLM",)
GGUF_ARCHITECTURE = "olmo2"
GGUF_TENSORS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    return {
        "attention_bias": fields.flag("attention_bias"),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-5),
        "norm_offset": 0.0,
        "undivided": "it normalizes all heads of q together",
    }


def make_layer(config: ModelConfig, index: int) -> DecoderLayer:
    return Olmo2Layer(config, Olmo2Attention(config, index))


class Olmo2Layer(DecoderLayer):
    """Norms follow attention and the feed-forward layer. None precedes them."""

    def __init__(self, config: ModelConfig, self_attn: SelfAttention):
        super().__init__(config, self_attn)
        del self.input_layernorm
        self.post_feedforward_layernorm = make_norm(config)

    def heads(self, x: Tensor) -> Tensor:
        return self.self_attn.heads(x)

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn.o_proj(attended.flatten(1)))
        return x + self.post_feedforward_layernorm(self.mlp(x))


class Olmo2Attention(SelfAttention):
    """q and k are normalized before the rotation, each over all of its heads together."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index, config.attention_bias, config.attention_bias)
        self.sizes = list(self.qkv_proj.parts.values())
        self.q_norm, self.k_norm = make_norm(config, self.sizes[0]), make_norm(config, self.sizes[1])

    def heads(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x).split(self.sizes, dim=-1)
        return torch.cat((self.q_norm(q), self.k_norm(k), v), dim=-1).unflatten(-1, (-1, self.head_dim))
