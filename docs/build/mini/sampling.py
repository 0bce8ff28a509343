"""Logits to a token (milestone 9)."""

from hashlib import sha256

import torch
from torch import Tensor


def generator_for(seed: int, index: int, position: int) -> torch.Generator:
    """The randomness of one token: the one at `position` of answer `index` to a request with this seed. It depends on
    nothing else, neither on other requests nor on the step."""
    digest = sha256(f"{seed} {index} {position}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def sample(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """Draw a token from softmax(logits / temperature), logits [vocab_size]: the argmax of logits / temperature + noise.
    The noise is -log(-log(u)), and u is torch.rand in float64. At temperature 0, the argmax of the logits."""
    raise NotImplementedError("milestone 9")
