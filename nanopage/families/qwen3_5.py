"""Qwen3.5 (Qwen 2026), dense or with experts: the layers of Qwen3-Next. Only the text model: the tensors of images and
videos (visual.*) and those that predict a token more (mtp.*) are left out. The three positions of a token of text,
which mrope_section divides a head among, are equal, so this rope is an ordinary one."""

import re
from typing import Any

from torch import nn

from nanopage.checks.fields import Fields
from nanopage.config.model import ModelConfig
from nanopage.experts.config import read_experts
from nanopage.families.qwen3_next import make_mixer_layer, read_layers
from nanopage.recurrent.gated_delta_net import GatedDeltaNet

EXPERTS = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
ARCHITECTURES = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", *EXPERTS)
GGUF_ARCHITECTURE = ""
GGUF_TENSORS: dict[str, str] = {}


def text_fields(fields: Fields) -> Fields:
    """The fields of the text model, from a config.json that has them in text_config, beside a vision_config."""
    text = fields.object("text_config").values
    tied = {name: fields.values[name] for name in ("tie_word_embeddings",) if name in fields.values}
    return Fields(fields.values | text | tied, fields.source)


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    ropes = {}
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.object(name).values
        ropes[name] = {key: value for key, value in rope.items() if key not in ("mrope_section", "mrope_interleaved")}
    fields = Fields(fields.values | ropes, fields.source)
    if architecture not in EXPERTS:
        return read_layers(fields, num_kv_heads=4)
    return read_layers(fields, num_kv_heads=2) | {
        "intermediate_size": fields.size("moe_intermediate_size", 512),  # no layer is without experts
        "experts": read_experts(
            fields,
            num_experts=fields.size("num_experts", 256),
            num_chosen=fields.size("num_experts_per_tok", 8),
            intermediate_size=fields.size("moe_intermediate_size", 512),
            shared_size=fields.size("shared_expert_intermediate_size", 512),
        ),
    }


def rename(name: str, config: ModelConfig) -> str | None:
    """As in qwen3_next.py."""
    if re.match(r"(model\.)?(mtp|visual)\.", name):
        return None
    return re.sub(r"^model\.language_model\.", "model.", name)


def make_layer(config: ModelConfig, index: int) -> nn.Module:
    return make_mixer_layer(config, index, GatedDeltaNet)
