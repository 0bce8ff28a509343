"""Granite 4 (IBM 2025): Granite 3's layer, with Mamba-2's mixer in place of attention in most layers. Some models have
a mixture of experts beside the feed-forward layer. Most have no rotary embeddings."""

from dataclasses import asdict, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from nanopage.checks.fields import GENERATE, Fields
from nanopage.config.model import ModelConfig
from nanopage.config.rope import UNROTATED
from nanopage.experts.config import read_experts
from nanopage.experts.moe import MixtureOfExperts
from nanopage.families import granite
from nanopage.files.model_files import shown
from nanopage.layers.linear import Linear
from nanopage.layers.mlp import MLP
from nanopage.reading.names import renamed
from nanopage.reading.rope import read_rope
from nanopage.recurrent.mamba2 import Mamba2Mixer, read_mixer
from nanopage.recurrent.states import GGUF_MIXER, MixerLayer
from nanopage.state.layer_kinds import STATE

ARCHITECTURES = ("GraniteMoeHybridForCausalLM",)
INSTEAD = GENERATE
SCALES_EMBEDS = granite.SCALES_EMBEDS
GGUF_ARCHITECTURE = "granitehybrid"
GGUF_TENSORS = {
    "ffn_gate_inp": "mlp.mixture.gate",
    "ffn_gate_exps": "mlp.mixture.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.mixture.experts.{}.up_proj",
    "ffn_down_exps": "mlp.mixture.experts.{}.down_proj",
    "ffn_gate_shexp": "mlp.gate_proj",
    "ffn_up_shexp": "mlp.up_proj",
    "ffn_down_shexp": "mlp.down_proj",
} | {there: f"mamba.{here}" for there, here in GGUF_MIXER.items()}
GGUF_REORDERED = True
GGUF_MIXER_KIND = "mamba"
GGUF_FIELDS = granite.GGUF_FIELDS | {
    "attention.head_count_kv": "layer_types",
    "expert_shared_feed_forward_length": "shared_intermediate_size",
    "rope.scaling.finetuned": "is_rotated",
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.group_count": "mamba_n_groups",
    "ssm.inner_size": "mamba_d_ssm",
    "ssm.state_size": "mamba_d_state",
    "ssm.time_step_rank": "mamba_n_heads",
}
GGUF_FLAGS = {"mamba_proj_bias": "mamba.in_proj.bias", "mamba_conv_bias": "mamba.conv1d.bias"}
SIZES = {  # as in mamba2.py
    "num_heads": ("mamba_n_heads", 128),
    "head_dim": ("mamba_d_head", 64),
    "num_groups": ("mamba_n_groups", 1),
    "state_size": ("mamba_d_state", 256),
    "width": ("mamba_d_conv", 4),
    "expand": ("mamba_expand", 2),
}
KINDS = {"mamba": STATE, "linear_attention": STATE, "attention": None, "full_attention": None}
MAX_POSITIONS = 2**17  # of Granite 4; llama.cpp's converter writes 2^20 for all models
NAMES = {  # in checkpoints: here
    r"\.shared_mlp\.input_linear\.": ".mlp.gate_up_proj.",
    r"\.shared_mlp\.output_linear\.": ".mlp.down_proj.",
    r"\.block_sparse_moe\.router\.(layer\.)?": ".mlp.mixture.gate.",
    r"\.block_sparse_moe\.experts\.": ".mlp.mixture.experts.",
}
rename = partial(renamed, names=NAMES)


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    windows = _windows(fields, fields.size("num_hidden_layers"))
    position = fields.values.get("position_embedding_type")
    if position not in (None, "nope", "rope"):
        raise fields.unsupported("position_embedding_type", shown(position), ["nope", "rope"])
    special = granite.read_config(fields, architecture) | {
        "intermediate_size": fields.size("shared_intermediate_size", 1024),
        "rope": read_rope(fields) if position == "rope" else UNROTATED,
        "sliding_windows": windows,
        "undivided": "its checkpoints have gate and up in one matrix",
    }
    if STATE in windows:
        mixer = read_mixer(fields, SIZES, fields.flag("mamba_proj_bias"), fields.flag("mamba_conv_bias", True))
        special |= {"mixer": asdict(mixer), "state": mixer.state, "undivided": "its mixers are not divided"}
    if fields.values.get("num_local_experts") != 0:
        num_experts, num_chosen = fields.size("num_local_experts", 8), fields.size("num_experts_per_tok", 2)
        experts = read_experts(fields, num_experts, num_chosen, fields.size("intermediate_size", 11008))
        special["experts"] = replace(experts, place="mlp.mixture.experts")
    return special


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    for name in ("layer_types", "layers_block_type"):
        if (kinds := fields.values.get(name)) is not None:
            return tuple(KINDS[kind] for kind in fields.kinds(name, kinds, num_layers, (*KINDS,)))
    return (STATE,) * num_layers


def complete_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of config.json that GGUF files have in another form."""
    return {
        "max_position_embeddings": min(config["max_position_embeddings"], MAX_POSITIONS),
        "mamba_d_head": None,
        "mamba_expand": config.get("mamba_d_ssm", 0) // config["hidden_size"],
        "num_local_experts": config.get("num_local_experts", 0),
        "position_embedding_type": "rope" if config.get("is_rotated", True) else "nope",
        "shared_intermediate_size": config.get("shared_intermediate_size", config["intermediate_size"]),
    }


def make_layer(config: ModelConfig, index: int) -> nn.Module:
    mlp = SharedMLP(config)
    if config.sliding_windows[index] == STATE:
        return MixerLayer(config, "mamba", Mamba2Mixer(config, index), mlp)
    return granite.make_layer(config, index, mlp)


class SharedMLP(MLP):
    """A feed-forward layer whose gate and up are one matrix of safetensors files. A mixture's output may be added."""

    def __init__(self, config: ModelConfig):
        super().__init__(config.hidden_size, config.intermediate_size, activation=config.activation)
        if not config.from_gguf:
            self.gate_up_proj = Linear(config.hidden_size, self.gate_up_proj.out_features)
        self.mixture = None if config.experts is None else MixtureOfExperts(config.hidden_size, config.experts)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.mixture is None else y + self.mixture(x)
