"""Granite 3 (2024): Llama's layer with four multipliers, for embeddings, attention, residuals and logits."""

from typing import Any

from torch import Tensor, nn

from nanopage.checks.fields import Fields
from nanopage.config.model import ModelConfig
from nanopage.models.decoder import DecoderLayer, SelfAttention

ARCHITECTURES = ("GraniteForCausalLM",)
GGUF_ARCHITECTURE = "granite"
GGUF_REORDERED = True
SCALES_EMBEDS = True  # embeddings in prompts are multiplied, too
GGUF_FIELDS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    return {
        "attention_bias": fields.flag("attention_bias"),
        "mlp_bias": fields.flag("mlp_bias"),
        "attention_scale": fields.number("attention_multiplier", 1.0),
        "embedding_scale": fields.number("embedding_multiplier", 1.0),
        "residual_scale": fields.number("residual_multiplier", 1.0),
        "logit_divisor": fields.number("logits_scaling", 1.0),
    }


def make_layer(config: ModelConfig, index: int, mlp: nn.Module | None = None) -> DecoderLayer:
    """Args: mlp: as of DecoderLayer."""
    return GraniteLayer(config, SelfAttention(config, index, config.attention_bias, config.attention_bias), mlp)


class GraniteLayer(DecoderLayer):
    """Multiplies what attention and the feed-forward layer add to x."""

    def __init__(self, config: ModelConfig, self_attn: SelfAttention, mlp: nn.Module | None = None):
        super().__init__(config, self_attn, mlp)
        self.residual_scale = config.residual_scale

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.self_attn.o_proj(attended.flatten(1)) * self.residual_scale
        return x + self.mlp(self.post_attention_layernorm(x)) * self.residual_scale
