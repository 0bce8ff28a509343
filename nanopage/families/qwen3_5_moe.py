"""Qwen3.5 with experts (Qwen 2026): Qwen3.5 with a mixture of experts as in Qwen2-MoE in each layer."""

from typing import Any

from nanopage.checks.fields import GENERATE, Fields
from nanopage.experts.config import read_qwen_experts
from nanopage.families.qwen3_5 import (  # noqa: F401 (what is the same without experts)
    GGUF_FIELDS,
    GGUF_NORM_OFFSET,
    GGUF_PARTIAL_ROPE,
    GGUF_SECTIONS,
    GGUF_TENSORS,
    complete_gguf,
    make_layer,
    rename,
    text_fields,
)
from nanopage.families.qwen3_next import read_layers

ARCHITECTURES = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
INSTEAD = GENERATE
GGUF_ARCHITECTURE = "qwen35moe"


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    return read_layers(fields, num_kv_heads=2) | {
        "intermediate_size": fields.size("moe_intermediate_size", 512),  # no layer is without experts
        "experts": read_qwen_experts(fields, (256, 8, 512, 512)),
    }
