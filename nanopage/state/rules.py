"""Rules: the constraints of a sequence, on the device (see constraints.py)."""

import torch
from torch import Tensor

from nanopage.device import to_device
from nanopage.step import SamplingSettings


class Rules:
    """The constraints of a sequence, on the device. Forks share them. All are int64, except the biases.

    allowed         [n], or None  if all tokens are allowed
    banned          [n]           bad words of one token
    endings         [n]           banned until the sequence has `min_tokens` tokens
    biased, biases  [n]           tokens, and what to add to their logits, float64
    beginnings      [W, L]        bad words of several tokens, without the last one, padded in front with -1
    lasts           [W]           the last token of each of them
    """

    def __init__(self, settings: SamplingSettings, device: torch.device):
        def tensor(values: list, dtype: torch.dtype = torch.int64) -> Tensor:
            return to_device(values, device, dtype)

        words = settings.bad_words_token_ids
        longer = [word for word in words if len(word) > 1]
        longest = max(map(len, longer), default=1)
        beginnings = [[-1] * (longest - len(word)) + word[:-1] for word in longer]
        self.allowed = None if settings.allowed_token_ids is None else tensor(settings.allowed_token_ids)
        self.banned = tensor([word[0] for word in words if len(word) == 1])
        self.endings = tensor(settings.ending_token_ids)
        self.biased = tensor(list(settings.logit_bias))
        self.biases = tensor(list(settings.logit_bias.values()), torch.float64)
        self.beginnings = tensor(beginnings).view(len(longer), longest - 1)
        self.lasts = tensor([word[-1] for word in longer])
