"""GPT-OSS (OpenAI 2025): attention with sinks, windows in every other layer, and experts with biases.

The activation of experts is clamped, and their gate and up projections alternate. Checkpoints have the matrices of
experts as MXFP4 (quantization/mxfp4.py), or as floats, transposed. GGUF files have gate and up apart.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanopage.checks.fields import GENERATE, Fields, read_dtype
from nanopage.config.model import ModelConfig
from nanopage.experts.activation import clamped_swiglu
from nanopage.experts.config import EXPERT_TENSORS, read_experts
from nanopage.experts.moe import MixtureOfExperts
from nanopage.layers.attention import Scoring
from nanopage.layers.linear import Linear
from nanopage.layers.mlp import MLP
from nanopage.models.decoder import DecoderLayer, SelfAttention
from nanopage.reading.names import renamed
from nanopage.reading.rope import read_rope

ARCHITECTURES = ("GptOssForCausalLM",)
INSTEAD = GENERATE
rename = partial(renamed, names={r"\.mlp\.router\.": ".mlp.gate."})
GGUF_ARCHITECTURE = "gpt-oss"
GGUF_TENSORS = EXPERT_TENSORS | {
    "attn_sinks.weight": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
}
GGUF_FIELDS = {"attention.sliding_window": "sliding_window"}
YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    num_chosen, size = fields.size("num_experts_per_tok", 4), fields.size("intermediate_size")
    experts = read_experts(fields, fields.size("num_local_experts", 128), num_chosen, size)
    scaling = fields.values.get("rope_scaling") or YARN
    completed = replace(fields, values={"torch_dtype": "bfloat16"} | fields.values | {"rope_scaling": scaling})
    return {
        "dtype": read_dtype(completed),
        "num_kv_heads": fields.size("num_key_value_heads", 8),
        "head_dim": fields.size("head_dim", 64),
        "attention_bias": fields.flag("attention_bias", True),
        "sliding_windows": fields.windows(128, every=2),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-5),
        "rope": read_rope(completed, default_theta=150000.0),
        "experts": replace(experts, swiglu=(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0))),
    }


def complete_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of config.json that GGUF files have under other names, or lack."""
    scaling = config.get("rope_scaling", {"rope_type": "default"})
    size = config.get("moe_intermediate_size", config["intermediate_size"])
    return {"intermediate_size": size, "rope_scaling": scaling | {"truncate": False}}


def make_layer(config: ModelConfig, index: int) -> DecoderLayer:
    assert config.experts is not None and config.experts.swiglu is not None
    expert = partial(GptOssExpert, swiglu=config.experts.swiglu, from_gguf=config.from_gguf)
    mixture = MixtureOfExperts(config.hidden_size, config.experts, expert)
    mixture.gate.bias = nn.Parameter(torch.empty(config.experts.num_experts))
    return DecoderLayer(config, GptOssAttention(config, index), mixture)


class GptOssAttention(SelfAttention):
    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index, config.attention_bias, config.attention_bias)
        self.sinks = nn.Parameter(torch.empty(self.num_heads))

    @property
    def scoring(self) -> Scoring:
        return replace(self._scoring, sinks=self.sinks)

    @scoring.setter
    def scoring(self, scoring: Scoring) -> None:
        self._scoring = scoring


class TransposedLinear(Linear):
    """Its matrix is transposed in files, where the parts divide the inputs. Its bias has no parts."""

    def slots(self, parameter: Tensor) -> dict[str, Tensor]:
        if parameter.dim() == 1:
            return {"": parameter}
        return dict(zip(self.parts, parameter.T.chunk(len(self.parts)), strict=True))


class GptOssExpert(MLP):
    """Rows of gate_up_proj alternate between gate and up. In GGUF files, the rows of gate come first."""

    def __init__(self, hidden_size: int, intermediate_size: int, swiglu: tuple[float, float], from_gguf: bool):
        super().__init__(hidden_size, intermediate_size, bias=True)
        self.swiglu, self.from_gguf = swiglu, from_gguf
        if not from_gguf:
            self.gate_up_proj = TransposedLinear(hidden_size, self.gate_up_proj.parts, bias=True)
            self.down_proj = TransposedLinear(intermediate_size, hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up_proj(x)
        if self.from_gguf:
            gate_up = gate_up.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return self.down_proj(clamped_swiglu(gate_up, *self.swiglu))
