"""Qwen3 (Yang et al. 2025): Llama's layer with an RMSNorm on every head of q and k before the rotation."""

from typing import Any

from nanopage.checks.fields import Fields
from nanopage.families import qwen2
from nanopage.models import llama

ARCHITECTURES = ("Qwen3ForCausalLM",)
GGUF_ARCHITECTURE = "qwen3"
make_layer = llama.make_layer


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    return qwen2.read_config(fields, architecture) | {
        "head_dim": fields.size("head_dim", 128),
        "attention_bias": fields.flag("attention_bias"),
        "head_norms": True,
    }
