"""Llama (Touvron et al. 2023; Llama 3, 2024): also SmolLM2, TinyLlama, and Mistral with its sliding window.

Grouped-query attention with rotary positions, and a SwiGLU feed-forward layer.
"""

from typing import Any

from nanopage.checks.fields import Fields
from nanopage.config.model import ModelConfig
from nanopage.models.decoder import DecoderLayer, SelfAttention

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
GGUF_ARCHITECTURE = "llama"
GGUF_REORDERED = True  # rows of q and k


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """Fields of ModelConfig that are particular to the family. Missing ones have transformers' defaults, except that
    Mistral needs num_key_value_heads."""
    mistral, num_heads = architecture == "MistralForCausalLM", fields.size("num_attention_heads")
    return {
        "num_kv_heads": fields.size("num_key_value_heads", None if mistral else num_heads),
        "attention_bias": fields.flag("attention_bias"),
        "mlp_bias": fields.flag("mlp_bias"),
        "sliding_windows": fields.windows(default=4096) if mistral else None,
    }


def make_layer(config: ModelConfig, index: int) -> DecoderLayer:
    attention = SelfAttention(config, index, config.attention_bias, config.attention_bias)
    return DecoderLayer(config, attention)
