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
from nanopage.families import whisper
from nanopage.families.whisper import EncoderLayer, make_layer, make_layer_norm, run_layers
from nanopage.layers.embedding import Embedding
from nanopage.layers.linear import Linear
from nanopage.models.decoder import Decoder


class Style(NamedTuple):
    """How an architecture differs. `mixer` of ModelConfig has these fields.

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
UNUSED_ROWS = 2  # at the start of the embeddings of positions


def text_fields(fields: Fields) -> Fields:
    """As in whisper.py."""
    return whisper.with_sizes(fields, 1024, 4096, 12, 16, fields.size("max_position_embeddings", 1024))


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in whisper.py. Encoder and decoder have as many positions each."""
    if not fields.flag("share_encoder_decoder_embeddings", True):  # of Marian
        raise fields.unsupported("share_encoder_decoder_embeddings", "false")
    size = fields.size("vocab_size")
    if (of_decoder := fields.values.get("decoder_vocab_size")) not in (None, size):
        raise fields.unsupported("decoder_vocab_size", f"{of_decoder!r:.100}", [f"vocab_size={size}"])
    special = whisper.read_sizes(fields, fields.size("max_position_embeddings"), **STYLES[architecture]._asdict())
    scale = fields.size("hidden_size") ** 0.5 if fields.flag("scale_embedding") else 1.0
    return special | {"embedding_scale": scale}


def rename(name: str, config: ModelConfig) -> str | None:
    """As in whisper.py. Biases of K change no result, and sines are computed."""
    name = f"model.{name}" if config.architecture == HEADLESS else name
    if name.endswith(("k_proj.bias", "coder.version")):
        return None
    if name.endswith("embed_positions.weight") and not config.mixer["learned"]:
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


class TextDecoder(Decoder):
    """A Decoder with an encoder of text, and with positions and norms of its style."""

    def __init__(self, config: ModelConfig):
        super().__init__(config, [make_layer(config, index) for index in range(config.num_layers)])
        add_positions(self, config)
        self.norm = last_norm(config)  # type: ignore[assignment]
        if config.architecture != HEADLESS:
            head = BiasedHead(config.hidden_size, config.vocab_size, bias=True)
            head.weight, self.lm_head = self.lm_head.weight, head
        embed_tokens = self.embed_tokens if config.tie_word_embeddings else None
        self.encoders = nn.ModuleDict({"text": TextEncoder(config, embed_tokens)})  # type: ignore[assignment]

    def embed(self, input_ids: Tensor, positions: Tensor, embeds: Any = None) -> Tensor:
        return first_input(self, input_ids, positions)


class BiasedHead(Linear):
    """The head, with a bias that checkpoints have as [1, vocab_size]."""

    def slots(self, parameter: Tensor) -> dict[str, Tensor]:
        return {"": parameter if parameter.dim() > 1 else parameter[None]}


class TextEncoder(nn.Module):
    """The `input_ids` of N texts, int64 [N, positions] -> [N, positions, hidden_size].

    Args: embed_tokens: the decoder's. None: the encoder has its own.
    """

    def __init__(self, config: ModelConfig, embed_tokens: Embedding | None):
        super().__init__()
        self.embed_tokens = embed_tokens or Embedding(config.vocab_size, config.hidden_size)
        self.embedding_scale = config.embedding_scale
        add_positions(self, config)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.mixer["num_layers"]))
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
    size, learned = config.hidden_size, config.mixer["learned"]
    positions = LearnedPositions(config.max_position_embeddings + UNUSED_ROWS, size)
    part.embed_positions = positions if learned else SinePositions(size)
    part.layernorm_embedding = make_layer_norm(config) if config.mixer["norm_embeds"] else nn.Identity()


def first_input(part: Any, input_ids: Tensor, positions: Tensor) -> Tensor:
    """The input of the first layer of the encoder or of the decoder: [T, hidden_size]. input_ids, positions: [T]"""
    x = part.embed_tokens(input_ids) * part.embedding_scale
    return part.layernorm_embedding(x + part.embed_positions(positions).to(x.dtype))


def last_norm(config: ModelConfig) -> nn.Module:
    return make_layer_norm(config) if config.mixer["norm_first"] else nn.Identity()
