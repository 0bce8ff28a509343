"""Qwen3 (Yang et al. 2025): Llama's layer with an RMSNorm on every head of q and k before the rotation."""

from typing import Any

from nanopage.checks.fields import Fields
from nanopage.config.model import ModelConfig
from nanopage.layers.norm import RMSNorm
from nanopage.models.decoder import DecoderLayer, SelfAttention

ARCHITECTURES = ("Qwen3ForCausalLM",)
GGUF_ARCHITECTURE = "qwen3"
GGUF_TENSORS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    num_layers = fields.size("num_hidden_layers")
    windows = fields.windows(num_layers, default=4096, from_layer=28) if fields.flag("use_sliding_window") else None
    return {
        "num_kv_heads": fields.size("num_key_value_heads"),
        "head_dim": fields.size("head_dim", 128),
        "attention_bias": fields.flag("attention_bias"),
        "sliding_windows": windows or (None,) * num_layers,
    }


def make_layer(config: ModelConfig, index: int) -> DecoderLayer:
    return DecoderLayer(config, Qwen3Attention(config, index))


class Qwen3Attention(SelfAttention):
    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index, config.attention_bias, config.attention_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def head_norms(self) -> tuple[RMSNorm, RMSNorm]:
        return self.q_norm, self.k_norm
