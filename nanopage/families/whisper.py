"""Whisper (Radford et al. 2022): an encoder reads 30 seconds of sound, and a decoder writes what was said.

A layer of Whisper's decoder is two layers here: self-attention, with K and V in pages as usual, and cross-attention
with a feed-forward layer. Cross-attention sees all positions of the encoder. Its K and V are a state
(state/layer_kinds.py): a block holds them in the usual layout. They are written once, before the first step of a
sequence (items/encoded.py), and no step changes them. A block has room for a whole sequence, so a sequence never needs
a second one.

Biases of K change no result, so there are none: those of Q and V are apart from the fused matrix.
"""

import re
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopage.checks.fields import Fields
from nanopage.config.model import ModelConfig
from nanopage.config.rope import UNROTATED
from nanopage.layers.attention import PLAIN, StepContext
from nanopage.layers.embedding import Embedding
from nanopage.layers.linear import Linear
from nanopage.layers.mlp import ACTIVATIONS
from nanopage.models.decoder import Decoder, DecoderLayer, SelfAttention
from nanopage.state.layer_kinds import STATE
from nanopage.state.pages import views

ARCHITECTURES = ("WhisperForConditionalGeneration",)
POSITIONS = 1500  # of the encoder: one for 20 ms of the 30 s that it always reads
NORM = "input_layernorm"
NAMES = {  # in checkpoints: here
    "proj_out.": "lm_head.",
    "model.encoder.": "model.encoders.audio.",
    "model.decoder.layer_norm.": "model.norm.",
    "model.decoder.": "model.",
    ".out_proj.": ".o_proj.",
    ".self_attn.q_proj.bias": ".self_attn.q_bias",
    ".v_proj.bias": ".v_bias",
}


def text_fields(fields: Fields) -> Fields:
    """The sizes of the decoder, under the usual names, and of the encoder, with transformers' defaults."""
    return with_sizes(fields, 384, 1536, 4, 6, fields.size("max_target_positions", 448))


def with_sizes(fields: Fields, size: int, inner: int, num_layers: int, num_heads: int, positions: int) -> Fields:
    """The sizes of a decoder with cross-attention, under the usual names, and of its encoder. Args: positions: of the
    decoder; the others are defaults."""
    sizes = {
        "hidden_size": fields.size("d_model", size),
        "intermediate_size": fields.size("decoder_ffn_dim", inner),
        "num_hidden_layers": 2 * fields.size("decoder_layers", num_layers),
        "num_attention_heads": fields.size("decoder_attention_heads", num_heads),
        "max_position_embeddings": positions,
        "encoder_ffn_dim": fields.size("encoder_ffn_dim", inner),
        "encoder_layers": fields.size("encoder_layers", num_layers),
        "encoder_attention_heads": fields.size("encoder_attention_heads", num_heads),
    }
    return replace(fields, values=fields.values | sizes)


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py. `scale_embedding` has no effect in transformers, either."""
    num_bins, width = fields.size("num_mel_bins", 80), fields.size("median_filter_width", 7)  # of audio/words.py
    if not width % 2:
        raise fields.error("median_filter_width", f"must be odd, got {width}")
    if num_bins not in (80, 128):
        raise fields.unsupported("num_mel_bins", str(num_bins), (80, 128))
    if (positions := fields.size("max_source_positions", POSITIONS)) != POSITIONS:
        raise fields.unsupported("max_source_positions", str(positions), [POSITIONS])
    return read_sizes(fields, POSITIONS, num_mel_bins=num_bins, median_filter_width=width)


def read_sizes(fields: Fields, positions: int, **others: Any) -> dict[str, Any]:
    """The fields of ModelConfig for sizes that `with_sizes` has read. `mixer` has those of the encoder.

    Args: positions: of the encoder. others: what `mixer` has, too.
    """
    hidden_size, num_heads = fields.size("hidden_size"), fields.size("encoder_attention_heads")
    for name, heads in (("decoder", fields.size("num_attention_heads")), ("encoder", num_heads)):
        if hidden_size % heads:
            raise fields.error("d_model", f"{hidden_size} is not a multiple of {name}_attention_heads={heads}")
    inner, num_layers = fields.size("encoder_ffn_dim"), fields.size("encoder_layers")
    return with_encoder(fields, positions, hidden_size) | {
        "rms_norm_eps": 1e-5,
        "activation": fields.activation("activation_function", "gelu"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", True),
        "mixer": {"num_layers": num_layers, "num_heads": num_heads, "intermediate_size": inner} | others,
    }


def with_encoder(fields: Fields, positions: int, size: int) -> dict[str, Any]:
    """What all models with cross-attention share. Args: positions: of the encoder. size: of K and V of a position."""
    return {
        "rope": UNROTATED,
        "sliding_windows": (None, STATE) * (fields.size("num_hidden_layers") // 2),
        "state": ((2, positions, size),),
        "encoded_positions": positions,
        "undivided": "its encoder is not divided",
    }


def rename(name: str, config: ModelConfig) -> str:
    """The name of a checkpoint's tensor in this model."""
    for there, here in NAMES.items():
        name = name.replace(there, here)
    if not (match := re.match(r"model\.layers\.(\d{1,4})\.(self_attn)?", name)):
        return name
    if match[2]:
        return f"model.layers.{2 * int(match[1])}{name[match.end(1) :]}".replace("self_attn_layer_norm", NORM)
    name = name.replace("encoder_attn_layer_norm", NORM).replace("encoder_attn", "self_attn")
    return f"model.layers.{2 * int(match[1]) + 1}{name[match.end(1) :]}"


class WhisperDecoder(Decoder):
    @torch.inference_mode()
    def attention_to_sound(self, encoded: Tensor, token_ids: list[int], heads: list[tuple[int, int]]) -> Tensor:
        """How much each token attends to each position of the encoder (audio/words.py). One pass over all tokens, in
        plain PyTorch, which neither reads nor writes the KV cache.

        Args:
            encoded: [POSITIONS, hidden_size], the encoder's output.
            heads: (layer of the decoder, head of its cross-attention), counted as in checkpoints.

        Returns: float32 at least, [len(heads), T, POSITIONS], after the softmax.
        """
        ids = torch.tensor(token_ids, device=encoded.device)
        x, seen = self.embed(ids, torch.arange(len(ids), device=ids.device)), list[Tensor]()
        exact = torch.promote_types(x.dtype, torch.float32)
        layers: Any = self.layers
        for layer in layers:
            if isinstance(layer, CrossLayer):
                q, (k, v) = layer.before(x, x, x), layer.self_attn.keys_and_values(encoded)
                q, k, v = (part.to(exact).transpose(0, 1) for part in (q, k, v))
                seen.append((q * q.shape[-1] ** -0.5 @ k.mT).softmax(-1))
                attended = seen[-1] @ v
            else:
                q, k, v = (part.transpose(0, 1)[None] for part in layer.before(x, x, x))
                attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0]
            x = layer.after(x, attended.transpose(0, 1).to(x.dtype))
        return torch.stack([seen[index][head] for index, head in heads])


def make_model(config: ModelConfig) -> Decoder:
    decoder: Any = WhisperDecoder(config, [make_layer(config, index) for index in range(config.num_layers)])
    decoder.norm = make_layer_norm(config)
    decoder.embed_positions = Embedding(config.max_position_embeddings, config.hidden_size)
    decoder.encoders = nn.ModuleDict({"audio": AudioEncoder(config)})
    return decoder


def make_layer(config: ModelConfig, index: int) -> nn.Module:
    return CrossLayer(config, index) if config.sliding_windows[index] == STATE else SelfLayer(config, index)


def make_layer_norm(config: ModelConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, config.rms_norm_eps)


class SelfLayer(DecoderLayer):
    """x + attention(norm(x)), or norm(x + attention(x)) if norms come last."""

    def __init__(self, config: ModelConfig, index: int):
        nn.Module.__init__(self)
        self.input_layernorm = make_layer_norm(config)  # type: ignore[assignment]
        self.self_attn, self.norm_first = WhisperAttention(config, index), config.mixer.get("norm_first", True)

    def heads(self, x: Tensor) -> Tensor:
        return self.self_attn.heads(self.input_layernorm(x) if self.norm_first else x)

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.self_attn.o_proj(attended.flatten(1))
        return x if self.norm_first else self.input_layernorm(x)


class WhisperAttention(SelfAttention):
    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index, o_bias=True)
        self.q_bias = nn.Parameter(torch.empty(config.hidden_size))
        self.v_bias = nn.Parameter(torch.empty(config.hidden_size))

    def rotated(self, heads: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As in SelfAttention, without a rotation."""
        q, k, v = heads.split(self.num_heads, dim=1)
        return q + self.q_bias.view(-1, self.head_dim), k, v + self.v_bias.view(-1, self.head_dim)


class FeedForward(nn.Module):
    """The feed-forward part of a layer: x + mlp(norm(x)), or norm(x + mlp(x)) if norms come last."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.fc1 = Linear(config.hidden_size, config.intermediate_size, bias=True)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size, bias=True)
        self.final_layer_norm, self.activation = make_layer_norm(config), ACTIVATIONS[config.activation]
        self.norm_first = config.mixer.get("norm_first", True)

    def feed(self, x: Tensor) -> Tensor:
        x = x + self.fc2(self.activation(self.fc1(self.final_layer_norm(x) if self.norm_first else x)))
        return x if self.norm_first else self.final_layer_norm(x)


class CrossLayer(FeedForward):
    """Attention to what the encoder has computed, and a feed-forward part."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config)
        self.input_layernorm = make_layer_norm(config)
        self.self_attn = CrossAttention(config, index)  # named as the attention of other layers, for compiled steps

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """As `DecoderLayer.forward`."""
        attended = self.self_attn.attend(self.before(x, *step.rotations[0]), step)
        return self.after(*step.keep(self.self_attn, x, attended))

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The part before attention: the queries [T, num_heads, head_dim], not rotated."""
        x = self.input_layernorm(x) if self.norm_first else x
        return self.self_attn.q_proj(x).unflatten(-1, (-1, self.self_attn.head_dim))

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        """As `DecoderLayer.after`."""
        x = x + self.self_attn.o_proj(attended.flatten(1))
        return self.feed(x if self.norm_first else self.input_layernorm(x))


class CrossAttention(nn.Module):
    """The projections around the attention over what the encoder has computed.

    Args: bias: whether q, v and the output have biases.
    """

    def __init__(self, config: ModelConfig, index: int, bias: bool = True):
        super().__init__()
        size, inner, self.index, self.scoring = config.hidden_size, config.num_heads * config.head_dim, index, PLAIN
        self.rope, self.head_dim = 0, config.head_dim
        self.scale = self.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.q_proj = Linear(size, inner, bias)
        self.kv_proj = Linear(size, {"k_proj": inner, "v_proj": inner})
        self.v_bias = nn.Parameter(torch.empty(inner)) if bias else None
        self.o_proj = Linear(inner, size, bias)

    def keys_and_values(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """encoded [positions, hidden_size] -> K and V, [positions, num_heads, head_dim]"""
        k, v = self.kv_proj(encoded).unflatten(-1, (2, -1, self.head_dim)).unbind(1)
        return k, v if self.v_bias is None else v + self.v_bias.view(-1, self.head_dim)

    def attend(self, q: Tensor, step: StepContext) -> Tensor:
        """q [T, num_heads, head_dim] -> the same, attended to the positions of each token's sequence.

        Products are computed in float32 at least, and in float32 nothing is copied.
        """
        pages: Any = step.attention_of(self)
        k, v = views(step.kv_caches[self.index], self.head_dim)
        exact = torch.promote_types(q.dtype, torch.float32)
        queries = (q.to(exact) * self.scale).transpose(0, 1).split(pages.counts.tolist(), dim=1)
        attended = []
        for block, count, of_one in zip(pages.targets.tolist(), pages.encoded.tolist(), queries, strict=True):
            weights = (of_one @ k[block, :, :, :count].to(exact)).softmax(-1)
            attended.append(weights @ v[block, :, :count].to(exact))
        return torch.cat(attended, dim=1).transpose(0, 1).to(q.dtype)


class AudioEncoder(nn.Module):
    """The `spectrogram` of N sounds of 30 seconds, [N, num_mel_bins, 2 * POSITIONS] (audio/mel.py) -> [N, POSITIONS,
    hidden_size]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        size = config.hidden_size
        self.conv1 = nn.Conv1d(config.mixer["num_mel_bins"], size, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(size, size, kernel_size=3, stride=2, padding=1)
        self.embed_positions = Embedding(POSITIONS, size)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.mixer["num_layers"]))
        self.layer_norm = make_layer_norm(config)

    def forward(self, payload: dict[str, Tensor]) -> Tensor:
        x = payload["spectrogram"].to(self.conv1.weight.dtype)
        x = F.gelu(self.conv2(F.gelu(self.conv1(x)))).mT + self.embed_positions.weight.matrix
        return self.layer_norm(run_layers(self.layers, x))


def run_layers(layers: nn.ModuleList, x: Tensor, *more: Tensor) -> Tensor:
    """x [N, positions, hidden_size] of N inputs -> same. The layers get N and the positions as one dimension, as a
    Linear needs.

    Args: more: further arguments of the layers.
    """
    count, x = len(x), x.flatten(0, 1)
    for layer in layers:
        x = layer(x, count, *more)
    return x.unflatten(0, (count, -1))


class EncoderLayer(FeedForward):
    """Attention in which every position sees all others of its input, and a feed-forward part. Shape: [positions of N
    inputs, hidden_size] -> same.

    Args: config: of the decoder. Args of `forward`: count: N.
    """

    def __init__(self, config: ModelConfig):
        inner, num_heads = config.mixer["intermediate_size"], config.mixer["num_heads"]
        heads: Any = {"num_heads": num_heads, "num_kv_heads": num_heads, "head_dim": config.hidden_size // num_heads}
        config = replace(config, intermediate_size=inner, **heads)
        super().__init__(config)
        self.self_attn_layer_norm, self.self_attn = make_layer_norm(config), WhisperAttention(config, 0)

    def forward(self, x: Tensor, count: int) -> Tensor:
        heads = self.self_attn.heads(self.self_attn_layer_norm(x) if self.norm_first else x)
        q, k, v = (part.unflatten(0, (count, -1)).transpose(1, 2) for part in self.self_attn.rotated(heads, x, x))
        x = x + self.self_attn.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
        x = self.feed(x if self.norm_first else self.self_attn_layer_norm(x))
        most = torch.finfo(x.dtype).max - 1000
        return x.clamp(-most, most) if x.dtype == torch.float16 else x  # as transformers does
