"""Gemma 4 (Gemma Team 2026), the text model: Gemma 3's layer with larger heads in the layers without a window.

V has a norm, too, without a weight, and each layer multiplies its output by a number. Other parts are optional:

attention_k_eq_v             in layers without a window, V is K before its norm and its rotation (31B, 26B-A4B)
num_kv_shared_layers         the last layers attend to K and V of the last layer before them that has, or has not, a
                             window as they do. They have no K and V of their own (E2B, E4B)
hidden_size_per_layer_input  each layer gets an input for each token, from embeddings of its own and a projection of the
                             token's embedding (E2B, E4B)
enable_moe_block             a mixture of experts beside each feed-forward layer (26B-A4B)

The tensors of images and sounds are left out.
"""

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanopage.checks.fields import ACTIVATIONS as KNOWN
from nanopage.checks.fields import Fields
from nanopage.config.model import ExpertsConfig, ModelConfig
from nanopage.experts.config import read_experts
from nanopage.experts.moe import MixtureOfExperts, Router
from nanopage.families.gemma2 import Gemma2Layer, gemma_config
from nanopage.families.gemma3 import require_window
from nanopage.families.qwen3_5 import text_fields as fields_of_text
from nanopage.files.model_files import shown
from nanopage.layers.attention import StepContext
from nanopage.layers.embedding import Embedding
from nanopage.layers.linear import Linear
from nanopage.layers.mlp import ACTIVATIONS, MLP
from nanopage.layers.norm import unit_norm
from nanopage.layers.rotary import rotate
from nanopage.models.decoder import Decoder, SelfAttention, make_norm
from nanopage.reading.names import renamed
from nanopage.reading.rope import read_rope

ARCHITECTURES = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
Heads = tuple[int, int]
OF_EXPERTS = KNOWN  # the activations that experts may have
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
NAMES = {  # in checkpoints: here
    r"^(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio)\.": None,
    r"^model\.language_model\.": "model.",
    r"\.router\.(proj\.)?": ".moe.gate.",
    r"\.experts\.": ".moe.experts.",
    r"\.pre_feedforward_layernorm_2\.": ".moe.norm.",
}


def text_fields(fields: Fields) -> Fields:
    """As in qwen3_5.py. Only images may see what follows them ("vision")."""
    values = fields_of_text(fields).values
    if "text_config" in values:
        values["tie_word_embeddings"] = fields.values.get("tie_word_embeddings", True)
    sees_all = values.pop("use_bidirectional_attention", None)
    if sees_all not in (None, "vision"):
        raise fields.unsupported("use_bidirectional_attention", shown(sees_all), ["null", '"vision"'])
    return Fields(values, fields.source)


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    require_window(fields)
    num_heads = fields.size("num_attention_heads", 8)
    shared = gemma_config(fields, every=6, window=512)
    windows = (*shared["sliding_windows"][:-1], None)  # the last layer never has one
    k_is_v = fields.flag("attention_k_eq_v")
    heads, full_heads = _heads(fields, windows, k_is_v)
    for sizes in (heads, full_heads):
        if num_heads % sizes[0] or sizes[1] % 2:
            raise fields.error("num_attention_heads", f"{num_heads} does not fit {sizes[0]} KV heads of {sizes[1]}")
    special = shared | {
        "num_heads": num_heads,
        "full_heads": full_heads,
        "kv_sources": kv_sources(fields, windows),
        "sliding_windows": windows,
        "head_norms": True,
        "norm_offset": 0.0,
        "attention_scale": 1.0,
        "logit_softcap": fields.optional_number("final_logit_softcapping") or 0.0,
        "rope": _rope(fields, "full_attention"),
        "other_rope": _rope(fields, "sliding_attention"),
        "mixer": {"k_is_v": k_is_v, "double_wide": fields.flag("use_double_wide_mlp"), **_inputs(fields)},
        "undivided": "its layers have heads of two sizes",
    }
    return special | ({"experts": _experts(fields)} if fields.flag("enable_moe_block") else {})


def _heads(fields: Fields, windows: tuple[int | None, ...], k_is_v: bool) -> tuple[Heads, Heads]:
    """num_kv_heads and head_dim of layers with a window, and of others. transformers writes per_layer_config, and
    published checkpoints have global_head_dim."""
    own = fields.size("num_key_value_heads", 4), fields.size("head_dim", 256)
    if fields.values.get("per_layer_config") is None:
        has_number = k_is_v and fields.values.get("num_global_key_value_heads") is not None
        num_kv_heads = fields.size("num_global_key_value_heads") if has_number else own[0]
        return own, (num_kv_heads, fields.size("global_head_dim", 512))
    layers, found = fields.object("per_layer_config"), {(own, True)}
    for index, window in enumerate(windows):
        layer = layers.object(str(index))
        if not layer.values.keys() <= {"num_key_value_heads", "head_dim"}:
            raise fields.unsupported("per_layer_config", f"with {shown([*layer.values])} of layer {index}")
        found.add(((layer.size("num_key_value_heads", own[0]), layer.size("head_dim", own[1])), window is not None))
    full = [heads for heads, has_window in found if not has_window]
    if len(found) != 2:
        raise fields.unsupported("per_layer_config", "with several sizes of heads in layers of one type")
    return own, full[0]


def kv_sources(fields: Fields, windows: tuple[int | None, ...]) -> tuple[int, ...]:
    """`kv_sources` of ModelConfig."""
    if fields.values.get("num_kv_shared_layers", 0) == 0:
        return ()
    num_own = len(windows) - fields.size("num_kv_shared_layers")
    last = {window: index for index, window in enumerate(windows[: max(0, num_own)])}
    if {*windows} != last.keys():
        raise fields.error("num_kv_shared_layers", "leaves a type of layers without a layer that has its own K and V")
    return (*range(num_own), *(last[window] for window in windows[num_own:]))


def _rope(fields: Fields, kind: str) -> Any:
    """The rope of the layers of a kind. transformers reads rope_parameters only."""
    if fields.values.get("rope_scaling"):
        raise fields.unsupported("rope_scaling", "in place of rope_parameters")
    ropes = fields.object("rope_parameters").values or ROPES
    if not isinstance(ropes.get(kind), dict):
        raise fields.error("rope_parameters", f"has no object {kind}")
    length = fields.size("max_position_embeddings", 131072)
    return read_rope(Fields({"rope_parameters": ropes, "max_position_embeddings": length}, fields.source), kind)


def _inputs(fields: Fields) -> dict[str, int]:
    """The sizes of the inputs of layers, and of their vocabulary. 0: there are none."""
    if fields.values.get("hidden_size_per_layer_input", 256) in (0, None):
        return {"input_size": 0, "input_vocab_size": 0}
    size, vocab_size = fields.size("hidden_size_per_layer_input", 256), fields.size("vocab_size_per_layer_input", 2**18)
    if vocab_size < fields.size("vocab_size"):
        raise fields.error("vocab_size_per_layer_input", f"{vocab_size} is less than vocab_size")
    return {"input_size": size, "input_vocab_size": vocab_size}


def _experts(fields: Fields) -> ExpertsConfig:
    num_experts, num_chosen = fields.size("num_experts"), fields.size("top_k_experts")
    if num_chosen > num_experts:
        raise fields.error("top_k_experts", f"must be at most num_experts={num_experts}, got {num_chosen}")
    size, layers = fields.size("moe_intermediate_size"), {"num_hidden_layers": fields.size("num_hidden_layers")}
    return read_experts(Fields(layers, fields.source), num_experts, num_chosen, size)  # in all layers


def rename(name: str, config: ModelConfig) -> str | None:
    """As `renamed`. Published checkpoints have K and V of all layers. Those that no layer uses are left out."""
    new = renamed(name, config, NAMES)
    of_kv = re.match(r"model\.layers\.(\d{1,4})\.self_attn\.(k|v)_(proj|norm)\.", new or "")
    return None if of_kv and len({*config.kv_sources}) <= int(of_kv[1]) < len(config.kv_sources) else new


def make_layer(config: ModelConfig, index: int) -> nn.Module:
    return Gemma4Layer(config, Gemma4Attention(config, index))


def make_model(config: ModelConfig) -> Decoder:
    layers = [make_layer(config, index) for index in range(config.num_layers)]
    return Gemma4Decoder(config, layers) if config.mixer["input_size"] else Decoder(config, layers)


class Gemma4Decoder(Decoder):
    """Hands inputs to the layers: they take and return (hidden states [T, hidden_size], inputs [T, layers, size])."""

    def __init__(self, config: ModelConfig, layers: list[Any]):
        super().__init__(config, layers)
        self.size, self.input_vocab_size = config.mixer["input_size"], config.mixer["input_vocab_size"]
        width = len(layers) * self.size
        self.embed_tokens_per_layer = Embedding(self.input_vocab_size, width)
        self.per_layer_model_projection = Linear(config.hidden_size, width)
        self.per_layer_projection_norm = make_norm(config, self.size)

    def forward(self, input_ids: Tensor, step: StepContext) -> Tensor:
        x = self.embed(input_ids, step.positions)
        step.rotations = self.rotary(step.positions, x.dtype)
        return self.run_layers((x, self.inputs(input_ids, x)), step)

    def inputs(self, input_ids: Tensor, x: Tensor) -> Tensor:
        """input_ids [T] and their embeddings [T, hidden_size] -> [T, layers, size]"""
        scale = torch.full((), self.size**0.5, dtype=x.dtype, device=x.device)  # rounded, as in transformers
        of_tokens = (self.embed_tokens_per_layer(input_ids) * scale).unflatten(1, (-1, self.size))
        projected = (self.per_layer_model_projection(x) * x.shape[1] ** -0.5).unflatten(1, (-1, self.size))
        return (self.per_layer_projection_norm(projected) + of_tokens) * 2**-0.5


class Gemma4Layer(Gemma2Layer):
    self_attn: "Gemma4Attention"

    def __init__(self, config: ModelConfig, self_attn: "Gemma4Attention"):
        super().__init__(config, self_attn)
        if config.mixer["double_wide"] and self_attn.is_shared:
            self.mlp = MLP(config.hidden_size, 2 * config.intermediate_size, activation=config.activation)
        self.layer_scalar = nn.Parameter(torch.empty(1))
        self.moe = None
        if config.experts is not None:
            self.moe = Gemma4Experts(config, config.experts)
            self.post_feedforward_layernorm_1 = make_norm(config)
            self.post_feedforward_layernorm_2 = make_norm(config)
        self.is_last, size = self_attn.index + 1 == config.num_layers, config.mixer["input_size"]
        if size:
            self.per_layer_input_gate = Linear(config.hidden_size, size)
            self.per_layer_projection = Linear(size, config.hidden_size)
            self.post_per_layer_input_norm = make_norm(config)
            self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Any, step: StepContext) -> Any:
        """As `DecoderLayer.forward`, or as Gemma4Decoder says."""
        x, inputs = x if isinstance(x, tuple) else (x, None)
        part, attended = self.self_attn, self.attend(x, step)
        if inputs is None:
            return self.after(*step.keep(part, x, attended))
        x = self.after(*step.keep(part, x, attended, inputs[:, part.index]))
        return x if self.is_last else (x, inputs)

    def attend(self, x: Tensor, step: StepContext) -> Tensor:
        """The output of attention, [T, num_heads, head_dim]."""
        part, rotation = self.self_attn, step.rotations[self.self_attn.rope]
        if part.is_shared:
            return step.attend(part, rotate(part.q_norm(self.heads(x)), *rotation))
        q, k, v = self.before(x, *rotation)
        step.write(part, k, v)
        return step.attend(part, q)

    def after(self, x: Tensor, attended: Tensor, inputs: Tensor | None = None) -> Tensor:
        """As `DecoderLayer.after`. inputs: of this layer, [T, size]."""
        x = x + self.post_attention_layernorm(self.self_attn.o_proj(attended.flatten(1)))
        y = self.mlp(self.pre_feedforward_layernorm(x))
        if self.moe is not None:
            y = self.post_feedforward_layernorm_1(y) + self.post_feedforward_layernorm_2(self.moe(x))
        x = x + self.post_feedforward_layernorm(y)
        if inputs is not None:
            y = self.activation(self.per_layer_input_gate(x)) * inputs
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(y))
        return x * self.layer_scalar


class Gemma4Attention(SelfAttention):
    """source: the layer whose K and V it attends to. is_shared: whether that is another one, so that it has only
    queries."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index, config.attention_bias, config.attention_bias)
        self.source = config.kv_sources[index] if config.kv_sources else index
        self.is_shared, self.eps = self.source != index, config.rms_norm_eps
        k_is_v = config.mixer["k_is_v"] and config.sliding_windows[index] is None
        names = ["q_proj"] if self.is_shared else ["q_proj", "k_proj"] if k_is_v else [*self.qkv_proj.parts]
        parts = {name: self.qkv_proj.parts[name] for name in names}
        self.qkv_proj = Linear(config.hidden_size, parts, config.attention_bias)
        if self.is_shared:
            del self.k_norm

    def heads(self, x: Tensor) -> Tensor:
        heads = super().heads(x)
        if self.is_shared:
            return heads
        qk = heads[:, : self.num_heads + self.num_kv_heads]
        v = unit_norm(heads[:, -self.num_kv_heads :], self.eps).to(heads.dtype)  # the last ones are V, or K
        return torch.cat((qk, v), dim=1)


class Gemma4Experts(MixtureOfExperts):
    """The router and the experts have norms of their own."""

    def __init__(self, config: ModelConfig, experts: ExpertsConfig):
        super().__init__(config.hidden_size, experts, partial(MLP, activation=config.activation))
        self.gate = Gemma4Router(config, experts)
        self.norm = make_norm(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(self.norm(x), lambda _: self.gate(x))


class Gemma4Router(Router):
    """Its input has a norm without a weight, and each expert a factor."""

    def __init__(self, config: ModelConfig, experts: ExpertsConfig):
        super().__init__(config.hidden_size, experts)
        self.eps = config.rms_norm_eps
        self.scale = nn.Parameter(torch.empty(config.hidden_size))
        self.per_expert_scale = nn.Parameter(torch.empty(experts.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        numbers, weights = super().forward(unit_norm(x, self.eps).to(x.dtype) * self.scale * x.shape[1] ** -0.5)
        return numbers, weights * self.per_expert_scale[numbers]
