"""Top-k, top-p and min-p: which tokens may be sampled.

Each says which logit is the smallest that may be sampled. That is found among the few hundred largest logits of a row,
and noise is computed for those alone; only if they do not reach far enough, for more of them.
"""

import torch
from torch import Tensor

from nanopage.sampling.noise import gumbel_noise
from nanopage.step import NO_TOKEN

CANDIDATES = 256  # the first guess of how many of the largest logits hold all that truncation keeps


def sample_truncated(scaled: Tensor, limits: list[Tensor], seeds: Tensor, positions: Tensor) -> Tensor:
    """A sample of each row of what `truncate` keeps: int64 [B]."""
    return sample_among(*truncate(scaled, limits), seeds, positions)


def sample_among(values: Tensor, ids: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """A sample of each row of candidates, values and ids [B, C], the largest first: int64 [B]; NO_TOKEN if the largest
    is not finite."""
    best = (values + gumbel_noise(seeds, positions, ids)).argmax(dim=-1, keepdim=True)
    return torch.where(values[:, 0].isfinite(), ids.gather(1, best).squeeze(1), NO_TOKEN)


def truncate(scaled: Tensor, limits: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Apply top-k, top-p and min-p to logits that are already divided by temperature.

    Args:
        scaled: [B, vocab_size].
        limits: top_k (int64, the vocabulary's size if it is off), top_p and min_p, each [B].

    Returns: (values, ids), both [B, C]: the C largest logits of each row, in order, those left out being -inf, and
    their token ids. The order of application is vLLM's: min-p, then top-k, then top-p on what is left.
    Tokens tied with the last one kept are kept: the result does not depend on the order of equal logits.
    """
    size = CANDIDATES
    while True:
        values, ids, exact = truncate_among(size, scaled, limits)
        if bool(exact):
            return values, ids
        size *= 8


def truncate_among(size: int, scaled: Tensor, limits: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """`truncate` with the `size` largest of each row as candidates; and whether they hold all that is kept: bool []."""
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
    # Mass relative to the likeliest. If the floor cuts within the candidates they hold it all, else the row does.
    weights = torch.where(kept, (values - values[:, :1]).exp(), 0)
    mass = weights.cumsum(dim=-1)
    total = mass[:, -1:]
    if scaled.is_cuda or not bool(complete.all()):  # to ask a GPU takes longer than to have it compute
        total = torch.where(complete, total, (scaled - values[:, :1]).exp().sum(dim=-1, keepdim=True))
    # Keep a token if the mass before it has not reached top_p; the one that crosses is therefore kept.
    crossing = ((mass - weights < top_p * total) & kept).sum(dim=-1, keepdim=True).clamp(min=1) - 1
    edge = torch.where(top_p < 1, values.gather(1, crossing), -torch.inf)
    floor = torch.maximum(floor, edge)
    # A bound above the last candidate leaves nothing out that is not among the candidates. With a top_k beyond
    # them, what top-p is a share of is not known yet.
    exact = complete | ((last < floor) & (top_k >= vocab_size) & (min_p == 0))
    return values.masked_fill_(values < floor, -torch.inf), ids, exact.all()
