"""Mamba-2 (Dao & Gu 2024), also Codestral Mamba (Mistral 2024): each layer is a norm and a mixer that keeps a state.
There is no attention, and no feed-forward layer.
"""

from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanopage.checks.fields import GENERATE, Fields
from nanopage.config.model import ModelConfig, num_numbers
from nanopage.config.rope import UNROTATED
from nanopage.layers.attention import StepContext
from nanopage.models.decoder import make_norm
from nanopage.reading.names import renamed
from nanopage.recurrent.mamba2 import Mamba2Mixer, read_mixer
from nanopage.recurrent.states import GGUF_MIXER, mix
from nanopage.state.layer_kinds import STATE

ARCHITECTURES = ("Mamba2ForCausalLM",)
INSTEAD = GENERATE
GGUF_ARCHITECTURE = "mamba2"
GGUF_TENSORS = {"attn_norm": "norm"} | {there: f"mixer.{here}" for there, here in GGUF_MIXER.items()}
GGUF_FIELDS = {
    "ssm.conv_kernel": "conv_kernel",
    "ssm.group_count": "n_groups",
    "ssm.inner_size": "mamba_d_ssm",
    "ssm.state_size": "state_size",
    "ssm.time_step_rank": "num_heads",
}
GGUF_FLAGS = {"use_bias": "mixer.in_proj.bias", "use_conv_bias": "mixer.conv1d.bias"}
SIZES = {  # names in config.json, and defaults
    "num_heads": ("num_heads", 128),
    "head_dim": ("head_dim", 64),
    "num_groups": ("n_groups", 8),
    "state_size": ("state_size", 128),
    "width": ("conv_kernel", 4),
    "expand": ("expand", 2),
}
NAMES = {  # in checkpoints: here. Mistral's own names begin with "model.backbone."
    r"^(model\.)?backbone\.": "model.",
    r"^model\.embeddings?\.": "model.embed_tokens.",
    r"^model\.norm_f\.": "model.norm.",
}
rename = partial(renamed, names=NAMES)
# Such models have no limit, and transformers knows none. Mistral has tested Codestral Mamba with so many tokens.
MAX_POSITIONS = 2**18
# A block holds states and no K and V, so its size is free: this many tokens take as much as a state if both are in one
# dtype, or twice as many if K and V would be in half of the bits.
BLOCK, HEAD_DIM = 32, 16


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py. config.json may have a limit of its own, `max_position_embeddings`."""
    num_layers = fields.size("num_hidden_layers")
    mixer = read_mixer(fields, SIZES, fields.flag("use_bias"), fields.flag("use_conv_bias", True))
    num_heads = -(-num_numbers(mixer.state) // (2 * BLOCK * HEAD_DIM))
    return {
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": HEAD_DIM,
        "intermediate_size": 0,
        "max_position_embeddings": fields.size("max_position_embeddings", MAX_POSITIONS),
        "rms_norm_eps": fields.number("layer_norm_epsilon", 1e-5),
        "rope": UNROTATED,
        "sliding_windows": (STATE,) * num_layers,
        "state": mixer.state,
        "mixer": asdict(mixer),
        "residual_in_float32": fields.flag("residual_in_fp32", True),
        "undivided": "its mixers are not divided",
    }


def complete_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of config.json that GGUF files have under other names."""
    expand = config.get("mamba_d_ssm", 0) // config["hidden_size"]
    length = min(config["max_position_embeddings"], MAX_POSITIONS)  # the converter writes 2^20 for all models
    names = {"expand": expand, "layer_norm_epsilon": config["rms_norm_eps"], "max_position_embeddings": length}
    return names | {"head_dim": None}


def make_layer(config: ModelConfig, index: int) -> nn.Module:
    return Mamba2Layer(config, index)


class Mamba2Layer(nn.Module):
    """x + mixer(norm(x)). The sum may be in float32 from the first layer to the last."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        self.norm, self.mixer = make_norm(config), Mamba2Mixer(config, index)
        self.in_float32 = config.residual_in_float32

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """As `DecoderLayer.forward`."""
        dtype = self.norm.weight.dtype
        x, mixed = step.keep(self.mixer, x, mix(self.mixer, self.norm(x.to(dtype)), step))
        if self.in_float32:
            x = x.to(torch.promote_types(dtype, torch.float32))
        x = x + mixed
        return x.to(dtype) if self.mixer.index + 1 == len(step.kinds) else x
