"""Exercise of chapter 6, solved."""

from typing import Any

from nanopage.checks.fields import Fields
from nanopage.config.model import ModelConfig
from nanopage.layers.mlp import MLP
from nanopage.models.decoder import DecoderLayer, SelfAttention

ARCHITECTURES = ("SeedOssForCausalLM",)
GGUF_ARCHITECTURE = "seed_oss"


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """Fields of ModelConfig that are particular to the family."""
    if fields.flag("attention_out_bias"):
        raise fields.error("attention_out_bias", "must be false: a bias of the output projection is not supported")
    return {
        "num_kv_heads": fields.size("num_key_value_heads", 8),
        "head_dim": fields.size("head_dim", 128),
        "attention_bias": fields.flag("attention_bias", True),
        "mlp_bias": fields.flag("mlp_bias"),
        "sliding_windows": (None,) * fields.size("num_hidden_layers"),
    }


def make_layer(config: ModelConfig, index: int) -> DecoderLayer:
    """The decoder layer number `index`."""
    attention = SelfAttention(config, index, qkv_bias=config.attention_bias)
    mlp = MLP(config.hidden_size, config.intermediate_size, config.mlp_bias, config.activation)
    return DecoderLayer(config, attention, mlp)
