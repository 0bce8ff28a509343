"""A transformer encoder: the part that BERT and RoBERTa share. Devlin et al. 2018.

token ids, positions, token types ─▶ embeddings ─▶ norm ─▶ layers ─▶ hidden states ─▶ pooling, perhaps a classifier

a layer:   x = norm(x + attention(x))
           x = norm(x + mlp(x))

Attention is not causal, so every token needs all others, and there is no KV cache. The tokens of a batch are flattened,
without padding. Sequences of equal length are adjacent: a `Span` is a group of such sequences.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopage.config.model import ModelConfig
from nanopage.layers.embedding import Embedding
from nanopage.layers.linear import Linear
from nanopage.layers.mlp import ACTIVATIONS


class Span(NamedTuple):
    """`num` sequences of `length` tokens each. Their first token is token `start` of the batch."""

    start: int
    num: int
    length: int

    @property
    def tokens(self) -> slice:
        return slice(self.start, self.start + self.num * self.length)


class Encoder(nn.Module):
    """Computes the hidden states of tokens. Its parts have the names of checkpoints.

    score: turns the hidden states of first tokens, [B, hidden_size], into scores of classes. None for embeddings.
    """

    lm_head = None

    def __init__(self, config: ModelConfig):
        super().__init__()
        size, self.first_position = config.hidden_size, config.first_position
        sizes = {
            "word_embeddings": config.vocab_size,
            "position_embeddings": config.first_position + config.max_position_embeddings,
            "token_type_embeddings": config.type_vocab_size,
        }
        self.embeddings = nn.ModuleDict({name: Embedding(num, size) for name, num in sizes.items()})
        self.embeddings["LayerNorm"] = nn.LayerNorm(size, config.rms_norm_eps)
        layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_layers))
        self.encoder, self.layers = nn.ModuleDict({"layer": layers}), layers
        self.norm = nn.Identity()  # each layer ends with a norm
        self.score: ClassificationHead | None = None
        if config.pooling is not None and config.pooling.task == "classify":
            self.score = ClassificationHead(size, config.pooling.num_labels)

    def forward(self, input_ids: Tensor, token_types: Tensor, positions: Tensor, spans: list[Span]) -> Tensor:
        """Compute the hidden states of T tokens.

        Args:
            input_ids, token_types, positions: int64 [T]; positions count from 0 in each sequence.
            spans: all sequences, in order.

        Returns: [T, hidden_size]
        """
        words, places, types, norm = self.embeddings.values()
        x = norm(words(input_ids) + types(token_types) + places(positions + self.first_position))
        for layer in self.layers:
            x = layer(x, spans)
        return x


class EncoderLayer(nn.Module):
    """Attention and a feed-forward layer, each followed by a norm."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.num_heads, self.activation = config.num_heads, ACTIVATIONS[config.activation]
        self.qkv = Linear(size, {f"attention.self.{name}": size for name in ("query", "key", "value")}, bias=True)
        self.attention = nn.ModuleDict({"output": Residual(size, size, config.rms_norm_eps)})
        self.up_proj = Linear(size, {"intermediate.dense": inner}, bias=True)
        self.output = Residual(inner, size, config.rms_norm_eps)

    def forward(self, x: Tensor, spans: list[Span]) -> Tensor:
        """x [T, hidden_size] -> same"""
        x = self.attention["output"](x, attend(self.qkv(x), self.num_heads, spans))
        return self.output(x, self.activation(self.up_proj(x)))


class Residual(nn.Module):
    """norm(x + W y + b). Shapes: x [T, size], y [T, in_features] -> [T, size]"""

    def __init__(self, in_features: int, size: int, eps: float):
        super().__init__()
        self.dense, self.LayerNorm = Linear(in_features, size, bias=True), nn.LayerNorm(size, eps)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.LayerNorm(x + self.dense(y))


class ClassificationHead(nn.Module):
    """Computes the scores of the classes from the first tokens: [B, hidden_size] -> [B, num_labels]."""

    def __init__(self, hidden_size: int, num_labels: int):
        super().__init__()
        self.dense = Linear(hidden_size, hidden_size, bias=True)
        self.out_proj = Linear(hidden_size, num_labels, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(torch.tanh(self.dense(x)))


def attend(qkv: Tensor, num_heads: int, spans: list[Span]) -> Tensor:
    """Attention within each sequence: qkv [T, 3 * hidden_size] -> [T, hidden_size]."""
    attended = qkv.new_empty(len(qkv), qkv.shape[1] // 3)
    for span in spans:
        q, k, v = qkv[span.tokens].view(span.num, span.length, 3, num_heads, -1).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v)  # [num, num_heads, length, head_dim]
        attended[span.tokens].view(span.num, span.length, num_heads, -1).copy_(heads.transpose(1, 2))
    return attended
