"""Phi-3 (Abdin et al. 2024) and Phi-4-mini: Llama's layer, with q, k and v in one matrix of checkpoints, and gate and
up in another. Phi-4-mini rotates only a part of each head. Models with long contexts have a rope of type longrope."""

from typing import Any

from nanopage.checks.fields import Fields
from nanopage.config.model import ModelConfig
from nanopage.layers.linear import Linear
from nanopage.layers.mlp import MLP
from nanopage.models.decoder import DecoderLayer, SelfAttention
from nanopage.reading.rope import read_rope

ARCHITECTURES = ("Phi3ForCausalLM",)
GGUF_ARCHITECTURE = "phi3"
GGUF_TENSORS = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
GGUF_PARTIAL_ROPE = True
GGUF_FIELDS = {"attention.sliding_window": "sliding_window"}


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    rope = read_rope(fields, partial=True)
    if rope.rope_type not in ("default", "longrope"):
        raise fields.unsupported("rope_scaling", f"of type {rope.rope_type!r} of Phi-3")
    return {
        "sliding_windows": fields.windows(default=None),
        "rope": rope,
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-5),
        "undivided": "its checkpoints have q, k and v in one matrix",
    }


def make_layer(config: ModelConfig, index: int) -> DecoderLayer:
    attention = SelfAttention(config, index)
    mlp = MLP(config.hidden_size, config.intermediate_size, activation=config.activation)
    attention.qkv_proj = Linear(config.hidden_size, attention.qkv_proj.out_features)
    mlp.gate_up_proj = Linear(config.hidden_size, mlp.gate_up_proj.out_features)
    return DecoderLayer(config, attention, mlp)
