"""Exercise of chapter 1: a new sampler, top-n-sigma (Tang et al. 2024, "Top-n-sigma: Not All Logits Are You Need").

    pytest -x docs/course/exercises/test_sampler.py

Most logits of a step are noise around their mean; few stand out. Top-n-sigma keeps a token if its logit is at most n
standard deviations below the largest one:

    kept:  logit >= max(logits) - n * std(logits)

Then it samples among the kept tokens with softmax(logits / temperature). Unlike top-p, it keeps the same tokens at
every temperature. `std` is the population's: torch.std(..., correction=0).

As everywhere in nanopage, a token must depend only on the logits, the seed and the position, not on what else is in
the batch. So do not call torch's random generator. Take the noise of `gumbel_noise` and the Gumbel-max trick:
argmax(logits + temperature * noise) is a sample of softmax(logits / temperature). `gumbel_max` in
nanopage/sampling/sampler.py does both; `truncation.py` beside it shows how tokens are left out.
"""

from torch import Tensor


def sample_top_n_sigma(logits: Tensor, n: float, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Sample a token from each row.

    Args:
        logits: float32 [B, vocab_size].
        n: how many standard deviations below the largest logit a token may be.
        temperatures: float64 [B], greater than 0.
        seeds, positions: int64 [B].

    Returns: int64 [B], the id of a token for each row. Each row has its own largest logit and deviation: `keepdim=True`
        keeps them in the shape [B, 1], so that they can be compared with the logits of their row.
    """
    raise NotImplementedError("exercise 1")
