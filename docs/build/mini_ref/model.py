"""A Llama (Touvron et al., 2023) from its files (milestone 2)."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

# (layer, q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim]) -> [T, num_heads, head_dim]; q, k are rotated
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Model:
    """A Llama, from config.json and the .safetensors files of a directory. It computes in the type of its weights.

    Raises: ValueError unless config.json says LlamaForCausalLM, the default rope type, SiLU and no quantization.

    T: all tokens of a step, those of several sequences one after the other. Everything but attention treats each token
    by itself, so it does not matter whose they are.
    """

    def __init__(self, model_dir: str | Path):
        fields = json.loads((Path(model_dir) / "config.json").read_text())
        rope = fields.get("rope_parameters") or {**fields, **(fields.get("rope_scaling") or {})}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        other = rope_type != "default" or fields["hidden_act"] != "silu" or fields.get("quantization_config")
        if fields.get("architectures") != ["LlamaForCausalLM"] or other:
            raise ValueError(f"{model_dir}: not a LlamaForCausalLM with plain RoPE, SiLU and floats")
        self.num_layers, self.num_heads = fields["num_hidden_layers"], fields["num_attention_heads"]
        self.num_kv_heads = fields.get("num_key_value_heads") or self.num_heads
        self.head_dim = fields.get("head_dim") or fields["hidden_size"] // self.num_heads
        self.vocab_size, self.max_len = fields["vocab_size"], fields["max_position_embeddings"]
        self.norm_eps = fields["rms_norm_eps"]
        ends = fields.get("eos_token_id")  # a number, a list or nothing
        self.end_ids = tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)
        exponents = torch.arange(0, self.head_dim, 2) / self.head_dim
        self.frequencies = 1 / rope.get("rope_theta", 10_000) ** exponents  # [head_dim / 2]
        self.weights: dict[str, Tensor] = {}
        for file in sorted(Path(model_dir).glob("*.safetensors")):
            self.weights |= load_file(file)
        if fields.get("tie_word_embeddings"):
            self.weights["lm_head.weight"] = self.weights["model.embed_tokens.weight"]
        self.dtype = self.weights["lm_head.weight"].dtype

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, hidden_size] after the last norm, of token_ids and positions, int64 [T] each."""
        x = F.embedding(token_ids, self.weights["model.embed_tokens.weight"])
        angles = positions[:, None, None].float() * self.frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)  # [T, 1, head_dim / 2]
        for layer in range(self.num_layers):
            name = f"model.layers.{layer}"
            h = self.norm(f"{name}.input_layernorm", x)
            heads = (self.linear(f"{name}.self_attn.{part}_proj", h) for part in "qkv")
            q, k, v = (each.unflatten(1, (-1, self.head_dim)) for each in heads)
            out = attend(layer, rotate(q, cos, sin), rotate(k, cos, sin), v)
            x = x + self.linear(f"{name}.self_attn.o_proj", out.flatten(1))
            h = self.norm(f"{name}.post_attention_layernorm", x)
            gate, up = self.linear(f"{name}.mlp.gate_proj", h), self.linear(f"{name}.mlp.up_proj", h)
            x = x + self.linear(f"{name}.mlp.down_proj", F.silu(gate) * up)
        return self.norm("model.norm", x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocab_size] of hidden states [N, hidden_size]."""
        return self.linear("lm_head", hidden)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x times the transposed matrix `name`.weight, plus `name`.bias if there is one."""
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        """x / sqrt(mean(x²) + norm_eps), times `name`.weight."""
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.norm_eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al., 2021): turn each pair (dimension i, dimension i + head_dim / 2) of x by an angle.

    Args: x: [T, heads, head_dim]. cos, sin: [T, 1, head_dim / 2], of the angles.
    """
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
