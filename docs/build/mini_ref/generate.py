"""One request at a time: everything computed anew for each token (milestone 3), or with a KV cache (4)."""

import torch
from torch import Tensor

from .attention import attend
from .model import Model


class KVCache:
    """K and V of the tokens of one sequence: for each layer [2, length, num_kv_heads, head_dim], in one piece."""

    def __init__(self, model: Model):
        empty = torch.empty(2, 0, model.num_kv_heads, model.head_dim, dtype=model.dtype)
        self.kv = [empty] * model.num_layers

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append the K and V of new tokens to those of a layer, and let the new tokens attend (see `model.Attend`)."""
        self.kv[layer] = torch.cat((self.kv[layer], torch.stack((k, v))), dim=1)
        return attend(q, *self.kv[layer])


def generate(
    model: Model, prompt_ids: list[int], max_tokens: int, stop_ids: tuple[int, ...] = (), cache: KVCache | None = None
) -> list[int]:
    """The most likely continuation of a prompt: at most `max_tokens` tokens, up to the first one that is in `stop_ids`.

    Args: cache: empty; each token is then computed once. None: all tokens are computed anew for each new one.
    """
    output: list[int] = []
    start = 0  # of the tokens to compute
    while len(output) < max_tokens and not (output and output[-1] in stop_ids):
        token_ids = [*prompt_ids, *output]
        attention = cache.attend if cache else lambda layer, q, k, v: attend(q, k, v)
        hidden = model.forward(torch.tensor(token_ids[start:]), torch.arange(start, len(token_ids)), attention)
        output.append(int(model.logits(hidden[-1:]).argmax()))
        start = len(token_ids) if cache else 0
    return output
