"""Repetition, presence and frequency penalties.

A penalty changes only the logits of tokens that the sequence has already. They are looked up in the sequence table, so
the cost depends on the length of the sequences, apart from one copy of the logits. Counts of output tokens are on the
device as well, and each sampled token is counted there, so the next step does not wait for the host.
"""

import numpy as np
import torch
from torch import Tensor

from nanopage.device import to_device


class TokenCounts:
    """Counts the output tokens of sequences. Only rows of the sequence table that have penalties have an entry.

    output  int32 [entries, vocab_size]  how often the output contains each token
    """

    def __init__(self, vocab_size: int, device: torch.device):
        self.device = device
        self.output = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._entries: dict[int, int] = {}  # row -> entry
        self._free: list[int] = []

    def add(self, row: int, tokens: Tensor, num_prompt_tokens: int) -> None:
        """Count the output among the tokens of a sequence, integers [num_tokens] on the device."""
        entry, output = self._take(row), tokens[num_prompt_tokens:].long()
        self.output[entry] = 0
        self.output[entry].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def drop(self, row: int) -> None:
        """Free the entry of a row, if it has one. The row now belongs to another sequence."""
        if row in self._entries:
            self._free.append(self._entries.pop(row))

    def count(self, rows: np.ndarray, tokens: Tensor) -> None:
        """Count one more output token of each row: int64 [B], on the device. NO_TOKEN counts as token 0."""
        entries = self._index(rows)
        self.output[entries, tokens.clamp(min=0)] += 1

    def penalize(self, logits: Tensor, rows: np.ndarray, tokens: Tensor, penalties: list[Tensor]) -> Tensor:
        """Apply penalties to a copy of logits [B, vocab_size].

        Args:
            rows: of the sequence table, [B].
            tokens: of each sequence so far, int64 [B, most tokens], padded with one of its tokens.
            penalties: repetition, presence and frequency, [B] each.
        """
        repetition, presence, frequency = (penalty.to(logits.dtype)[:, None] for penalty in penalties)
        counts = self.output[self._index(rows)[:, None], tokens]
        values = logits.gather(1, tokens)
        values = torch.where(values > 0, values / repetition, values * repetition)
        values = values - frequency * counts - presence * (counts > 0)
        return logits.scatter(1, tokens, values)  # a token that occurs several times gets the same value each time

    def _index(self, rows: np.ndarray) -> Tensor:
        return to_device([self._entries[row] for row in rows.tolist()], self.device)

    def _take(self, row: int) -> int:
        if row in self._entries:
            return self._entries[row]
        if not self._free:
            size, vocab_size = self.output.shape
            more = max(1, size)
            output = torch.cat((self.output, self.output.new_zeros(more, vocab_size)))
            free = list(range(size, size + more))
            # Plain assignments: no signal handler can run between them.
            self.output, self._free = output, free
        self._entries[row] = self._free.pop()
        return self._entries[row]
