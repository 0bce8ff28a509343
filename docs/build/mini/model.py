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
        raise NotImplementedError("milestone 2")

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, hidden_size] after the last norm, of token_ids and positions, int64 [T] each."""
        raise NotImplementedError("milestone 2")

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocab_size] of hidden states [N, hidden_size]."""
        raise NotImplementedError("milestone 2")

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x times the transposed matrix `name`.weight, plus `name`.bias if there is one."""
        raise NotImplementedError("milestone 2")

    def norm(self, name: str, x: Tensor) -> Tensor:
        """x / sqrt(mean(x²) + norm_eps), times `name`.weight."""
        raise NotImplementedError("milestone 2")


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al., 2021): turn each pair (dimension i, dimension i + head_dim / 2) of x by an angle.

    Args: x: [T, heads, head_dim]. cos, sin: [T, 1, head_dim / 2], of the angles.
    """
    raise NotImplementedError("milestone 2")
