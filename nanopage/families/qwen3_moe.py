"""Qwen3-MoE (Yang et al. 2025): Qwen3's layer with a mixture of experts."""

from typing import Any

from nanopage.checks.fields import Fields
from nanopage.config.model import ModelConfig
from nanopage.experts.config import EXPERT_TENSORS, read_experts
from nanopage.families.qwen2_moe import make_mlp
from nanopage.models.decoder import DecoderLayer, SelfAttention

ARCHITECTURES = ("Qwen3MoeForCausalLM",)
GGUF_ARCHITECTURE = "qwen3moe"
GGUF_TENSORS = EXPERT_TENSORS


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    # Some versions of transformers write num_local_experts.
    name = "num_experts" if fields.values.get("num_experts") is not None else "num_local_experts"
    num_experts, num_chosen = fields.size(name, 128), fields.size("num_experts_per_tok", 8)
    size, normalize = fields.size("moe_intermediate_size", 768), fields.flag("norm_topk_prob")
    return {
        "num_kv_heads": fields.size("num_key_value_heads", 4),
        "attention_bias": fields.flag("attention_bias"),
        "head_norms": True,
        "sliding_windows": fields.windows(default=4096) if fields.flag("use_sliding_window") else None,
        "experts": read_experts(fields, num_experts, num_chosen, size, normalize=normalize),
    }


def make_layer(config: ModelConfig, index: int) -> DecoderLayer:
    attention = SelfAttention(config, index, config.attention_bias, config.attention_bias)
    return DecoderLayer(config, attention, make_mlp(config, index))
