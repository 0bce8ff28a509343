"""A transformer encoder: the part that BERT and RoBERTa share. Devlin et al. 2018.

token ids, positions, token types ─▶ embeddings ─▶ norm ─▶ layers ─▶ hidden states ─▶ pooling or a classification head

a layer:   x = norm(x + attention(x))
           x = norm(x + mlp(x))

Attention is not causal, so every token needs all others, and there is no KV cache. The tokens of a batch are flattened,
without padding. Sequences of equal length lie next to each other: a `Span` is a group of them.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopage.layers.embedding import Embedding
from nanopage.layers.linear import Linear
from nanopage.layers.weight import own_parameters
from nanopage.pooling.encoder_config import EncoderConfig

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
# The names of a layer's modules in checkpoints; `Linear.parts` has those of q, k and v.
LAYER_PLACES = {
    "qkv": "attention.self.qkv",
    "o_proj": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up_proj": "intermediate.dense",
    "down_proj": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
PLACES = {
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
}


class Span(NamedTuple):
    """`num` sequences of `length` tokens each. The first token of the first one is `start` of the batch."""

    start: int
    num: int
    length: int

    @property
    def tokens(self) -> slice:
        return slice(self.start, self.start + self.num * self.length)


class Encoder(nn.Module):
    """Computes hidden states, and pools them or classifies the sequences."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.config, size = config, config.hidden_size
        self.words = Embedding(config.vocab_size, size)
        self.positions = Embedding(config.num_positions, size)
        self.types = Embedding(config.type_vocab_size, size)
        self.norm = nn.LayerNorm(size, config.layer_norm_eps)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_layers))
        self.head: ClassificationHead | None = None
        if config.pooling.task == "classify":
            self.head = ClassificationHead(size, config.pooling.num_labels)

    def forward(self, input_ids: Tensor, token_types: Tensor, positions: Tensor, spans: list[Span]) -> Tensor:
        """Compute the vector of each of B sequences.

        Args:
            input_ids, token_types, positions: int64 [T]; positions count from 0 in each sequence.
            spans: all sequences, in order.

        Returns: float32 [B, hidden_size], or [B, num_labels].
        """
        x = self.words(input_ids) + self.types(token_types) + self.positions(positions + self.config.first_position)
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, spans)
        if self.head is not None:
            return self.head(pool(x, spans, "CLS").to(x.dtype)).float()
        return pool(x, spans, self.config.pooling.pooling_type)


class EncoderLayer(nn.Module):
    """Attention and a feed-forward layer, each before a norm."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        size = config.hidden_size
        self.num_heads, self.activation = config.num_heads, ACTIVATIONS[config.hidden_act]
        self.qkv = Linear(size, {"query": size, "key": size, "value": size}, bias=True)
        self.o_proj = Linear(size, size, bias=True)
        self.attention_norm = nn.LayerNorm(size, config.layer_norm_eps)
        self.up_proj = Linear(size, config.intermediate_size, bias=True)
        self.down_proj = Linear(config.intermediate_size, size, bias=True)
        self.mlp_norm = nn.LayerNorm(size, config.layer_norm_eps)

    def forward(self, x: Tensor, spans: list[Span]) -> Tensor:
        """x [T, hidden_size] -> same"""
        x = self.attention_norm(x + self.o_proj(attend(self.qkv(x), self.num_heads, spans)))
        return self.mlp_norm(x + self.down_proj(self.activation(self.up_proj(x))))


class ClassificationHead(nn.Module):
    """Scores of the classes, from the first token: [B, hidden_size] -> [B, num_labels]."""

    def __init__(self, hidden_size: int, num_labels: int):
        super().__init__()
        self.dense = Linear(hidden_size, hidden_size, bias=True)
        self.out = Linear(hidden_size, num_labels, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.dense(x)))


def attend(qkv: Tensor, num_heads: int, spans: list[Span]) -> Tensor:
    """Attention within each sequence: qkv [T, 3 * hidden_size] -> [T, hidden_size]."""
    attended = qkv.new_empty(len(qkv), qkv.shape[1] // 3)
    for span in spans:
        q, k, v = qkv[span.tokens].view(span.num, span.length, 3, num_heads, -1).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v)  # [num, num_heads, length, head_dim]
        attended[span.tokens].view(span.num, span.length, num_heads, -1).copy_(heads.transpose(1, 2))
    return attended


def pool(hidden: Tensor, spans: list[Span], pooling_type: str) -> Tensor:
    """The first or the last hidden state of each sequence, or for "MEAN" the sum of all, which the engine divides:
    [T, hidden_size] -> float32 [B, hidden_size]."""
    pooled = []
    for span in spans:
        states = hidden[span.tokens].view(span.num, span.length, -1)
        if pooling_type == "MEAN":
            pooled.append(states.float().sum(1))
        else:
            pooled.append(states[:, 0 if pooling_type == "CLS" else -1].float())
    return torch.cat(pooled)


def slots(model: Encoder, head_places: dict[str, str]) -> dict[str, Tensor]:
    """Checkpoint name -> the part of a parameter that it fills.

    Args: head_places: the names of the head's modules in checkpoints.
    """
    views: dict[str, Tensor] = {}
    for place, module in model.named_modules():
        for kind, parameter in own_parameters(module).items():
            path = _checkpoint_place(place, head_places)
            if isinstance(module, Linear) and "" not in module.parts:
                parent = path.rpartition(".")[0]
                rows = parameter.data.split(list(module.parts.values()))
                views |= {f"{parent}.{part}.{kind}": view for part, view in zip(module.parts, rows, strict=True)}
            else:
                views[f"{path}.{kind}"] = parameter.data
    return views


def _checkpoint_place(place: str, head_places: dict[str, str]) -> str:
    if place.startswith("layers."):
        _, index, name = place.split(".")
        return f"encoder.layer.{index}.{LAYER_PLACES[name]}"
    return head_places[place.removeprefix("head.")] if place.startswith("head.") else PLACES[place]
