"""Qwen3-MoE (Yang et al. 2025): Qwen3's layer with a mixture of experts."""

from typing import Any

from nanopage.checks.fields import Fields
from nanopage.config.model import ModelConfig
from nanopage.experts.config import read_experts
from nanopage.families.qwen2_moe import make_mlp
from nanopage.models.decoder import DecoderLayer, SelfAttention

ARCHITECTURES = ("Qwen3MoeForCausalLM",)
GGUF_ARCHITECTURE = "qwen3moe"
GGUF_TENSORS = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    num_layers = fields.size("num_hidden_layers")
    # Some versions of transformers write num_local_experts.
    name = "num_experts" if fields.values.get("num_experts") is not None else "num_local_experts"
    return {
        "num_kv_heads": fields.size("num_key_value_heads", 4),
        "attention_bias": fields.flag("attention_bias"),
        "head_norms": True,
        "sliding_windows": fields.windows(num_layers, default=4096)
        if fields.flag("use_sliding_window")
        else (None,) * num_layers,
        "experts": read_experts(
            fields,
            num_experts=fields.size(name, 128),
            num_chosen=fields.size("num_experts_per_tok", 8),
            intermediate_size=fields.size("moe_intermediate_size", 768),
            normalize=fields.flag("norm_topk_prob"),
        ),
    }


def make_layer(config: ModelConfig, index: int) -> DecoderLayer:
    attention = SelfAttention(config, index, config.attention_bias, config.attention_bias)
    return DecoderLayer(config, attention, make_mlp(config, index))
