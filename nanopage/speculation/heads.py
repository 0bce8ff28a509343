"""Heads: small networks that guess the next tokens from hidden states of the model.

EAGLE-3 (Li et al. 2025) is trained for a model that exists, and reads the states before three of its layers. Heads for
multi-token prediction (MTP: DeepSeek-V3, 2024; Qwen3-Next, 2025) are trained with their model, are in its checkpoint,
and read its last state. Both are one decoder layer. At position p, it reads what is known of the model's state there
and the embedding of the token at p + 1, and predicts the token at p + 2. What it puts out is its own state at p + 1,
from which it guesses a further token.

A head has, beside its layer and its rope,

    taps                  which inputs of the model's layers it reads, as in `StepContext`
    begin(model, inputs)  these inputs [T, hidden_size] each -> the states [T, hidden_size]
    join(embeds, states)  the layer's input: of the next tokens' embeddings and of the states, [T, hidden_size] each
    end(model, x)         the layer's output -> the next states, and logits for all tokens of the model [T, vocab_size]
"""

import torch
from torch import Tensor, nn

from nanopage.config.model import ModelConfig
from nanopage.layers.embedding import Embedding
from nanopage.layers.linear import Linear
from nanopage.layers.rotary import RotaryEmbedding
from nanopage.models.decoder import Decoder, DecoderLayer, SelfAttention, make_norm, scale_logits


class MTPHead(nn.Module):
    """A layer of the model's own kind, which shares the model's embeddings and head. Modules have Qwen's names.

    Args: config: of the model, with one layer. num_layers: of the model.
    """

    embed_tokens = None

    def __init__(self, config: ModelConfig, layer: nn.Module, num_layers: int):
        super().__init__()
        self.config, self.taps = config, [num_layers]
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = make_norm(config), make_norm(config)
        self.fc = Linear(2 * config.hidden_size, config.hidden_size)
        self.layers, self.norm = nn.ModuleList([layer]), make_norm(config)
        self.layer = layer
        self.rotary = RotaryEmbedding((config.head_dim, config.rope))

    def begin(self, model: Decoder, inputs: list[Tensor]) -> Tensor:
        return model.norm(inputs[0])

    def join(self, embeds: Tensor, states: Tensor) -> Tensor:
        return self.fc(torch.cat((self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(states)), dim=-1))

    def end(self, model: Decoder, x: Tensor) -> tuple[Tensor, Tensor]:
        states = self.norm(x)
        return states, scale_logits(model.lm_head(states), model.logit_divisor, model.logit_softcap)


class EagleHead(nn.Module):
    """A layer of Llama, with a head of its own for the most frequent tokens. Modules have the names of published heads.

    Args:
        config: of the layer. Its vocabulary is the model's.
        targets: the token of the model for each logit, int64.
        has_embeddings: whether the head has embeddings of its own. Otherwise it uses the model's.
        norm_first: whether the state that is added to the output of attention is normalized.
    """

    targets: Tensor

    def __init__(self, config: ModelConfig, taps: list[int], targets: Tensor, has_embeddings: bool, norm_first: bool):
        super().__init__()
        self.config, self.taps, size = config, taps, config.hidden_size
        self.fc = Linear(len(taps) * size, size)
        self.midlayer = self.layer = EagleLayer(config, norm_first)
        self.norm, self.lm_head = make_norm(config), Linear(size, len(targets))
        self.register_buffer("targets", targets, persistent=False)
        self.rotary = RotaryEmbedding((config.head_dim, config.rope))
        self.embed_tokens = Embedding(config.vocab_size, size) if has_embeddings else None

    def begin(self, model: Decoder, inputs: list[Tensor]) -> Tensor:
        return self.fc(torch.cat(inputs, dim=-1))

    def join(self, embeds: Tensor, states: Tensor) -> Tensor:
        return torch.cat((embeds, states), dim=-1)

    def end(self, model: Decoder, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.lm_head(self.norm(x))
        everything = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return x, everything.index_copy(1, self.targets, logits)


class EagleLayer(DecoderLayer):
    """A layer whose input is an embedding and a state, [T, 2 * hidden_size]. Its output is a state."""

    def __init__(self, config: ModelConfig, norm_first: bool):
        attention = SelfAttention(config, 0, config.attention_bias, config.attention_bias)
        attention.qkv_proj = Linear(2 * config.hidden_size, attention.qkv_proj.parts, config.attention_bias)
        super().__init__(config, attention)
        self.hidden_norm, self.norm_first = make_norm(config), norm_first

    def heads(self, x: Tensor) -> Tensor:
        embeds, states = x.chunk(2, dim=-1)
        return self.self_attn.heads(torch.cat((self.input_layernorm(embeds), self.hidden_norm(states)), dim=-1))

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        states = x.chunk(2, dim=-1)[1]
        return super().after(self.hidden_norm(states) if self.norm_first else states, attended)
