"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's layer with biases on q, k and v, whatever config.json says."""

from typing import Any

from nanopage.checks.fields import Fields
from nanopage.config.model import ModelConfig
from nanopage.models.decoder import DecoderLayer, SelfAttention

ARCHITECTURES = ("Qwen2ForCausalLM",)
GGUF_ARCHITECTURE = "qwen2"


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    return {
        "num_kv_heads": fields.size("num_key_value_heads"),
        "sliding_windows": fields.windows(4096, from_layer=28) if fields.flag("use_sliding_window") else None,
    }


def make_layer(config: ModelConfig, index: int) -> DecoderLayer:
    return DecoderLayer(config, SelfAttention(config, index, qkv_bias=True))
