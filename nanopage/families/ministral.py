"""Ministral (Mistral AI 2024) and Ministral 3 (2025): Mistral's layer. Ministral 3 also multiplies q by a number that
grows with the position beyond the original context, as in Llama 4. Attention to a long context stays sharp."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from nanopage.checks.fields import Fields
from nanopage.config.model import ModelConfig
from nanopage.config.rope import RopeConfig
from nanopage.layers.rotary import rotate
from nanopage.models import llama
from nanopage.models.decoder import DecoderLayer, SelfAttention
from nanopage.reading.rope import read_rope

ARCHITECTURES = ("Ministral3ForCausalLM", "MinistralForCausalLM")
GGUF_ARCHITECTURE = "mistral3"
GGUF_REORDERED = True
GGUF_FIELDS = {
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
    "attention.temperature_scale": "llama_4_scaling_beta",
}
DEFAULT_ROPE = {  # of Ministral 3
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    num_layers, num_heads = fields.size("num_hidden_layers"), fields.size("num_attention_heads")
    num_kv_heads = num_heads if "num_key_value_heads" in fields.values else 8  # null or missing
    read = {"num_kv_heads": fields.size("num_key_value_heads", num_kv_heads)}
    if architecture == "MinistralForCausalLM":
        return read | {"sliding_windows": fields.windows(default=4096)}
    windows = fields.windows(default=None, kinds=["sliding_attention"] * num_layers)
    if windows != fields.windows(default=None):
        raise fields.error("layer_types", "must be sliding_attention for each layer if there is a sliding_window")
    head_dim = fields.size("hidden_size") // num_heads if "head_dim" in fields.values else 128
    return read | {
        "sliding_windows": windows,
        "head_dim": fields.size("head_dim", head_dim),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-5),
        "rope": _read_rope(fields),
    }


def _read_rope(fields: Fields) -> RopeConfig:
    names = [name for name in ("rope_parameters", "rope_scaling") if fields.values.get(name)]
    if not names:
        names, fields = ["rope_parameters"], replace(fields, values=fields.values | {"rope_parameters": DEFAULT_ROPE})
    rope = read_rope(fields)
    if rope.rope_type not in ("yarn", "default"):
        raise fields.error(names[0], f"of type {rope.rope_type!r} is not supported for Ministral 3")
    numbers = Fields(rope.params, f"{fields.source}: {names[0]}")
    beta = numbers.number("llama_4_scaling_beta")
    return replace(rope, temperature=(beta, numbers.number("original_max_position_embeddings")) if beta else None)


def complete_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of config.json that GGUF files have elsewhere or lack. As in llama.cpp, mscale is 1. The rope is plain in
    files of Mistral Small, which may have this architecture."""
    scaling, beta = config.get("rope_scaling", {"type": "default"}), config.get("llama_4_scaling_beta", 0.0)
    more = {"mscale": 1.0, "mscale_all_dim": config.get("mscale_all_dim"), "llama_4_scaling_beta": beta}
    return {"rope_scaling": scaling | more}


def make_layer(config: ModelConfig, index: int) -> DecoderLayer:
    if config.architecture == "MinistralForCausalLM":
        return llama.make_layer(config, index)
    return DecoderLayer(config, Ministral3Attention(config, index))


class Ministral3Attention(SelfAttention):
    def rotated(self, heads: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `SelfAttention.rotated`. With a temperature, q and k have rotations of their own (see RotaryEmbedding),
        which the kernel for a GPU knows."""
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return rotate(q, cos[:, :1], sin[:, :1]), rotate(k, cos[:, -1:], sin[:, -1:]), v
