"""Repetition, presence and frequency penalties, from counts of the tokens of a sequence.

The counts are on the device, and each sampled token is counted there, so the next step does not wait for the host.
"""

import numpy as np
import torch
from torch import Tensor

from nanopage.device import to_device


class TokenCounts:
    """Counts the tokens of sequences. Only rows of the sequence table that have penalties have an entry.

    output  int32 [entries, vocab_size]  how often the output contains each token
    seen    bool [entries, vocab_size]   whether the prompt or the output contains it
    """

    def __init__(self, vocab_size: int, device: torch.device):
        self.device = device
        self.output = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._entries: dict[int, int] = {}  # row -> entry
        self._free: list[int] = []

    def add(self, row: int, tokens: Tensor, num_prompt_tokens: int) -> None:
        """Count the tokens of a sequence, integers [num_tokens] on the device."""
        entry, tokens = self._take(row), tokens.long()
        self.seen[entry] = False
        self.seen[entry, tokens] = True
        output = tokens[num_prompt_tokens:]
        self.output[entry] = 0
        self.output[entry].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def drop(self, row: int) -> None:
        """Free the entry of a row, if it has one. The row now belongs to another sequence."""
        if row in self._entries:
            self._free.append(self._entries.pop(row))

    def count(self, rows: np.ndarray, tokens: Tensor) -> None:
        """Count one more output token of each row: int64 [B], on the device. NO_TOKEN counts as token 0."""
        entries = self._index(rows)
        tokens = tokens.clamp(min=0)
        self.seen[entries, tokens] = True
        self.output[entries, tokens] += 1

    def penalize(self, logits: Tensor, rows: np.ndarray, penalties: list[Tensor]) -> Tensor:
        """Apply penalties to logits [B, vocab_size].

        Args: rows: of the sequence table, [B]; penalties: repetition, presence and frequency, [B] each.
        """
        entries = self._index(rows)
        repetition, presence, frequency = (penalty.to(logits.dtype)[:, None] for penalty in penalties)
        seen, counts = self.seen[entries], self.output[entries]
        logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
        logits = logits - frequency * counts
        return logits - presence * (counts > 0)

    def _index(self, rows: np.ndarray) -> Tensor:
        return to_device([self._entries[row] for row in rows.tolist()], self.device)

    def _take(self, row: int) -> int:
        if row in self._entries:
            return self._entries[row]
        if not self._free:
            size, vocab_size = self.seen.shape
            more = max(1, size)
            seen = torch.cat((self.seen, self.seen.new_zeros(more, vocab_size)))
            output = torch.cat((self.output, self.output.new_zeros(more, vocab_size)))
            free = list(range(size, size + more))
            # Plain assignments: no signal handler can run between them.
            self.seen, self.output, self._free = seen, output, free
        self._entries[row] = self._free.pop()
        return self._entries[row]
