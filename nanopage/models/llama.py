"""Llama (Touvron et al. 2023; Llama 3, 2024): also SmolLM2, TinyLlama, and Mistral with its sliding window.

Pre-norm decoder layers of grouped-query attention with rotary positions and a SwiGLU feed-forward:

    x = x + attention(norm(x))
    x = x + mlp(norm(x))
"""

from torch import Tensor, nn

from nanopage.config import ModelConfig
from nanopage.layers.attention import AttentionMetadata, paged_attention
from nanopage.layers.embedding import Embedding, LMHead
from nanopage.layers.linear import Linear
from nanopage.layers.mlp import MLP
from nanopage.layers.norm import RMSNorm
from nanopage.layers.rotary import RotaryEmbedding, rotate


class LlamaAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.window = config.sliding_windows[layer]
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = Linear(config.hidden_size, parts, config.attention_bias)
        self.o_proj = Linear(q_size, config.hidden_size, config.attention_bias)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim], rotated."""
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))  # [T, q heads + k heads + v heads, head_dim]
        qk, v = heads.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        q, k = rotate(qk, cos, sin).split([self.num_heads, self.num_kv_heads], dim=1)
        return q, k, v


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        rows: Tensor | None = None,
    ) -> Tensor:
        q, k, v = self.before(x, cos, sin)
        attended = paged_attention(q, k, v, kv_cache, metadata, self.self_attn.window)
        if rows is not None:
            x, attended = x[rows], attended[rows]
        return self.after(x, attended)

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What comes before attention: q, k and v."""
        return self.self_attn.project(self.input_layernorm(x), cos, sin)

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        """What comes after it, row by row: attended [T, num_heads, head_dim]."""
        x = x + self.self_attn.o_proj(attended.flatten(1))
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        rows: Tensor | None = None,
    ) -> Tensor:
        x = self.embed_tokens(input_ids)
        cos, sin = self.rotary(positions, x.dtype)
        last = self.layers[-1]
        for layer, layer_cache in zip(self.layers, kv_cache.unbind(0), strict=True):
            x = layer(x, cos, sin, layer_cache, metadata, rows if layer is last else None)
        return self.norm(x)


class LlamaForCausalLM(nn.Module):
    """Token ids and positions [T], kv_cache [layers, 2, blocks, kv_heads, head_dim * block_size] -> [T, hidden_size],
    or only of the tokens that `rows` names; the last layer, too, then leaves out the others after attention.

    `lm_head` makes logits of what comes out.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.model = LlamaModel(config)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, tied_to)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        rows: Tensor | None = None,
    ) -> Tensor:
        return self.model(input_ids, positions, kv_cache, metadata, rows)
