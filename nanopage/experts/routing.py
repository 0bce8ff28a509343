"""Which experts of a mixture compute a token (see experts/moe.py)."""

import torch
from torch import Tensor


def route(logits: Tensor, num_chosen: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Choose experts for each token, in float32 or float64.

    Args:
        logits: [T, experts].
        num_chosen: how many experts a token has.
        normalize: whether the weights of a token's experts are divided by their sum.

    Returns: the numbers of the experts, int64 [T, num_chosen], and their weights [T, num_chosen].
    """
    probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
    weights, experts = probabilities.topk(num_chosen, dim=-1)
    return experts, weights / weights.sum(-1, keepdim=True) if normalize else weights
