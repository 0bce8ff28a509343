"""GLM-4.5 (Zhipu AI 2025), also GLM-4.6: a part of each head is rotated, and mixtures of experts are chosen as in
DeepSeek-V3. The first layers have a plain feed-forward layer. Drafts may come from the layer after
the last one, which predicts a further token (speculation/heads.py)."""

from dataclasses import replace
from typing import Any

from nanopage.checks.fields import Fields
from nanopage.config.model import ModelConfig
from nanopage.experts.config import read_grouped_experts
from nanopage.families import deepseek, qwen2_moe
from nanopage.families.glm4 import read_half_rope

ARCHITECTURES = ("Glm4MoeForCausalLM",)
GGUF_ARCHITECTURE = "glm4moe"
make_layer = qwen2_moe.make_layer
GGUF_TENSORS = deepseek.GGUF_TENSORS | {"post_attention_norm": "post_attention_layernorm"}
GGUF_PARTIAL_ROPE = True
GGUF_GATINGS, GGUF_NORMALIZED = (0, 2), False
GGUF_FIELDS = deepseek.GGUF_EXPERTS
GGUF_FLAGS = {"use_qk_norm": "self_attn.q_norm.weight"}
DEFAULTS = {
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
}


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    return {
        "num_kv_heads": fields.size("num_key_value_heads", 8),
        "attention_bias": fields.flag("attention_bias"),
        "head_norms": fields.flag("use_qk_norm"),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-5),
        "rope": read_half_rope(fields),
        "experts": read_grouped_experts(replace(fields, values=DEFAULTS | fields.values), corrected=True),
    }


def rename(name: str, config: ModelConfig) -> str | None:
    """The name of a checkpoint's tensor in this model. None: it has none."""
    return None if name.startswith(f"model.layers.{config.num_layers}.") else name
