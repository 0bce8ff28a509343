"""Top-k, top-p and min-p: which tokens may be sampled.

Each of them sets a lower bound for the logits that may be sampled, the floor. On a CPU, it is searched among the
candidates, a few hundred of the largest logits of a row, and noise is computed for the candidates only. If they do not
reach down to the floor, more of them are taken. On a GPU, kernels/floors.py searches the whole row.

The rules on both devices:

- min-p, then top-k, then top-p of what is left. This is vLLM's order.
- Tokens that tie with the last one kept are kept, too, so the result does not depend on the order of equal logits.
- Top-p keeps a token if the mass of the larger ones has not reached top_p of the total. So the token that crosses top_p
  is kept. The mass of a token is exp((logit - largest) / temperature), computed in the logits' dtype, at least float32.
  Masses are added up with a relative error of less than 2^-20, independently of other rows. Where the mass is that
  close to top_p, a CPU and a GPU may decide differently.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from nanopage.sampling.noise import gumbel_noise
from nanopage.step import NO_TOKEN

CANDIDATES = 256  # how many of the largest logits are tried first


def sample_truncated(
    logits: Tensor, temperatures: Tensor, limits: list[Tensor], seeds: Tensor, positions: Tensor
) -> Tensor:
    """Sample from each row one of the tokens that `truncate` keeps: int64 [B]; NO_TOKEN if the largest logit of a row
    is not finite."""
    values, ids = truncate(logits, temperatures, limits)
    noise = temperatures[:, None].to(logits.dtype) * gumbel_noise(seeds, positions, ids)
    best = (values + noise).argmax(dim=-1, keepdim=True)
    return torch.where(values[:, 0].isfinite(), ids.gather(1, best).squeeze(1), NO_TOKEN)


def truncate(
    logits: Tensor, temperatures: Tensor, limits: list[Tensor], size: int | None = None
) -> tuple[Tensor, Tensor]:
    """The tokens of each row that may be sampled.

    Args:
        logits: float32 or float64 [B, vocab_size].
        temperatures: float64 [B], greater than 0.
        limits: top_k (int64, the vocabulary's size if it is off), top_p and min_p (float64), each [B].
        size: how many of the largest logits are tried. None: CANDIDATES.

    Returns: (values, ids), both [B, C]: the C largest logits of each row, in descending order, and their token ids.
        Logits that are not kept are -inf. A row with fewer than C candidates is padded with -inf.
    """
    values, ids = logits.topk(min(size or CANDIDATES, logits.shape[-1]), dim=-1)
    floors, exact = floors_among(values, logits, temperatures, limits)
    values.masked_fill_(values < floors, -torch.inf)
    if not bool(exact.all()):
        which = (~exact[:, 0]).nonzero()[:, 0]  # only these: other rows must not decide how many are taken of a row
        some = logits[which], temperatures[which], [limit[which] for limit in limits]
        more = truncate(*some, 8 * values.shape[1])
        added = 0, more[0].shape[1] - values.shape[1]
        values, ids = pad(values, added, value=-torch.inf), pad(ids, added)
        values[which], ids[which] = more
    return values, ids


def floors_among(values: Tensor, logits: Tensor, temperatures: Tensor, limits: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The floors of rows according to their largest logits, and whether these include all that is kept.

    Args:
        values: the C largest logits of each row in descending order, [B, C].
        logits, temperatures, limits: as in `truncate`.

    Returns: floors [B, 1], and bool [B, 1].
    """
    size, vocab_size = values.shape[-1], logits.shape[-1]
    temperatures = temperatures[:, None]
    top_k, top_p, min_p = (limit[:, None] for limit in limits)
    largest, last = values[:, :1], values[:, -1:]

    def weigh(logits: Tensor) -> Tensor:
        return (logits - largest).div_(temperatures.to(logits.dtype)).exp_()

    floors = (largest + temperatures * min_p.log()).to(logits.dtype)  # min_p of 0: -inf
    # The k-th largest is a bound if it is among the values.
    kth = values.gather(1, top_k.clamp(max=size) - 1)
    floors = torch.where(top_k <= size, torch.maximum(floors, kth), floors)
    kept = values >= floors
    complete = (last < floors) | (last == -torch.inf) | (size == vocab_size)
    # If the floor lies within the values, they hold all the mass. Otherwise, the whole row is added up.
    weights = torch.where(kept, weigh(values), 0)
    mass = weights.cumsum(dim=-1, dtype=torch.float64)
    total = mass[:, -1:]
    if size < vocab_size and not bool(complete.all()):
        # Not sum(), whose order depends on the number of rows, and of threads.
        total = torch.where(complete, total, weigh(logits).cumsum(dim=-1, dtype=torch.float64)[:, -1:])
    crossing = ((mass - weights < top_p * total) & kept).sum(dim=-1, keepdim=True).clamp(min=1) - 1
    edge = torch.where(top_p < 1, values.gather(1, crossing), -torch.inf)
    floors = torch.maximum(floors, edge)
    # If the floor is above the last value, the values include all that is kept. But the floor of top-p is exact only if
    # the total is, and the total ignores a min-p or top-k that cuts beyond the values.
    exact = complete | ((last < floors) & (top_k >= vocab_size) & (min_p == 0))
    return floors, exact
