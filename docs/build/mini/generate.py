"""One request at a time: everything computed anew for each token (milestone 3), or with a KV cache (4)."""

import torch
from torch import Tensor

from .attention import attend
from .model import Model


class KVCache:
    """K and V of the tokens of one sequence: for each layer [2, length, num_kv_heads, head_dim], in one piece."""

    def __init__(self, model: Model):
        raise NotImplementedError("milestone 4")

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append the K and V of new tokens to those of a layer, and let the new tokens attend (see `model.Attend`)."""
        raise NotImplementedError("milestone 4")


def generate(
    model: Model, prompt_ids: list[int], max_tokens: int, stop_ids: tuple[int, ...] = (), cache: KVCache | None = None
) -> list[int]:
    """The most likely continuation of a prompt: at most `max_tokens` tokens, up to the first one that is in `stop_ids`.

    Args: cache: empty; each token is then computed once. None: all tokens are computed anew for each new one.
    """
    raise NotImplementedError("milestone 3")
