"""Qwen3-Next (Qwen 2025): three of four layers are Gated DeltaNets in place of attention, whose output has a gate, too.
Experts as in Qwen2-MoE. Drafts may come from the tensors mtp.* (speculation/heads.py)."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanopage.checks.fields import GENERATE, Fields
from nanopage.config.model import ModelConfig
from nanopage.experts.config import read_qwen_experts
from nanopage.families import qwen2_moe
from nanopage.families.qwen2_moe import make_mlp
from nanopage.layers.linear import Linear
from nanopage.models.decoder import DecoderLayer, SelfAttention
from nanopage.reading.names import renamed
from nanopage.reading.rope import read_rope
from nanopage.recurrent.gated_delta_net import GatedDeltaNet, InterleavedDeltaNet, PartlyInterleavedDeltaNet
from nanopage.recurrent.states import GGUF_MIXER, MixerLayer
from nanopage.state.layer_kinds import STATE

ARCHITECTURES = ("Qwen3NextForCausalLM",)
INSTEAD = GENERATE
rename = partial(renamed, names={r"^(model\.)?mtp\.": None})
GGUF_ARCHITECTURE = "qwen3next"
GGUF_TENSORS = {  # also those of Qwen3.5
    **qwen2_moe.GGUF_TENSORS,
    **{there: f"linear_attn.{here}" for there, here in GGUF_MIXER.items()},
    "attn_gate": "linear_attn.in_proj_z",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "post_attention_norm": "post_attention_layernorm",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
}
GGUF_NORM_OFFSET = 1.0
GGUF_PARTIAL_ROPE = True
GGUF_FIELDS = {
    "full_attention_interval": "full_attention_interval",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.inner_size": "mamba_d_ssm",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.time_step_rank": "linear_num_value_heads",
}


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    return read_layers(fields, num_kv_heads=2) | {
        "intermediate_size": fields.size("intermediate_size", 5632),
        "experts": read_qwen_experts(fields, (512, 10, 512, 512), fields.flag("norm_topk_prob", True)),
    }


def read_layers(fields: Fields, num_kv_heads: int) -> dict[str, Any]:
    """What Qwen3-Next and Qwen3.5 have in common. Args: num_kv_heads: if config.json does not say."""
    num_layers, interval = fields.size("num_hidden_layers"), fields.size("full_attention_interval", 4)
    kinds = fields.values.get("layer_types")
    if kinds is None:
        kinds = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(num_layers)]
    fields.kinds("layer_types", kinds, num_layers, ("full_attention", "linear_attention"))
    key_heads, key_dim = fields.size("linear_num_key_heads", 16), fields.size("linear_key_head_dim", 128)
    heads, value_dim = fields.size("linear_num_value_heads", 32), fields.size("linear_value_head_dim", 128)
    if heads % key_heads:
        raise fields.error("linear_num_value_heads", f"{heads} is not a multiple of linear_num_key_heads={key_heads}")
    if not fields.flag("attn_output_gate", True):
        raise fields.unsupported("attn_output_gate", "false")
    channels, past = 2 * key_heads * key_dim + heads * value_dim, fields.size("linear_conv_kernel_dim", 4) - 1
    rotary = replace(fields, values={"partial_rotary_factor": 0.25} | fields.values)
    return {
        "num_kv_heads": fields.size("num_key_value_heads", num_kv_heads),
        "head_dim": fields.size("head_dim", 256),
        "attention_bias": fields.flag("attention_bias"),
        "head_norms": True,
        "norm_offset": 1.0,
        "rope": read_rope(rotary, partial=True),
        "sliding_windows": tuple(STATE if kind == "linear_attention" else None for kind in kinds),
        "state": ((channels, past), (heads, key_dim, value_dim)),
        "undivided": "its linear attention is not divided",
    }


def complete_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of config.json that GGUF files have in another form."""
    return {"linear_value_head_dim": config.get("mamba_d_ssm", 0) // config.get("linear_num_value_heads", 1)}


def make_layer(config: ModelConfig, index: int, delta_net: type[GatedDeltaNet] | None = None) -> nn.Module:
    """Args: delta_net: None: that of Qwen3-Next."""
    mlp = make_mlp(config, index)
    if config.sliding_windows[index] != STATE:
        return GatedLayer(config, GatedAttention(config, index), mlp)
    delta_net = delta_net or (PartlyInterleavedDeltaNet if config.from_gguf else InterleavedDeltaNet)
    return MixerLayer(config, "linear_attn", delta_net(config, index), mlp)


class GatedLayer(DecoderLayer):
    """A layer with a gate on the output of attention."""

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        part: Any = self.self_attn
        gate = part.q_and_gate(self.input_layernorm(x))[:, :, 1]
        x = x + part.o_proj((attended * gate.sigmoid()).flatten(1))
        return x + self.mlp(self.post_attention_layernorm(x))


class GatedAttention(SelfAttention):
    """Attention with a norm on every head of q and k. q_proj has q and the gate of each head; `after` computes it once
    more, because a layer is compiled in two parts."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index, config.attention_bias, config.attention_bias)
        parts = self.qkv_proj.parts
        self.q_proj = Linear(config.hidden_size, 2 * parts.pop("q_proj"), config.attention_bias)
        self.qkv_proj = Linear(config.hidden_size, parts, config.attention_bias)

    def q_and_gate(self, x: Tensor) -> Tensor:
        """x [T, hidden_size], normalized -> [T, heads, 2, head_dim]"""
        return self.q_proj(x).unflatten(-1, (-1, 2, self.head_dim))

    def heads(self, x: Tensor) -> Tensor:
        return torch.cat((self.q_and_gate(x)[:, :, 0], super().heads(x)), dim=1)
