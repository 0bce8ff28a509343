"""Which experts of a mixture compute a token (see experts/moe.py)."""

import torch
from torch import Tensor


def route(
    logits: Tensor,
    num_chosen: int,
    normalize: bool,
    bias: Tensor | None = None,
    groups: tuple[int, int] = (1, 1),
    scaling: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose experts for each token, in float32 or float64.

    Scores are a softmax, or sigmoids if there is a bias, which decides only who is chosen (DeepSeek-V3, 2024). Adjacent
    experts may form groups: experts are then chosen from the best groups only. The score of a group is its best
    expert's (DeepSeek-V2, 2024), or with a bias the sum of its best two.

    Args:
        logits: [T, experts].
        num_chosen: how many experts a token has.
        normalize: whether the weights of a token's experts are divided by their sum.
        bias: [experts], added to scores for the choice.
        groups: how many there are, and from how many of them a token's experts are.
        scaling: of the weights, last.

    Returns: the numbers of the experts, int64 [T, num_chosen], and their weights [T, num_chosen].
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = logits.softmax(-1) if bias is None else logits.sigmoid()
    choice = scores if bias is None else scores + bias.to(scores.dtype)
    num_groups, num_chosen_groups = groups
    if num_groups > 1:
        choice = choice.unflatten(-1, (num_groups, -1))
        best = choice.amax(-1) if bias is None else choice.topk(2).values.sum(-1)
        hidden = torch.ones_like(best, dtype=torch.bool).scatter(-1, best.topk(num_chosen_groups).indices, False)
        choice = choice.masked_fill(hidden[..., None], -torch.inf).flatten(-2)
    experts = choice.topk(num_chosen, dim=-1).indices
    weights = scores.gather(-1, experts)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be 0
    return experts, weights if scaling == 1 else weights * scaling
