"""LFM2 (Liquid AI 2025): most layers have a gated short convolution in place of attention, and keep its last inputs."""

import re
from typing import Any

from torch import Tensor, nn

from nanopage.checks.fields import GENERATE, Fields
from nanopage.config.model import ModelConfig
from nanopage.families.qwen3 import GGUF_TENSORS as GGUF_NORMS
from nanopage.files.model_files import shown
from nanopage.layers.linear import Linear
from nanopage.layers.mlp import MLP
from nanopage.models.decoder import DecoderLayer, SelfAttention
from nanopage.reading.rope import read_rope
from nanopage.recurrent.states import MixerLayer, States, causal_conv
from nanopage.state.layer_kinds import STATE

ARCHITECTURES = ("Lfm2ForCausalLM",)
INSTEAD = GENERATE
GGUF_ARCHITECTURE = "lfm2"
GGUF_TENSORS = GGUF_NORMS | {
    "token_embd_norm": "model.norm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
GGUF_FIELDS = {"shortconv.l_cache": "conv_L_cache", "attention.head_count_kv": "layer_types"}
NAMES = {  # here: in checkpoints
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
}


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    num_layers, hidden_size = fields.size("num_hidden_layers"), fields.size("hidden_size")
    kinds, width = _kinds(fields, num_layers), fields.size("conv_L_cache", 3)
    return {
        "num_kv_heads": fields.size("num_key_value_heads", 8),
        "intermediate_size": _intermediate_size(fields),
        "rms_norm_eps": fields.number("norm_eps", 1e-5),
        "rope": read_rope(fields, default_theta=1e6),
        "tie_word_embeddings": fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True)),
        "sliding_windows": tuple(STATE if kind == "conv" else None for kind in kinds),
        "state": ((hidden_size, width - 1),) if "conv" in kinds else (),
        "head_norms": True,
        "mlp_bias": fields.flag("conv_bias"),
        "undivided": "its convolutions are not divided",
    }


def _kinds(fields: Fields, num_layers: int) -> list[str]:
    indexes = fields.values.get("full_attn_idxs")
    attention = range(num_layers) if indexes is None else indexes
    if not isinstance(attention, list | range):
        raise fields.error("full_attn_idxs", f"must be a list of layers, got {shown(attention)}")
    kinds = ["full_attention" if index in attention else "conv" for index in range(num_layers)]
    kinds = fields.values.get("layer_types") or kinds
    return fields.kinds("layer_types", kinds, num_layers, ("full_attention", "conv"))


def _intermediate_size(fields: Fields) -> int:
    size = fields.size("block_ff_dim", fields.size("intermediate_size", 12288))
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    multiple = fields.size("block_multiple_of", 256)
    size = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple


def complete_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of config.json that files lack."""
    return {"norm_eps": config["rms_norm_eps"], "block_auto_adjust_ff_dim": False}


def rename(name: str, config: ModelConfig) -> str:
    """The name of a checkpoint's tensor in this model."""
    for here, there in NAMES.items():
        name = name.replace(f".{there}.", f".{here}.")
    return re.sub("^model.embedding_norm", "model.norm", name)


def make_layer(config: ModelConfig, index: int) -> nn.Module:
    mlp = MLP(config.hidden_size, config.intermediate_size)
    if config.sliding_windows[index] != STATE:
        return DecoderLayer(config, SelfAttention(config, index), mlp)
    return MixerLayer(config, "conv", ShortConv(config, index), mlp)


class ShortConv(nn.Module):
    """out_proj(c * conv(b * x)), where b, c and x are products of the input. The convolution sees the last tokens."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        (self.channels, past), *_ = config.state
        self.index, self.shapes = index, config.state
        self.in_proj = Linear(self.channels, 3 * self.channels, config.mlp_bias)
        self.conv = nn.Conv1d(self.channels, self.channels, past + 1, groups=self.channels, bias=config.mlp_bias)
        self.out_proj = Linear(self.channels, self.channels, config.mlp_bias)

    def forward(self, x: Tensor, states: States) -> Tensor:
        """x [T, hidden_size] -> same"""
        b, c, x = self.in_proj(x).chunk(3, dim=-1)
        mixed, after = causal_conv(b * x, states.read(0), self.conv.weight[:, 0], states.sequences.prompts)
        states.write(0, after)
        return self.out_proj(c * (mixed if self.conv.bias is None else mixed + self.conv.bias))
