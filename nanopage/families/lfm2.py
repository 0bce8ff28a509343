"""LFM2 (Liquid AI 2025): most layers have a gated short convolution in place of attention, and keep its last inputs."""

from functools import partial
from typing import Any

from torch import nn

from nanopage.checks.fields import GENERATE, Fields
from nanopage.config.model import ModelConfig
from nanopage.files.model_files import shown
from nanopage.layers.mlp import MLP
from nanopage.models.decoder import DecoderLayer, SelfAttention
from nanopage.reading.names import renamed
from nanopage.reading.rope import read_rope
from nanopage.recurrent.states import MixerLayer, ShortConv
from nanopage.state.layer_kinds import STATE

ARCHITECTURES = ("Lfm2ForCausalLM",)
INSTEAD = GENERATE
GGUF_ARCHITECTURE = "lfm2"
GGUF_TENSORS = {
    "token_embd_norm": "model.norm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
GGUF_FIELDS = {"shortconv.l_cache": "conv_L_cache", "attention.head_count_kv": "layer_types"}
NAMES = {  # in checkpoints: here
    r"^model\.embedding_norm\.": "model.norm.",
    r"\.operator_norm\.": ".input_layernorm.",
    r"\.ffn_norm\.": ".post_attention_layernorm.",
    r"\.feed_forward\.w1\.": ".mlp.gate_proj.",
    r"\.feed_forward\.w3\.": ".mlp.up_proj.",
    r"\.feed_forward\.w2\.": ".mlp.down_proj.",
    r"\.self_attn\.out_proj\.": ".self_attn.o_proj.",
    r"\.self_attn\.(q|k)_layernorm\.": r".self_attn.\1_norm.",
}
rename = partial(renamed, names=NAMES)


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    num_layers, indexes = fields.size("num_hidden_layers"), fields.values.get("full_attn_idxs")
    if not isinstance(indexes, list | None):
        raise fields.error("full_attn_idxs", f"must be a list of layers, got {shown(indexes)}")
    kinds = fields.values.get("layer_types") or [
        "full_attention" if indexes is None or index in indexes else "conv" for index in range(num_layers)
    ]
    fields.kinds("layer_types", kinds, num_layers, ("full_attention", "conv"))
    inner = fields.size("block_ff_dim", fields.size("intermediate_size", 12288))
    if fields.flag("block_auto_adjust_ff_dim", True):
        multiple = fields.size("block_multiple_of", 256)
        inner = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
        inner = -(-inner // multiple) * multiple
    past = fields.size("conv_L_cache", 3) - 1
    return {
        "num_kv_heads": fields.size("num_key_value_heads", 8),
        "intermediate_size": inner,
        "rms_norm_eps": fields.number("norm_eps", 1e-5),
        "rope": read_rope(fields, default_theta=1e6),
        "tie_word_embeddings": fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True)),
        "sliding_windows": tuple(STATE if kind == "conv" else None for kind in kinds),
        "state": ((fields.size("hidden_size"), past),) if "conv" in kinds else (),
        "head_norms": True,
        "mlp_bias": fields.flag("conv_bias"),
        "undivided": "its convolutions are not divided",
    }


def complete_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of config.json that files lack."""
    return {"norm_eps": config["rms_norm_eps"], "block_auto_adjust_ff_dim": False}


def make_layer(config: ModelConfig, index: int) -> nn.Module:
    mlp = MLP(config.hidden_size, config.intermediate_size)
    if config.sliding_windows[index] != STATE:
        return DecoderLayer(config, SelfAttention(config, index), mlp)
    return MixerLayer(config, "conv", ShortConv(config, index), mlp)
