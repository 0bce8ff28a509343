"""Mixtral (Jiang et al. 2024): Mistral's layer with a mixture of experts."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from nanopage.checks.fields import Fields
from nanopage.config.model import ModelConfig
from nanopage.experts.config import read_experts
from nanopage.experts.moe import MixtureOfExperts
from nanopage.layers.linear import Linear
from nanopage.layers.mlp import MLP
from nanopage.models.decoder import DecoderLayer, SelfAttention

ARCHITECTURES = ("MixtralForCausalLM",)
GGUF_ARCHITECTURE = "llama with experts"  # "llama" in the file, which has llama.expert_count, too
GGUF_REORDERED = True
GGUF_TENSORS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    num_experts, num_chosen = fields.size("num_local_experts", 8), fields.size("num_experts_per_tok", 2)
    experts = read_experts(fields, num_experts, num_chosen, fields.size("intermediate_size"))
    return {
        "num_kv_heads": fields.size("num_key_value_heads", 8),
        "sliding_windows": fields.windows(default=None),
        "experts": replace(experts, place="block_sparse_moe.experts", parts=("w1", "w3", "w2")),
    }


def make_layer(config: ModelConfig, index: int) -> DecoderLayer:
    return MixtralLayer(config, index)


class MixtralLayer(DecoderLayer):
    def __init__(self, config: ModelConfig, index: int):
        assert config.experts is not None
        mixture = MixtureOfExperts(config.hidden_size, config.experts, MixtralExpert)
        super().__init__(config, SelfAttention(config, index), mixture)
        del self.mlp
        self.block_sparse_moe = mixture

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.self_attn.o_proj(attended.flatten(1))
        return x + self.block_sparse_moe(self.post_attention_layernorm(x))


class MixtralExpert(MLP):
    """An MLP whose matrices have other names."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__(hidden_size, intermediate_size)
        self.gate_up_proj = Linear(hidden_size, {"w1": intermediate_size, "w3": intermediate_size})
        self.down_proj = Linear(intermediate_size, {"w2": hidden_size})
