"""T5 (Raffel et al. 2020), T5 v1.1, Flan-T5 and mT5: an encoder reads a text, and a decoder writes another.

As in whisper.py, cross-attention is a layer of its own, whose K and V are a state. Tokens have no positions. Instead,
the scores of self-attention get a bias for the distance of two tokens, each head its own. Kernels know no such bias, so
attention is spelled out here, and runs eagerly on a CPU only. A sequence has one block, as in whisper.py.
"""

import math
import re
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopage.checks.fields import Fields
from nanopage.config.model import ModelConfig
from nanopage.families.whisper import CrossAttention, CrossLayer, SelfLayer, run_layers, with_encoder
from nanopage.layers.attention import StepContext
from nanopage.layers.embedding import Embedding
from nanopage.layers.linear import Linear
from nanopage.layers.mlp import MLP
from nanopage.models.decoder import Decoder, SelfAttention, make_norm
from nanopage.state.layer_kinds import STATE
from nanopage.state.pages import views

T5 = "T5ForConditionalGeneration"
ARCHITECTURES = (T5, "MT5ForConditionalGeneration")
LIMIT = "n_positions"  # the field that limits what the encoder reads
NAMES = {  # in checkpoints: here
    "shared.weight": "model.embed_tokens.weight",
    "encoder.final_layer_norm.weight": "model.encoders.text.norm.weight",
    "decoder.final_layer_norm.weight": "model.norm.weight",
}
PARTS = {
    **{name: f"{name}_proj" for name in "qkvo"},
    "wi": "up_proj",
    "wi_0": "gate_proj",
    "wi_1": "up_proj",
    "wo": "down_proj",
    "relative_attention_bias": "distances",
}


def text_fields(fields: Fields) -> Fields:
    """The sizes of the decoder, under the usual names, with transformers' defaults."""
    num_layers = fields.size("num_decoder_layers", fields.size("num_layers", 6))
    sizes = {
        "hidden_size": fields.size("d_model", 512),
        "intermediate_size": fields.size("d_ff", 2048),
        "num_hidden_layers": 2 * num_layers,
        "num_attention_heads": fields.size("num_heads", 8),
        "head_dim": fields.size("d_kv", 64),
        "max_position_embeddings": fields.size("n_positions", 512),
    }
    return replace(fields, values=fields.values | sizes)


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in whisper.py. `mixer` also has what the biases of distances are: `buckets` and `longest`."""
    buckets = fields.size("relative_attention_num_buckets", 32)
    longest = fields.size("relative_attention_max_distance", 128)
    if buckets < 4:
        raise fields.error("relative_attention_num_buckets", f"must be at least 4, got {buckets}")
    if longest <= buckets // 2:
        raise fields.error("relative_attention_max_distance", f"must be more than half of {buckets}, got {longest}")
    kind, num_layers = fields.values.get("feed_forward_proj", "relu"), fields.size("num_layers", 6)
    kinds = {"relu": "relu", "gated-gelu": "gelu_pytorch_tanh", "gated-silu": "silu", "gated-relu": "relu"}
    if kind not in kinds:
        raise fields.unsupported("feed_forward_proj", f"{kind!r:.100}", kinds)
    # T5 v1.1 has a head of its own. transformers 5 writes so under another name.
    tied = fields.flag("tie_word_embeddings", True) and fields.flag("scale_decoder_outputs", True)
    size = fields.size("num_attention_heads") * fields.size("head_dim")
    return with_encoder(fields, fields.size("max_position_embeddings"), size) | {
        "rms_norm_eps": fields.number("layer_norm_epsilon", 1e-6),
        "activation": kinds[kind],
        "attention_scale": 1.0,
        "logit_divisor": fields.size("hidden_size") ** 0.5 if tied and architecture == T5 else 1.0,
        "tie_word_embeddings": tied,
        "mixer": {"num_layers": num_layers, "gated": kind != "relu", "buckets": buckets, "longest": longest},
    }


def rename(name: str, config: ModelConfig) -> str | None:
    """The name of a checkpoint's tensor in this model. None: a copy of the embeddings, or a bias without effect."""
    if name.endswith(("embed_tokens.weight", "EncDecAttention.relative_attention_bias.weight")):
        return None
    match = re.fullmatch(r"(en|de)coder\.block\.(\d{1,4})\.layer\.(\d)\.(\w+)\.(?:(\w+)\.)?(\w+)", name)
    if match is None:
        return NAMES.get(name, name)
    encodes, number, sublayer, (kind, part, last) = match[1] == "en", int(match[2]), int(match[3]), match.groups()[3:]
    layer = f"encoders.text.layers.{number}" if encodes else f"layers.{2 * number + min(sublayer, 1)}"
    feeds = sublayer == (1 if encodes else 2)
    if kind == "layer_norm":
        return f"model.{layer}.{'final_layer_norm' if feeds else 'input_layernorm'}.{last}"
    return f"model.{layer}.{'mlp' if feeds else 'self_attn'}.{PARTS.get(part, part)}.{last}"


def make_model(config: ModelConfig) -> Decoder:
    distances = make_distances(config)
    decoder: Any = Decoder(config, [make_layer(config, index, distances) for index in range(config.num_layers)])
    decoder.encoders = nn.ModuleDict({"text": TextEncoder(config, decoder.embed_tokens)})
    return decoder


def make_layer(config: ModelConfig, index: int, distances: Embedding | None = None) -> nn.Module:
    """distances: those of all layers. None: the layer has its own."""
    if config.sliding_windows[index] == STATE:
        return FeedingLayer(config, index)
    return BiasedLayer(config, index, distances or make_distances(config))


def make_distances(config: ModelConfig) -> Embedding:
    return Embedding(config.mixer["buckets"], config.num_heads)


class BiasedLayer(SelfLayer):
    """x + attention(norm(x))"""

    def __init__(self, config: ModelConfig, index: int, distances: Embedding):
        nn.Module.__init__(self)
        self.input_layernorm, self.norm_first = make_norm(config), True
        self.self_attn: Any = BiasedAttention(config, index, distances)

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """As `DecoderLayer.forward`."""
        q, k, v = self.heads(x).chunk(3, dim=1)
        step.write(self.self_attn, k, v)
        return self.after(*step.keep(self.self_attn, x, self.self_attn.attend(q, step)))


class FeedingLayer(CrossLayer):
    """x = x + attention(norm(x), encoded); x + mlp(norm(x))"""

    def __init__(self, config: ModelConfig, index: int):
        nn.Module.__init__(self)
        self.input_layernorm: Any = make_norm(config)
        self.final_layer_norm: Any = make_norm(config)
        self.self_attn, self.mlp = CrossAttention(config, index, bias=False), make_mlp(config)
        self.norm_first = True

    def feed(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.final_layer_norm(x))


class BiasedAttention(SelfAttention):
    """The projections around attention, and the bias of each head for each bucket of distances."""

    def __init__(self, config: ModelConfig, index: int, distances: Embedding):
        super().__init__(config, index)
        self.buckets, self.longest, self.distances = config.mixer["buckets"], config.mixer["longest"], distances

    def biases(self, distance: Tensor, both_ways: bool = False) -> Tensor:
        """distance: as of `bucket_of`, [queries, keys] -> [num_heads, queries, keys]"""
        buckets = bucket_of(distance, self.buckets, self.longest, both_ways)
        return self.distances(buckets.flatten()).unflatten(0, buckets.shape).permute(2, 0, 1)

    def attend(self, q: Tensor, step: StepContext) -> Tensor:
        """q [T, num_heads, head_dim] -> the same, attended to the tokens of each sequence up to the query."""
        pages: Any = step.attention_of(self)
        k, v = views(step.kv_caches[self.index], self.head_dim)
        each = q.transpose(0, 1).split(pages.query_lens.tolist(), dim=1)
        attended = []
        for block, length, queries in zip(
            pages.block_tables[:, 0].tolist(), pages.seq_lens.tolist(), each, strict=True
        ):
            keys = torch.arange(length)
            distance = keys[length - queries.shape[1] :, None] - keys
            bias = self.biases(distance.clamp(min=0)).masked_fill(distance < 0, -torch.inf)
            of_one = k[block, None, :, :, :length].mT.to(q.dtype), v[block, None, :, :length].to(q.dtype)
            attended.append(attention(queries[None], *of_one, bias)[0])
        return torch.cat(attended, dim=1).transpose(0, 1)


class TextEncoder(nn.Module):
    """The `input_ids` of N texts, int64 [N, positions] -> [N, positions, hidden_size].

    Args: embed_tokens: the decoder's.
    """

    def __init__(self, config: ModelConfig, embed_tokens: Embedding):
        super().__init__()
        self.embed_tokens, distances = embed_tokens, make_distances(config)
        self.layers = nn.ModuleList(EncoderLayer(config, distances) for _ in range(config.mixer["num_layers"]))
        self.norm = make_norm(config)

    def forward(self, payload: dict[str, Tensor]) -> Tensor:
        input_ids = payload["input_ids"]
        x, positions = self.embed_tokens(input_ids.flatten()), torch.arange(input_ids.shape[1])
        first: Any = self.layers[0]
        bias = first.self_attn.biases(positions[:, None] - positions, both_ways=True)
        return self.norm(run_layers(self.layers, x.unflatten(0, input_ids.shape), bias))


class EncoderLayer(nn.Module):
    """As that of Whisper. Args of `forward`: bias: as of `attention`."""

    def __init__(self, config: ModelConfig, distances: Embedding):
        super().__init__()
        self.input_layernorm, self.final_layer_norm = make_norm(config), make_norm(config)
        self.self_attn, self.mlp = BiasedAttention(config, 0, distances), make_mlp(config)

    def forward(self, x: Tensor, count: int, bias: Tensor) -> Tensor:
        heads = self.self_attn.heads(self.input_layernorm(x)).unflatten(0, (count, -1)).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=1)
        attended = attention(q, k, v, bias).transpose(1, 2)
        x = x + self.self_attn.o_proj(attended.flatten(2).flatten(0, 1))
        return x + self.mlp(self.final_layer_norm(x))


class FeedForward(MLP):
    """down(act(up(x))). Shape: [T, hidden_size] -> same."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: str):
        super().__init__(hidden_size, intermediate_size, activation=activation)
        self.gate_up_proj = Linear(hidden_size, {"up_proj": intermediate_size})

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_up_proj(x)))


def make_mlp(config: ModelConfig) -> MLP:
    kind = MLP if config.mixer["gated"] else FeedForward
    return kind(config.hidden_size, config.intermediate_size, activation=config.activation)


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """q [N, heads, queries, head_dim], k and v [N, heads, keys, head_dim], bias [heads, queries, keys] -> as q."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None], scale=1.0)


def bucket_of(distance: Tensor, buckets: int, longest: int, both_ways: bool = False) -> Tensor:
    """The bucket of each distance: half of them are of one distance each, and the others are ever wider.

    Args:
        distance: int64, by how many tokens the key is before the query. Negative only with `both_ways`: half of the
            buckets are then for keys after the query.
        longest: the last bucket has this distance and all beyond.
    """
    if both_ways:
        return buckets // 2 * (distance < 0) + bucket_of(distance.abs(), buckets // 2, longest)
    exact = buckets // 2
    far = (distance.clamp(min=exact).float() / exact).log() / math.log(longest / exact) * (buckets - exact)
    return torch.where(distance < exact, distance, (exact + far.long()).clamp(max=buckets - 1))
