"""Repetition, presence and frequency penalties.

A penalty changes only the logits of tokens that the sequence has already. The sequence table has these tokens on the
device, the one just sampled included, so each step reads and counts them there, for all rows at once. Nothing is kept
from step to step that a fork, a preemption or a failed step would have to keep right. A token of the context costs a
few hundred bytes of memory traffic; attention reads many kilobytes for it.
"""

import numpy as np
import torch
from torch import Tensor

from nanopage.device import to_device
from nanopage.state.sequence_table import SequenceTable


class Penalties:
    """Applies the penalties of rows of a sequence table to their logits.

    Memory: from the first presence or frequency penalty on, 4 bytes * rows of the table * vocab_size (149 MiB for 257
    rows and 151,936 tokens), or more if drafts let a step sample more tokens than the table has rows; during a call,
    about 100 bytes for each token of the sequences that have penalties.
    """

    def __init__(self, table: SequenceTable):
        self.table = table
        self._counts: Tensor | None = None  # int32 [at least rows * vocab_size], to count in; nothing is kept in it

    def apply(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> None:
        """Apply penalties in place. Does not synchronize with the device. Args: as of `Constraints.apply`."""
        table, sampling, vocab_size = self.table, self.table.sampling, logits.shape[1]
        which = np.flatnonzero(sampling.penalized[rows])  # P rows of the logits, whose sequences have N tokens together
        if not len(which):
            return
        rows, lengths = rows[which], positions[which]
        num_tokens, starts = int(lengths.sum()), lengths.cumsum() - lengths  # of each sequence among the N tokens
        places = rows * table.tokens.shape[1] - starts  # adding 0 ... N - 1 gives places in the flattened table
        outputs = starts + table.num_prompt_tokens[rows]  # where the output begins among the N tokens
        numbers = np.stack([rows, lengths, places, outputs, which * vocab_size, np.arange(len(which)) * vocab_size])
        row, length, *others = to_device(torch.from_numpy(numbers), logits.device)
        place, output, in_logits, in_counts = (
            values.repeat_interleave(length, output_size=num_tokens) for values in others
        )
        each = torch.arange(num_tokens, device=logits.device)
        tokens = table.tokens.view(-1).index_select(0, place + each).long()
        penalties = sampling.penalties.index_select(1, row).to(logits.dtype)
        repetition, presence, frequency = penalties.repeat_interleave(length, dim=1, output_size=num_tokens)
        index = in_logits + tokens
        values = logits.view(-1).index_select(0, index)
        values = torch.where(values > 0, values / repetition, values * repetition)
        if sampling.counted[rows].any():
            counts = self._count(in_counts + tokens, each >= output, len(which) * vocab_size)
            values = values - frequency * counts - presence * (counts > 0)
        logits.view(-1).scatter_(0, index, values)  # a token that occurs several times gets the same value each time

    def _count(self, index: Tensor, counted: Tensor, size: int) -> Tensor:
        """For each of N indices, at how many places with the same index `counted` is true.

        Args: index: row * vocab_size + token, int64 [N]; counted: bool [N]; size: above all indices.
        Returns: int32 [N].
        """
        if self._counts is None or len(self._counts) < size:
            size = max(size, len(self.table.tokens) * self.table.sampling.vocab_size)
            self._counts = torch.empty(size, dtype=torch.int32, device=index.device)
        self._counts.index_fill_(0, index, 0).index_add_(0, index, counted.int())
        return self._counts.index_select(0, index)
