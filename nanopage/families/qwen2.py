"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's layer with biases on q, k and v, whatever config.json says."""

from typing import Any

from nanopage.checks.fields import Fields
from nanopage.config.model import ModelConfig
from nanopage.models.decoder import DecoderLayer, SelfAttention

ARCHITECTURES = ("Qwen2ForCausalLM",)
GGUF_ARCHITECTURE = "qwen2"
GGUF_TENSORS: dict[str, str] = {}


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    num_layers = fields.size("num_hidden_layers")
    windows = fields.windows(num_layers, default=4096, from_layer=28) if fields.flag("use_sliding_window") else None
    return {
        "num_kv_heads": fields.size("num_key_value_heads"),
        "sliding_windows": windows or (None,) * num_layers,
    }


def make_layer(config: ModelConfig, index: int) -> DecoderLayer:
    attention = SelfAttention(config, index, qkv_bias=True)
    return DecoderLayer(config, attention)
