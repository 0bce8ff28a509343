"""The token with the largest logit: greedy sampling, and the last step of sampling with noise."""

import math

import torch
from torch import Tensor

from nanopage.step import NO_TOKEN


def argmax(logits: Tensor) -> Tensor:
    """The token with the largest logit in each row of [B, vocab_size], the first one among equals: int64 [B].

    NO_TOKEN if the largest logit is not finite: the row contains NaN or infinity, or only -infinity.

    Finds the block with the largest logit first, then the token within that block. On a CPU, torch's argmax is not
    vectorized and takes ten times as long. On a GPU, Inductor's argmax gives a whole row to a single program.
    """
    size = 1 if logits.is_cuda and not torch.compiler.is_compiling() else math.gcd(logits.shape[-1], 256)
    if size < 16:
        best = logits.argmax(dim=-1, keepdim=True)
        largest = logits.gather(1, best)
    else:
        blocks = logits.unflatten(-1, (-1, size))
        largest = blocks.amax(dim=-1)
        block = largest.argmax(dim=-1, keepdim=True)  # [B, 1]
        # Not take_along_dim: torch 2.11 compiles it for this number of rows alone.
        within = blocks.gather(1, block[..., None].expand(-1, -1, size)).argmax(dim=-1)
        best, largest = block * size + within, largest.gather(1, block)
    return torch.where(largest.isfinite(), best, NO_TOKEN).squeeze(1)
