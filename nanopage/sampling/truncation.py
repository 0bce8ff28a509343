"""Top-k, top-p and min-p: which tokens may be sampled.

Each of them sets a lower bound for the logits that may be sampled. The bound is searched among the candidates, a few
hundred of the largest logits of a row, and noise is computed for the candidates only. If they do not reach down to the
bound, more of them are taken.
"""

import torch
from torch import Tensor

from nanopage.sampling.noise import gumbel_noise
from nanopage.step import NO_TOKEN

CANDIDATES = 256  # how many of the largest logits are tried first


def sample_truncated(scaled: Tensor, limits: list[Tensor], seeds: Tensor, positions: Tensor) -> Tensor:
    """Sample from each row one of the tokens that `truncate` keeps: int64 [B]."""
    return sample_among(*truncate(scaled, limits), seeds, positions)


def sample_among(values: Tensor, ids: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Sample one of the candidates of each row: int64 [B]; NO_TOKEN if the largest value of a row is not finite.

    Args: values, ids: logits and token ids of the candidates, [B, C], the largest first.
    """
    best = (values + gumbel_noise(seeds, positions, ids)).argmax(dim=-1, keepdim=True)
    return torch.where(values[:, 0].isfinite(), ids.gather(1, best).squeeze(1), NO_TOKEN)


def truncate(scaled: Tensor, limits: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Apply min-p, then top-k, then top-p to what is left. This is vLLM's order.

    Tokens that tie with the last one kept are kept, too, so the result does not depend on the order of equal logits.

    Args:
        scaled: logits divided by the temperature, [B, vocab_size].
        limits: top_k (int64, the vocabulary's size if it is off), top_p and min_p, each [B].

    Returns: (values, ids), both [B, C]: the C largest logits of each row, in descending order, and their token ids.
        Logits that are not kept are -inf.
    """
    size = CANDIDATES
    while True:
        values, ids, exact = truncate_among(size, scaled, limits)
        if bool(exact):
            return values, ids
        size *= 8


def truncate_among(size: int, scaled: Tensor, limits: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """`truncate` among the `size` largest logits of each row, and whether they include all that is kept: bool []."""
    vocab_size = scaled.shape[-1]
    size = min(size, vocab_size)
    top_k, top_p, min_p = (limit[:, None] for limit in limits)
    top_p, min_p = top_p.to(scaled.dtype), min_p.to(scaled.dtype)
    values, ids = scaled.topk(size, dim=-1)
    last = values[:, -1:]
    floor = values[:, :1] + min_p.log()  # min_p of 0: -inf
    # The k-th largest is a bound if it is among the candidates.
    kth = values.gather(1, top_k.clamp(max=size) - 1)
    floor = torch.where(top_k <= size, torch.maximum(floor, kth), floor)
    kept = values >= floor
    complete = (last < floor) | (last == -torch.inf) | (size == vocab_size)
    # Probability mass relative to the most likely token. If the floor lies within the candidates, they hold all the
    # mass. Otherwise the total is that of the whole row.
    weights = torch.where(kept, (values - values[:, :1]).exp(), 0)
    mass = weights.cumsum(dim=-1)
    total = mass[:, -1:]
    if scaled.is_cuda or not bool(complete.all()):  # computing on a GPU is faster than asking it
        total = torch.where(complete, total, (scaled - values[:, :1]).exp().sum(dim=-1, keepdim=True))
    # Keep a token if the mass before it has not reached top_p. So the token that crosses top_p is kept.
    crossing = ((mass - weights < top_p * total) & kept).sum(dim=-1, keepdim=True).clamp(min=1) - 1
    edge = torch.where(top_p < 1, values.gather(1, crossing), -torch.inf)
    floor = torch.maximum(floor, edge)
    # If the bound is above the last candidate, the candidates include all that is kept. But the bound of top-p is exact
    # only if the total is, and the total ignores a min-p or top-k that cuts beyond the candidates.
    exact = complete | ((last < floor) & (top_k >= vocab_size) & (min_p == 0))
    return values.masked_fill_(values < floor, -torch.inf), ids, exact.all()
