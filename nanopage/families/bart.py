"""BART (Lewis et al. 2019): an encoder reads a text, and a decoder writes another, such as its summary or translation.
mBART, Marian and Pegasus are the same, with norms or positions of another kind.

The layers are those of whisper.py: cross-attention is a layer of its own, whose K and V are a state. BART and Marian
have norms after attention and after the feed-forward layer, around what both add to, not before them.
"""

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanopage.checks.fields import Fields
from nanopage.config.model import ModelConfig
from nanopage.config.rope import UNROTATED
from nanopage.families import whisper
from nanopage.families.whisper import CrossLayer, EncoderLayer, SelfLayer, clamped, make_layer_norm, run_layers
from nanopage.layers.embedding import Embedding
from nanopage.layers.linear import Linear
from nanopage.models.decoder import Decoder
from nanopage.state.layer_kinds import STATE


class Style(NamedTuple):
    """How an architecture differs.

    norm_first: whether norms come before attention and before the feed-forward layer. There is then a last norm, too.
    norm_embeds: whether embeddings are normalized.
    learned: whether there are embeddings of positions. Otherwise, they are sines.
    """

    norm_first: bool
    norm_embeds: bool
    learned: bool


HEADLESS = "BartModel"  # bart-base and bart-large: the head is the embeddings, without biases
STYLES = {
    "BartForConditionalGeneration": Style(norm_first=False, norm_embeds=True, learned=True),
    HEADLESS: Style(norm_first=False, norm_embeds=True, learned=True),
    "MBartForConditionalGeneration": Style(norm_first=True, norm_embeds=True, learned=True),
    "MarianMTModel": Style(norm_first=False, norm_embeds=False, learned=False),
    "PegasusForConditionalGeneration": Style(norm_first=True, norm_embeds=False, learned=False),
}
ARCHITECTURES = tuple(STYLES)
GGUF_ARCHITECTURE = None  # GGUF files are not read
GGUF_TENSORS: dict[str, str] = {}
UNUSED_ROWS = 2  # at the start of the embeddings of positions


def text_fields(fields: Fields) -> Fields:
    """The sizes of the decoder, under the usual names, with transformers' defaults."""
    return whisper.with_sizes(fields, 1024, 4096, 12, 16, fields.size("max_position_embeddings", 1024))


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in whisper.py. Encoder and decoder have as many positions each."""
    hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    encoder = {
        "num_layers": fields.size("encoder_layers", 12),
        "num_heads": fields.size("encoder_attention_heads", 16),
        "intermediate_size": fields.size("encoder_ffn_dim", 4096),
    }
    for name, heads in (("decoder", num_heads), ("encoder", encoder["num_heads"])):
        if hidden_size % heads:
            raise fields.error("d_model", f"{hidden_size} is not a multiple of {name}_attention_heads={heads}")
    if not fields.flag("share_encoder_decoder_embeddings", True):  # of Marian
        raise fields.unsupported("share_encoder_decoder_embeddings", "false")
    size = fields.size("vocab_size")
    if (of_decoder := fields.values.get("decoder_vocab_size")) not in (None, size):
        raise fields.unsupported("decoder_vocab_size", f"{of_decoder!r:.100}", [f"vocab_size={size}"])
    positions = fields.size("max_position_embeddings")
    return {
        "num_kv_heads": num_heads,
        "head_dim": hidden_size // num_heads,
        "rms_norm_eps": 1e-5,
        "rope": UNROTATED,
        "sliding_windows": (None, STATE) * (fields.size("num_hidden_layers") // 2),
        "state": ((2, positions, hidden_size),),
        "encoded_positions": positions,
        "activation": fields.activation("activation_function", "gelu"),
        "embedding_scale": hidden_size**0.5 if fields.flag("scale_embedding") else 1.0,
        "tie_word_embeddings": fields.flag("tie_word_embeddings", True),
        "mixer": encoder,
        "undivided": "its encoder is not divided",
    }


def rename(name: str, config: ModelConfig) -> str | None:
    """As in whisper.py. Biases of K change no result, and sines are computed."""
    name = f"model.{name}" if config.architecture == HEADLESS else name
    if name.endswith(("k_proj.bias", "coder.version")):
        return None
    if name.endswith("embed_positions.weight") and not STYLES[config.architecture].learned:
        return None
    if name == "final_logits_bias":
        return "lm_head.bias"
    shared = "model.shared.weight"
    if name == (shared if config.tie_word_embeddings else "model.decoder.embed_tokens.weight"):
        return "model.embed_tokens.weight"
    if name == shared or (name.endswith("embed_tokens.weight") and config.tie_word_embeddings):
        return None  # copies
    return whisper.rename(re.sub(r"^model\.encoder\.", "model.encoders.text.", name), config)


def make_model(config: ModelConfig) -> Decoder:
    return TextDecoder(config)


def make_layer(config: ModelConfig, index: int) -> nn.Module:
    if STYLES[config.architecture].norm_first:
        return whisper.make_layer(config, index)
    kind = CrossLayerNormedAfter if config.sliding_windows[index] == STATE else SelfLayerNormedAfter
    return kind(config, index)


class TextDecoder(Decoder):
    """A Decoder with an encoder of text, and with positions and norms of its style."""

    def __init__(self, config: ModelConfig):
        super().__init__(config, [make_layer(config, index) for index in range(config.num_layers)])
        add_positions(self, config)
        self.norm = last_norm(config)  # type: ignore[assignment]
        if config.architecture != HEADLESS:
            head = BiasedHead(config.hidden_size, config.vocab_size)
            head.weight, self.lm_head = self.lm_head.weight, head
        embed_tokens = self.embed_tokens if config.tie_word_embeddings else None
        self.encoders = nn.ModuleDict({"text": TextEncoder(config, embed_tokens)})  # type: ignore[assignment]

    def embed(self, input_ids: Tensor, positions: Tensor, embeds: Any = None) -> Tensor:
        return first_input(self, input_ids, positions)


class BiasedHead(Linear):
    """The head, with a bias that checkpoints have as [1, vocab_size]."""

    def __init__(self, hidden_size: int, vocab_size: int):
        super().__init__(hidden_size, vocab_size)
        self.bias: nn.Parameter = nn.Parameter(torch.empty(1, vocab_size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.product(x, self.bias[0])

    def slots(self, parameter: Tensor) -> dict[str, Tensor]:
        return {"": parameter}


class SelfLayerNormedAfter(SelfLayer):
    """norm(x + attention(x))"""

    def heads(self, x: Tensor) -> Tensor:
        return self.self_attn.heads(x)

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        return self.input_layernorm(super().after(x, attended))


class CrossLayerNormedAfter(CrossLayer):
    """x = norm(x + attention(x, encoded)); norm(x + mlp(x))"""

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.self_attn.q_proj(x).unflatten(-1, (-1, self.self_attn.head_dim))

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        x = self.input_layernorm(x + self.self_attn.o_proj(attended.flatten(1)))
        return self.final_layer_norm(x + self.fc2(self.activation(self.fc1(x))))


class EncoderLayerNormedAfter(EncoderLayer):
    """As EncoderLayer, with each norm after what it would come before."""

    def forward(self, x: Tensor, count: int) -> Tensor:
        x = self.self_attn_layer_norm(x + self.attend(x, count))
        return clamped(self.final_layer_norm(x + self.feed(x)))


class TextEncoder(nn.Module):
    """The `input_ids` of N texts, int64 [N, positions] -> [N, positions, hidden_size].

    Args: embed_tokens: the decoder's. None: the encoder has its own.
    """

    def __init__(self, config: ModelConfig, embed_tokens: Embedding | None):
        super().__init__()
        self.embed_tokens = embed_tokens or Embedding(config.vocab_size, config.hidden_size)
        self.embedding_scale = config.embedding_scale
        add_positions(self, config)
        kind = EncoderLayer if STYLES[config.architecture].norm_first else EncoderLayerNormedAfter
        self.layers = nn.ModuleList(kind(config) for _ in range(config.mixer["num_layers"]))
        self.layer_norm = last_norm(config)

    def forward(self, payload: dict[str, Tensor]) -> Tensor:
        input_ids = payload["input_ids"]
        count, length = input_ids.shape
        x = first_input(self, input_ids.flatten(), torch.arange(length, device=input_ids.device).repeat(count))
        return self.layer_norm(run_layers(self.layers, x.unflatten(0, (count, length))))


class LearnedPositions(Embedding):
    def forward(self, positions: Tensor) -> Tensor:
        return super().forward(positions + UNUSED_ROWS)


class SinePositions(nn.Module):
    """Sines and cosines of positions [T], in float64: [T, size] (Vaswani et al. 2017). The sines come first."""

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def forward(self, positions: Tensor) -> Tensor:
        exponents = torch.arange(0, self.size, 2, dtype=torch.float64, device=positions.device) / self.size
        angles = positions[:, None] / 10000**exponents
        return torch.cat((angles.sin(), angles.cos()), dim=1)


def add_positions(part: Any, config: ModelConfig) -> None:
    """Give the encoder or the decoder what `first_input` needs beside embeddings of tokens."""
    style, size = STYLES[config.architecture], config.hidden_size
    positions = LearnedPositions(config.max_position_embeddings + UNUSED_ROWS, size)
    part.embed_positions = positions if style.learned else SinePositions(size)
    part.layernorm_embedding = make_layer_norm(config) if style.norm_embeds else nn.Identity()


def first_input(part: Any, input_ids: Tensor, positions: Tensor) -> Tensor:
    """The input of the first layer of the encoder or of the decoder: [T, hidden_size]. input_ids, positions: [T]"""
    x = part.embed_tokens(input_ids) * part.embedding_scale
    return part.layernorm_embedding(x + part.embed_positions(positions).to(x.dtype))


def last_norm(config: ModelConfig) -> nn.Module:
    return make_layer_norm(config) if STYLES[config.architecture].norm_first else nn.Identity()
