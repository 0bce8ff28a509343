"""GLM-4 (Zhipu AI 2024): rotates neighbouring dimensions of the first half of each head. Checkpoints have gate and up
in one matrix. GLM-4-0414 (2025), Glm4ForCausalLM, also has norms after attention and after the feed-forward layer."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanopage.checks.fields import Fields
from nanopage.config.model import ModelConfig
from nanopage.config.rope import RopeConfig
from nanopage.layers.linear import Linear
from nanopage.layers.mlp import MLP
from nanopage.models.decoder import DecoderLayer, SelfAttention, make_norm
from nanopage.reading.rope import read_rope

ARCHITECTURES = ("Glm4ForCausalLM", "GlmForCausalLM")
GGUF_ARCHITECTURE = "glm4"
GGUF_TENSORS = {
    "ffn_up": "mlp.gate_up_proj",
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
GGUF_PARTIAL_ROPE = True


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    return {
        "num_kv_heads": fields.size("num_key_value_heads", 2),
        "head_dim": fields.size("head_dim", 128),
        "attention_bias": fields.flag("attention_bias", True),
        "rms_norm_eps": fields.number("rms_norm_eps", 1.5625e-7),
        "rope": read_half_rope(fields),
        "undivided": "its checkpoints have gate and up in one matrix",
    }


def read_half_rope(fields: Fields) -> RopeConfig:
    """A rope that rotates half of each head, unless config.json says otherwise."""
    return read_rope(replace(fields, values={"partial_rotary_factor": 0.5} | fields.values), partial=True)


def make_layer(config: ModelConfig, index: int) -> DecoderLayer:
    mlp = MLP(config.hidden_size, config.intermediate_size, activation=config.activation)
    mlp.gate_up_proj = Linear(config.hidden_size, mlp.gate_up_proj.out_features)
    kind = Glm4Layer if config.architecture == "Glm4ForCausalLM" else DecoderLayer
    return kind(config, GlmAttention(config, index, config.attention_bias), mlp)


class Glm4Layer(DecoderLayer):
    """Norms precede and follow attention and the feed-forward layer."""

    def __init__(self, config: ModelConfig, self_attn: SelfAttention, mlp: MLP):
        super().__init__(config, self_attn, mlp)
        self.post_self_attn_layernorm, self.post_mlp_layernorm = make_norm(config), make_norm(config)

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.post_self_attn_layernorm(self.self_attn.o_proj(attended.flatten(1)))
        return x + self.post_mlp_layernorm(self.mlp(self.post_attention_layernorm(x)))


class GlmAttention(SelfAttention):
    """Moves the dimensions of q and k that are rotated together to the places where `rotate` expects them. The products
    of q and k stay the same."""

    def __init__(self, config: ModelConfig, index: int, qkv_bias: bool):
        super().__init__(config, index, qkv_bias)
        rotated = config.rope.num_rotated(self.head_dim)
        self.sizes = [rotated, self.head_dim - rotated]

    def heads(self, x: Tensor) -> Tensor:
        qk, v = super().heads(x).split([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        pairs, others = qk.split(self.sizes, dim=-1)
        halves = pairs.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return torch.cat((torch.cat((halves, others), dim=-1), v), dim=1)
