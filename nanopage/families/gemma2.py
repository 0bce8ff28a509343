"""Gemma 2 (Gemma Team 2024): layers with four norms, soft caps on scores and logits, and windows in every other layer.

Norms multiply by 1 + weight, the feed-forward layer is GeGLU, and embeddings are multiplied by sqrt(hidden_size).
"""

import math
from typing import Any

from torch import Tensor

from nanopage.checks.fields import Fields
from nanopage.config.model import ModelConfig
from nanopage.models.decoder import DecoderLayer, SelfAttention, make_norm

ARCHITECTURES = ("Gemma2ForCausalLM",)
GGUF_ARCHITECTURE = "gemma2"
GGUF_TENSORS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GGUF_FIELDS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
GGUF_NORM_OFFSET = 1.0  # files have 1 + weight


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    return gemma_config(fields, every=2) | {
        "attention_softcap": fields.optional_number("attn_logit_softcapping", 50.0) or 0.0,
        "logit_softcap": fields.optional_number("final_logit_softcapping", 30.0) or 0.0,
    }


def gemma_config(fields: Fields, every: int, window: int = 4096) -> dict[str, Any]:
    """What Gemma 2 and later share. every: as of `Fields.windows`. window: the default of sliding_window."""
    if fields.flag("use_bidirectional_attention") if fields.values.get("use_bidirectional_attention") else False:
        raise fields.unsupported("use_bidirectional_attention", "true")
    return {
        "num_kv_heads": fields.size("num_key_value_heads", 4),
        "head_dim": fields.size("head_dim", 256),
        "attention_bias": fields.flag("attention_bias"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", True),
        "sliding_windows": fields.windows(window, every=every),
        "activation": fields.activation("hidden_activation", "gelu_pytorch_tanh"),
        "norm_offset": 1.0,
        "attention_scale": fields.number("query_pre_attn_scalar", 256) ** -0.5,
        "embedding_scale": math.sqrt(fields.size("hidden_size")),
    }


def complete_gguf(config: dict[str, Any], layers_27b: int = 46) -> dict[str, Any]:
    """Fields of config.json that GGUF files lack. The attention of the 27B model has another scale. As in llama.cpp,
    the model is known by its number of layers."""
    is_27b = config["num_hidden_layers"] == layers_27b
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return {"query_pre_attn_scalar": scalar}


def make_layer(config: ModelConfig, index: int) -> DecoderLayer:
    return Gemma2Layer(config, SelfAttention(config, index, config.attention_bias, config.attention_bias))


class Gemma2Layer(DecoderLayer):
    """Norms precede and follow attention and the feed-forward layer."""

    def __init__(self, config: ModelConfig, self_attn: SelfAttention):
        super().__init__(config, self_attn)
        self.pre_feedforward_layernorm = make_norm(config)
        self.post_feedforward_layernorm = make_norm(config)

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn.o_proj(attended.flatten(1)))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
