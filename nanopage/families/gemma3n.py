"""Gemma 3n (Google 2025), the text model: layers share K and V, and have inputs of their own, as in Gemma 4.

AltUp (Baykal et al. 2023)     a token has several hidden states. A layer predicts all of them and computes one, the
                               active one. The error of its prediction corrects the others
LAuReL (Menghani et al. 2024)  the normalized input of a layer, plus a product of low rank, is added beside attention
sparse activations             the gates of some feed-forward layers keep only their largest numbers

The tensors of images and sounds are left out.
"""

import math
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn

from nanopage.checks.fields import MAX_SIZES, Fields
from nanopage.config.model import ModelConfig
from nanopage.experts.moe import Gate
from nanopage.families.gemma2 import gemma_config
from nanopage.families.gemma3 import local_rope, require_window
from nanopage.families.gemma4 import (
    Gemma4Attention,
    Gemma4Decoder,
    Gemma4Layer,
    kv_sources,
    rename,
    text_fields,
)
from nanopage.files.model_files import shown
from nanopage.layers.attention import StepContext
from nanopage.layers.linear import Linear
from nanopage.layers.mlp import MLP
from nanopage.models.decoder import Decoder, make_norm
from nanopage.reading.rope import read_rope

__all__ = ["rename", "text_fields"]  # as in gemma4.py
ARCHITECTURES = ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration")


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    require_window(fields)
    fields = replace(fields, values={"num_kv_shared_layers": 15} | fields.values)
    num_layers = fields.size("num_hidden_layers")
    shared = gemma_config(fields, every=5, window=512)
    num_kv_heads, widths = fields.size("num_key_value_heads", 2), _widths(fields, num_layers)
    active, num_inputs = fields.values.get("altup_active_idx", 0), fields.size("altup_num_inputs", 4)
    if type(active) is not int or not 0 <= active < num_inputs:
        raise fields.error("altup_active_idx", f"must be an integer from 0 to {num_inputs - 1}, got {shown(active)}")
    return shared | {
        "num_heads": fields.size("num_attention_heads", 8),
        "num_kv_heads": num_kv_heads,
        "full_heads": (num_kv_heads, shared["head_dim"]),
        "kv_sources": kv_sources(fields, shared["sliding_windows"]),
        "intermediate_size": max(widths),
        "head_norms": True,
        "norm_offset": 0.0,
        "attention_scale": 1.0,
        "logit_softcap": fields.optional_number("final_logit_softcapping", 30.0) or 0.0,
        "rope": read_rope(fields, "full_attention", default_theta=1e6),
        "other_rope": local_rope(fields),
        "mixer": {
            "k_is_v": False,
            "double_wide": False,
            "input_size": fields.size("hidden_size_per_layer_input", 256),
            "input_vocab_size": fields.size("vocab_size_per_layer_input", 2**18),
            "widths": widths,
            "sparsities": _sparsities(fields, num_layers),
            "active": active,
            "num_inputs": num_inputs,
            "corrects_scale": fields.flag("altup_correct_scale", True),
            "laurel_rank": fields.size("laurel_rank", 64),
        },
        "undivided": "its layers share K and V, and have several hidden states for each token",
    }


def _widths(fields: Fields, num_layers: int) -> list[int]:
    """The intermediate size of each layer."""
    sizes = fields.values.get("intermediate_size", 16384)
    sizes = sizes if isinstance(sizes, list) else [sizes] * num_layers
    valid = all(type(size) is int and 0 < size <= MAX_SIZES["intermediate_size"] for size in sizes)
    if not valid or len(sizes) != num_layers:
        raise fields.error("intermediate_size", f"must be a size, or {num_layers} of them, got {shown(sizes)}")
    return sizes


def _sparsities(fields: Fields, num_layers: int) -> list[float]:
    """Which share of its gate each layer drops."""
    default = [0.95] * (10 if num_layers > 10 else 0)
    given = fields.values.get("activation_sparsity_pattern")
    shares = [*default, *[0.0] * (num_layers - len(default))] if given is None else given
    valid = isinstance(shares, list) and all(type(share) in (int, float) and 0 <= share < 1 for share in shares)
    if not valid or len(shares) != num_layers:
        problem = f"must be {num_layers} numbers from 0 to less than 1, got {shown(shares)}"
        raise fields.error("activation_sparsity_pattern", problem)
    return shares


def make_layer(config: ModelConfig, index: int) -> nn.Module:
    return Gemma3nLayer(config, Gemma4Attention(config, index))


def make_model(config: ModelConfig) -> Decoder:
    return Gemma3nDecoder(config, [make_layer(config, index) for index in range(config.num_layers)])


class Gemma3nDecoder(Gemma4Decoder):
    """The layers take and return (hidden states [T, num_inputs, hidden_size], inputs [T, layers, size])."""

    def __init__(self, config: ModelConfig, layers: list[Any]):
        super().__init__(config, layers)
        size, num_others = config.hidden_size, config.mixer["num_inputs"] - 1
        self.altup_projections = nn.ModuleList(Linear(size, size) for _ in range(num_others))
        self.altup_unembed_projections = nn.ModuleList(Linear(size, size) for _ in range(num_others))

    def forward(self, input_ids: Tensor, step: StepContext) -> Tensor:
        x = self.embed(input_ids, step.positions)
        step.rotations = self.rotary(step.positions, x.dtype)
        known = input_ids.masked_fill(input_ids >= self.input_vocab_size, 0)
        others = [as_large_as(x, project(x)) for project in self.altup_projections]
        x = self.run_layers((torch.stack((x, *others), dim=1), self.inputs(known, x)), step)
        first, *others = x.unbind(1)
        others = [as_large_as(first, back(x)) for back, x in zip(self.altup_unembed_projections, others, strict=True)]
        return torch.stack((first, *others)).mean(0)


def as_large_as(x: Tensor, y: Tensor) -> Tensor:
    """y [T, hidden_size], scaled to the root mean square of x."""
    size = x.square().mean(-1, keepdim=True).sqrt()
    return y * size / y.square().mean(-1, keepdim=True).clamp(min=1e-5).sqrt()


class Gemma3nLayer(Gemma4Layer):
    def __init__(self, config: ModelConfig, self_attn: Gemma4Attention):
        super().__init__(config, self_attn)
        del self.layer_scalar
        index = self_attn.index
        self.mlp = SparseMLP(config, config.mixer["widths"][index], config.mixer["sparsities"][index])
        self.altup = AltUp(config)
        self.laurel = Laurel(config)

    def forward(self, x: Any, step: StepContext) -> Any:
        """As Gemma3nDecoder says."""
        states, inputs = x
        part, altup = self.self_attn, self.altup
        states = altup.predict(states)
        attended = self.attend(states[:, altup.active], step)
        states, attended, of_layer = step.keep(part, states, attended, inputs[:, part.index])
        x = states[:, altup.active]
        y = self.post_attention_layernorm(part.o_proj(attended.flatten(1)))
        x = (x + y + self.laurel(self.input_layernorm(x))) / math.sqrt(2)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        states = altup.correct(states, x)
        y = self.activation(self.per_layer_input_gate(altup.scaled(states[:, altup.active]))) * of_layer
        y = self.post_per_layer_input_norm(self.per_layer_projection(y))
        states = torch.cat((states[:, :1], states[:, 1:] + y[:, None]), dim=1)
        return states if self.is_last else (states, inputs)


class Laurel(nn.Module):
    """Shape: [T, hidden_size] -> same."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.linear_left = Linear(config.hidden_size, config.mixer["laurel_rank"])
        self.linear_right = Linear(config.mixer["laurel_rank"], config.hidden_size)
        self.post_laurel_norm = make_norm(config)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.post_laurel_norm(self.linear_right(self.linear_left(x)))


class SparseMLP(MLP):
    """Args: sparsity: the share of the gate's numbers that are dropped, if their distribution is normal."""

    def __init__(self, config: ModelConfig, width: int, sparsity: float):
        super().__init__(config.hidden_size, width, activation=config.activation)
        self.deviations = NormalDist().inv_cdf(sparsity) if sparsity else None

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        if self.deviations is not None:
            deviation = gate.std(-1, keepdim=True, unbiased=False)
            gate = torch.relu(gate - (gate.mean(-1, keepdim=True) + deviation * self.deviations))
        return self.down_proj(self.activation(gate) * up)


class AltUp(nn.Module):
    """Shapes: x [T, num_inputs, hidden_size]. Its small matrices are never quantized."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.active, self.num_inputs = config.mixer["active"], config.mixer["num_inputs"]
        self.corrects_scale = config.mixer["corrects_scale"]
        self.correct_output_scale = nn.Parameter(torch.empty(config.hidden_size))
        self.correction_coefs = Gate(self.num_inputs, self.num_inputs)
        self.prediction_coefs = Gate(self.num_inputs, self.num_inputs**2)
        self.modality_router = Gate(config.hidden_size, self.num_inputs)
        self.router_norm = make_norm(config)

    def predict(self, x: Tensor) -> Tensor:
        """x -> the same after this layer, as each of them predicts it."""
        coefs = self.prediction_coefs(self._modalities(x[:, self.active])).unflatten(1, (self.num_inputs, -1))
        return x + coefs @ x

    def correct(self, predicted: Tensor, x: Tensor) -> Tensor:
        """Correct all predictions by the error of the active one. x [T, hidden_size]: what the layer has computed."""
        coefs = self.correction_coefs(self._modalities(x)) + 1
        return predicted + (x - predicted[:, self.active])[:, None] * coefs[:, :, None]

    def scaled(self, x: Tensor) -> Tensor:
        """x [T, hidden_size]: what the inputs of the layer are multiplied with."""
        return x * self.correct_output_scale if self.corrects_scale else x

    def _modalities(self, x: Tensor) -> Tensor:
        routed = self.modality_router(self.router_norm(x) / x.shape[1])
        return torch.tanh(routed.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)
