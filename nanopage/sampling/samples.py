"""Samples: the sampled tokens of a step on their way from the device to the host, with their log-probabilities."""

import numpy as np
import torch
from torch import Tensor

from nanopage.device import to_device, to_host
from nanopage.sampling.logprobs import make_tables, top_logprobs
from nanopage.step import LogprobTable


class Samples:
    """The sampled tokens of B rows. Their copies to the host start at once; `result` waits for them.

    Args:
        tokens: int64 [B], on the device. Later steps may overwrite them.
        logits: [B, vocab_size], unchanged from the model, for log-probabilities.
        num_logprobs: how many of the most likely tokens each row wants, [B]; -1: not even the sampled token's.
    """

    def __init__(self, tokens: Tensor, logits: Tensor, num_logprobs: np.ndarray):
        self._tokens = to_host(tokens)
        self._top: list[tuple[list[int], list[Tensor]]] = []  # (indexes of tokens, their `top_logprobs`)
        # One top-k for each number, because the order of equal log-probabilities depends on it.
        for num in sorted({*num_logprobs[num_logprobs >= 0].tolist()}):
            which = np.flatnonzero(num_logprobs == num)
            index = to_device(torch.from_numpy(which), tokens.device)
            top = top_logprobs(logits[index], tokens[index], num)
            self._top.append((which.tolist(), [to_host(tensor) for tensor in top]))
        self._arrived = None
        if tokens.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    @torch.inference_mode()
    def result(self) -> tuple[list[int], dict[int, LogprobTable]]:
        """The tokens, and the log-probabilities by index into the tokens, of the rows that asked for them. Synchronizes
        with the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens: list[int] = self._tokens.tolist()
        tables: dict[int, LogprobTable] = {}
        for which, top in self._top:
            tables.update(zip(which, make_tables([tokens[i] for i in which], top), strict=True))
        return tokens, tables
