"""Samples: the sampled tokens of a step on their way from the device to the host, with their log-probabilities.

The sampler makes a `Samples`, and the copies to the host start at once. The next step calls `settle` before it reads
the tokens on the device, and the engine calls `result` when it needs them on the host.

Truncation looks only at the largest logits of each row, and a GPU would have to be synchronized with to learn whether
these were enough. The sampler leaves a `Check` for that instead, and `settle` evaluates it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanopage.device import to_device, to_host
from nanopage.sampling.logprobs import make_tables, top_logprobs
from nanopage.step import LogprobTable

if TYPE_CHECKING:
    from nanopage.worker.sequence_table import SequenceTable


class Check(NamedTuple):
    """Rows that were sampled from a few candidates, and a function that samples them again from as many as needed.

    exact  bool [], on its way to the host: whether the candidates were enough
    rows   of the batch: int64 [R], or a slice
    again  returns the right tokens, int64 [R]
    """

    exact: Tensor
    rows: Tensor | slice
    again: Callable[[], Tensor]


class Samples:
    """The sampled tokens of B rows. Nothing synchronizes with the device before `settle` or `result`.

    Args:
        table: the sequence table. The tokens are written to it as soon as they are final.
        tokens: int64 [B], on the device.
        logits: [B, vocab_size], unchanged from the model, for log-probabilities.
        rows: of the sequence table, [B].
        positions: of the sampled tokens in their sequences, [B].
        checks: of rows that may have to be sampled again. Without checks, the tokens are final.
        recorded: whether the sequence table already has the tokens.
    """

    def __init__(
        self,
        table: "SequenceTable",
        tokens: Tensor,
        logits: Tensor,
        rows: np.ndarray,
        positions: np.ndarray,
        checks: list[Check],
        recorded: bool = False,
    ):
        self.table, self.tokens, self.rows, self.positions, self._checks = table, tokens, rows, positions, checks
        self.num_logprobs = table.sampling.num_logprobs[rows]
        self._logits = logits if checks else None  # large, so kept only if they may be needed again
        self._send(logits)
        if not checks and not recorded:
            self.table.record(self.rows, self.positions, self.tokens)

    def _send(self, logits: Tensor) -> None:
        """Start copying the tokens and their log-probabilities to the host."""
        coming = [self.tokens]
        which = np.flatnonzero(self.num_logprobs >= 0)
        if len(which):
            index = to_device(torch.from_numpy(which), self.tokens.device)
            coming += top_logprobs(logits[index], self.tokens[index], int(self.num_logprobs.max()))
        self._coming = [to_host(tensor) for tensor in coming]
        self._arrived = None
        if self.tokens.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    @torch.inference_mode()
    def settle(self) -> None:
        """Make the tokens final: sample rows again if their candidates were not enough.

        Synchronizes with the device if there are checks.
        """
        checks, self._checks = self._checks, []
        if not checks:
            return
        if self._arrived is not None:
            self._arrived.synchronize()
        wrong = [check for check in checks if not bool(check.exact)]
        for check in wrong:
            self.tokens[check.rows] = check.again()
        if wrong:
            assert self._logits is not None
            self._send(self._logits)
        self._logits = None
        self.table.record(self.rows, self.positions, self.tokens)

    def result(self) -> tuple[list[int], dict[int, LogprobTable]]:
        """The tokens, and the log-probabilities by index into the tokens, of the rows that asked for them. Synchronizes
        with the device."""
        self.settle()
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens = self._coming[0].tolist()
        which = np.flatnonzero(self.num_logprobs >= 0).tolist()
        if not which:
            return tokens, {}
        tables = make_tables([tokens[i] for i in which], self._coming[1:], self.num_logprobs[which].tolist())
        return tokens, dict(zip(which, tables, strict=True))
