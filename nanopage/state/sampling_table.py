"""SamplingTable: the sampling settings of each row of the sequence table.

Numbers, such as temperatures, are in tensors on the device, where the sampler selects the rows of a batch with one
operation. Flags are on the host: they say which stages of sampling a row needs, such as penalties. So the host can skip
a stage without waiting for the device. The constraints of a row are lists on the device (`Rules`).
"""

import numpy as np
import torch
from torch import Tensor

from nanopage.device import to_device
from nanopage.step import NUMBERS, Fork, NewSequence, SamplingSettings

GREEDY_BELOW = 1e-5  # vLLM's threshold


class SamplingTable:
    """Holds the sampling settings of all running sequences.

    Args: num_rows: the number of rows of the sequence table.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device):
        self.device = device
        self.settings = [SamplingSettings()] * num_rows
        self.numbers = torch.ones(len(NUMBERS), num_rows, dtype=torch.float64, device=device)
        self.temperature, self.top_p, self.min_p = self.numbers[:3]  # float64 [rows] each
        self.penalties, self.dry_numbers = self.numbers[3:6], self.numbers[6:9]  # float64 [3, rows] each
        self.breakers: Tensor | None = None  # bool [rows, vocab_size], of DRY; None until a row has DRY
        self.integers = torch.zeros(2, num_rows, dtype=torch.int64, device=device)
        self.seed, self.top_k = self.integers  # int64 [rows] each; top_k is the size of the vocabulary if it is off
        self.limits = [self.top_k, self.top_p, self.min_p]
        self.top_k.fill_(vocab_size)  # rows that no sequence has are not truncated: CUDA graphs sample the padding, too
        self.min_p.zero_()
        self.vocab_size = vocab_size
        self.rules: list[Rules | None] = [None] * num_rows  # of the rows that have constraints
        # bool [rows], on the host. `counted`: penalized rows whose penalties depend on the output.
        self.greedy, self.truncated, self.penalized, self.counted, self.dry = np.zeros((5, num_rows), dtype=bool)
        self.constrained = np.zeros(num_rows, dtype=bool)  # by more than `min_tokens`
        self.min_tokens = np.zeros(num_rows, dtype=np.int64)  # 0 also if no token could end the sequence
        self.num_logprobs = np.full(num_rows, -1)  # -1: none, not even the sampled token's
        self.version = 0  # increases whenever a row changes

    def add(self, sequences: list[NewSequence]) -> None:
        """Add the settings of sequences that begin to run."""
        if not sequences:
            return
        rows = [new.row for new in sequences]
        numbers = [[getattr(new.sampling, name) for new in sequences] for name in NUMBERS]
        numbers[0] = [temperature if temperature >= GREEDY_BELOW else 0.0 for temperature in numbers[0]]
        top_k = [new.sampling.top_k for new in sequences]
        integers = [[new.seed for new in sequences], [k if 0 < k < self.vocab_size else self.vocab_size for k in top_k]]
        index = to_device(rows, self.device)
        self.numbers.index_copy_(1, index, to_device(numbers, self.device, torch.float64))
        self.integers.index_copy_(1, index, to_device(integers, self.device, torch.int64))
        for new in sequences:
            self._set(new.row, new.sampling)
            constrained = self.constrained[new.row] or self.min_tokens[new.row]
            self.rules[new.row] = Rules(new.sampling, self.device) if constrained else None
            if self.dry[new.row]:
                self._break_at(new.row, new.sampling.dry_breaker_ids)

    def fork(self, forks: list[Fork]) -> None:
        """Copy the settings of parents to the rows of their forks. Each fork has its own seed."""
        parents, rows = [fork.parent for fork in forks], [fork.row for fork in forks]
        source, target = to_device(parents, self.device), to_device(rows, self.device)
        for table in (self.numbers, self.integers):
            table.index_copy_(1, target, table.index_select(1, source))
        self.seed.index_copy_(0, target, to_device([fork.seed for fork in forks], self.device, torch.int64))
        for fork in forks:
            self._set(fork.row, self.settings[fork.parent])
            self.rules[fork.row] = self.rules[fork.parent]
        if self.breakers is not None and self.dry[rows].any():
            self.breakers.index_copy_(0, target, self.breakers.index_select(0, source))

    def _break_at(self, row: int, token_ids: list[int]) -> None:
        if self.breakers is None:
            self.breakers = torch.zeros(len(self.settings), self.vocab_size, dtype=torch.bool, device=self.device)
        self.breakers[row].fill_(False).index_fill_(0, to_device(token_ids, self.device, torch.int64), True)

    def _set(self, row: int, settings: SamplingSettings) -> None:
        self.settings[row] = settings
        self.greedy[row] = settings.temperature < GREEDY_BELOW
        self.truncated[row] = 0 < settings.top_k < self.vocab_size or settings.top_p < 1 or settings.min_p > 0
        self.counted[row] = settings.presence_penalty != 0 or settings.frequency_penalty != 0
        self.penalized[row] = settings.repetition_penalty != 1 or self.counted[row]
        self.dry[row] = settings.dry_multiplier > 0
        self.constrained[row] = bool(
            settings.allowed_token_ids is not None or settings.bad_words_token_ids or settings.logit_bias
        )
        self.min_tokens[row] = settings.min_tokens if settings.ending_token_ids else 0
        self.num_logprobs[row] = -1 if settings.logprobs is None else settings.logprobs
        self.version += 1


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
