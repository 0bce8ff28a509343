"""Qwen2-MoE (Yang et al. 2024), also Qwen1.5-MoE: Qwen2's layer with a mixture of experts and a shared expert."""

from typing import Any

from nanopage.checks.fields import Fields
from nanopage.config.model import ModelConfig
from nanopage.experts.config import EXPERT_TENSORS, read_qwen_experts
from nanopage.experts.moe import MixtureOfExperts
from nanopage.layers.mlp import MLP
from nanopage.models.decoder import DecoderLayer, SelfAttention

ARCHITECTURES = ("Qwen2MoeForCausalLM",)
GGUF_ARCHITECTURE = "qwen2moe"
GGUF_TENSORS = EXPERT_TENSORS | {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
GGUF_NORMALIZED = False


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    windows = None
    if fields.flag("use_sliding_window"):
        if fields.values.get("layer_types") is None:  # versions of transformers disagree about which layers it means
            raise fields.error("use_sliding_window", "true needs layer_types")
        windows = fields.windows(default=4096)
    return {
        "num_kv_heads": fields.size("num_key_value_heads", 16),
        "attention_bias": fields.flag("qkv_bias", True),
        "sliding_windows": windows,
        "experts": read_qwen_experts(fields, (60, 4, 1408, 5632), normalize=fields.flag("norm_topk_prob")),
    }


def make_layer(config: ModelConfig, index: int) -> DecoderLayer:
    attention = SelfAttention(config, index, qkv_bias=config.attention_bias)
    return DecoderLayer(config, attention, make_mlp(config, index))


def make_mlp(config: ModelConfig, index: int) -> MixtureOfExperts | MLP:
    """The mixture of experts of a layer, or its plain feed-forward layer."""
    if config.experts is not None and config.experts.layers[index]:
        return MixtureOfExperts(config.hidden_size, config.experts)
    return MLP(config.hidden_size, config.intermediate_size, activation=config.activation)
