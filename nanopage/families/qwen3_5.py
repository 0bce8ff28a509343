"""Qwen3.5 (Qwen 2026): the layers of Qwen3-Next without experts. Only the text model: the tensors of images and videos
(visual.*) and those that predict a token more (mtp.*) are left out. mrope_section
divides a head among three positions of a token. They are equal for text, so this rope is an ordinary one."""

import re
from typing import Any

from torch import nn

from nanopage.checks.fields import GENERATE, Fields
from nanopage.config.model import ModelConfig
from nanopage.families import qwen3_next
from nanopage.families.qwen3_next import complete_gguf, make_mixer_layer, read_layers  # noqa: F401
from nanopage.recurrent.gated_delta_net import GatedDeltaNet

ARCHITECTURES = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
INSTEAD = GENERATE
GGUF_ARCHITECTURE = "qwen35"
GGUF_TENSORS = qwen3_next.GGUF_TENSORS | {
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
}
GGUF_NORM_OFFSET = 1.0
GGUF_PARTIAL_ROPE = GGUF_SECTIONS = True
GGUF_FIELDS = qwen3_next.GGUF_FIELDS


def text_fields(fields: Fields) -> Fields:
    """The fields of the text model, from a config.json that has them in text_config, beside a vision_config."""
    text = fields.object("text_config").values
    tied = {name: fields.values[name] for name in ("tie_word_embeddings",) if name in fields.values}
    values = fields.values | text | tied
    for name in ("rope_parameters", "rope_scaling"):
        rope = Fields(values, fields.source).object(name).values
        values[name] = {key: value for key, value in rope.items() if key not in ("mrope_section", "mrope_interleaved")}
    return Fields(values, fields.source)


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    return read_layers(fields, num_kv_heads=4)


def rename(name: str, config: ModelConfig) -> str | None:
    """As in qwen3_next.py."""
    if re.match(r"(model\.)?(mtp|visual)\.", name):
        return None
    return re.sub(r"^model\.language_model\.", "model.", name)


def make_layer(config: ModelConfig, index: int) -> nn.Module:
    return make_mixer_layer(config, index, GatedDeltaNet)
