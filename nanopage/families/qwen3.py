"""Qwen3 (Yang et al. 2025): Llama's layer with an RMSNorm on every head of q and k before the rotation."""

from typing import Any

from nanopage.checks.fields import Fields
from nanopage.config.model import ModelConfig
from nanopage.models import llama
from nanopage.models.decoder import DecoderLayer

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
        "head_norms": True,
        "sliding_windows": windows or (None,) * num_layers,
    }


def make_layer(config: ModelConfig, index: int) -> DecoderLayer:
    return llama.make_layer(config, index)
