"""AdaptedDecoder: a decoder whose layers add the products of adapters (adapters/layers.py).

It computes what `Decoder.forward` computes, and hands every linear layer of the decoder layers what it needs to know of
the tokens' adapters. Without adapters, engines run a plain Decoder.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nanopage.adapters.layers import LoRALinear, TokenAdapters
from nanopage.layers.attention import Attention
from nanopage.layers.mlp import MLP
from nanopage.models.decoder import Decoder, DecoderLayer

PLACES = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


def check_layers(decoder: Decoder) -> None:
    """Raises: ValueError for a family whose layers are not those of decoder.py. Weights are not read."""
    layers: Any = decoder.layers
    for layer in layers:
        known = type(layer) is DecoderLayer and type(layer.mlp) is MLP
        if not known or "q_proj" not in layer.self_attn.qkv_proj.parts:
            raise ValueError("enable_lora does not work with this model: its layers are of another kind")


class AdaptedDecoder(Decoder):
    """A loaded decoder with slots for adapters in its linear layers, except the head. Changes `decoder`.

    Args: num_slots, rank: as in LoRALinear. dtype: of activations.
    """

    def __init__(self, decoder: Decoder, num_slots: int, rank: int, dtype: torch.dtype, device: torch.device):
        nn.Module.__init__(self)  # not Decoder's: the modules are those of `decoder`
        layers: Any = decoder.layers
        for layer in layers:
            for place in PLACES:
                parent, _, name = place.partition(".")
                module = getattr(layer, parent)
                setattr(module, name, LoRALinear(getattr(module, name), num_slots, rank, dtype, device))
        self.take(decoder)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[Tensor],
        attentions: Sequence[Attention],
        rows: Tensor | None = None,
        adapters: TokenAdapters | None = None,
    ) -> Tensor:
        """As `Decoder.forward`. adapters: the adapters of the step's tokens; None: no token has one."""
        x = self.embed(input_ids)
        rotations = self.rotary(positions, x.dtype)
        last = len(self.layers) - 1
        layers: Any = self.layers
        for index, (layer, cache, attention) in enumerate(zip(layers, kv_caches, attentions, strict=True)):
            cos, sin = rotations[layer.rope]
            q, k, v = before(layer, x, cos, sin, adapters)
            attention.write(k, v, cache, layer.kv_scales)
            attended = layer.attend(attention, q, cache)
            if index == last and rows is not None:
                x, attended = x[rows], attended[rows]
                adapters = None if adapters is None else adapters.select(rows)
            x = after(layer, x, attended, adapters)
        return x


def before(
    layer: Any, x: Tensor, cos: Tensor, sin: Tensor, adapters: TokenAdapters | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `DecoderLayer.before`, with adapters."""
    part = layer.self_attn
    heads = part.qkv_proj(layer.input_layernorm(x), adapters).unflatten(-1, (-1, part.head_dim))
    return part.rotated(heads, cos, sin)


def after(layer: Any, x: Tensor, attended: Tensor, adapters: TokenAdapters | None) -> Tensor:
    """As `DecoderLayer.after`, with adapters."""
    x = x + layer.self_attn.o_proj(attended.flatten(1), adapters)
    gate, up = layer.mlp.gate_up_proj(layer.post_attention_layernorm(x), adapters).chunk(2, dim=-1)
    return x + layer.mlp.down_proj(layer.mlp.activation(gate) * up, adapters)
