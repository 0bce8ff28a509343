"""Noise that is a pure function of (seed, position, token id): a counter-based generator (Salmon et al. 2011).

So a seeded request draws the same noise, whatever its neighbours, batches and preemptions are.
"""

import torch
from torch import Tensor


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Gumbel(0, 1) noise: float32 [B, C].

    Args: seeds, positions: int64 [B]; token_ids: int64 [C] or [B, C].
    """
    key = _mix64(_mix64(seeds) + positions)[:, None]
    # Two rounds of a 32-bit mixer, one for each half of the key; int32 because this is as large as the vocabulary.
    bits = _mix32(token_ids.to(torch.int32) ^ key.to(torch.int32))
    bits = _mix32(bits ^ (key >> 32).to(torch.int32))
    uniform = ((bits >> 9) & 0x7FFFFF).to(torch.float32).add_(0.5).mul_(2.0**-23)  # in (0, 1): exact with 23 bits
    return uniform.log_().neg_().log_().neg_()


def _mix64(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64 (Steele et al. 2014) on int64, which wraps around."""
    x = x + -7046029254386353131  # 0x9E3779B97F4A7C15
    x = (x ^ ((x >> 30) & (2**34 - 1))) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ ((x >> 27) & (2**37 - 1))) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ ((x >> 31) & (2**33 - 1))


def _mix32(x: Tensor) -> Tensor:
    """The finalizer of MurmurHash3 (Appleby) on int32, which wraps around; `>>` copies the sign, hence the masks."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * -2048144789  # 0x85EBCA6B
    x = (x ^ ((x >> 13) & 0x7FFFF)) * -1028477387  # 0xC2B2AE35
    return x ^ ((x >> 16) & 0xFFFF)
