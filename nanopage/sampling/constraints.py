"""Constraints on the tokens that may be sampled: allowed ids, bad words, minimum length and logit bias.

They become a few lists of (row, token), and each list is applied with one operation. The lists are kept on the device
until the batch or the settings of a row change, or a sequence reaches its minimum length. Only bad words of several
tokens depend on the tokens sampled so far, and these are compared on the device, too.
"""

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanopage.device import to_device

if TYPE_CHECKING:
    from nanopage.worker.sequence_table import SequenceTable


class Constraints:
    """Applies the constraints of rows of a sequence table to their logits."""

    def __init__(self, table: "SequenceTable"):
        self.table = table
        self._key: tuple | None = None  # of the batch that the lists are for
        self._lists: Lists | None = None

    def apply(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> None:
        """Set the logits of forbidden tokens to -inf, and add biases, in place.

        Args:
            logits: [B, vocab_size], contiguous.
            rows: of the sequence table, [B].
            positions: of the tokens to be sampled, [B].
        """
        sampling = self.table.sampling
        constrained = sampling.constrained[rows]
        if not constrained.any():
            return
        which = np.flatnonzero(constrained)
        num_output = positions[which] - self.table.num_prompt_tokens[rows[which]]
        settings = [sampling.settings[row] for row in rows[which].tolist()]
        too_short = num_output < [s.min_tokens for s in settings]
        key = sampling.version, rows.tobytes(), too_short.tobytes()
        if key != self._key:
            self._lists, self._key = make_lists(which.tolist(), settings, too_short.tolist(), self.table.device), key
        assert self._lists is not None
        self._apply(self._lists, logits, rows, positions)

    def _apply(self, lists: "Lists", logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> None:
        if len(lists.allowing):
            allowed = torch.zeros(len(lists.allowing), logits.shape[1], dtype=torch.bool, device=logits.device)
            allowed[lists.allowed[0], lists.allowed[1]] = True
            logits[lists.allowing] = torch.where(allowed, logits[lists.allowing], -torch.inf)
        if lists.banned.shape[1]:
            logits[lists.banned[0], lists.banned[1]] = -torch.inf
        if len(lists.lasts):
            complete = self._complete_words(lists, rows, positions)
            # Several words may end in the same token: the smallest value counts.
            values = torch.where(complete, -torch.inf, torch.inf).to(logits.dtype)
            index = lists.word_rows * logits.shape[1] + lists.lasts
            logits.view(-1).scatter_reduce_(0, index, values, "amin")
        if lists.biased.shape[1]:
            logits[lists.biased[0], lists.biased[1]] += lists.biases.to(logits.dtype)

    def _complete_words(self, lists: "Lists", rows: np.ndarray, positions: np.ndarray) -> Tensor:
        """Whether each word lacks only its last token: bool [W], for the bad words of several tokens."""
        device = self.table.device
        row, position, num_prompt = to_device(
            torch.from_numpy(np.stack([rows, positions, self.table.num_prompt_tokens[rows]])), device
        )[:, lists.word_rows]
        length = lists.beginnings.shape[1]
        places = position[:, None] - length + torch.arange(length, device=device)
        before = self.table.tokens[row[:, None], places.clamp(min=0)]
        equal = (before == lists.beginnings) | (lists.beginnings < 0)  # shorter words are padded in front
        return equal.all(dim=1) & (position - num_prompt >= lists.lengths)


@dataclass(slots=True)
class Lists:
    """The constraints of a batch as lists of indices. A row is a row of the logits.

    allowing    int64 [A]        rows that allow only some tokens
    allowed     int64 [2, n]     (index into `allowing`, token)
    banned      int64 [2, n]     (row, token)
    biased      int64 [2, n]     (row, token)
    biases      float64 [n]      what to add to these logits
    word_rows   int64 [W]        the row of each bad word of several tokens
    beginnings  int64 [W, L]     all tokens of the word except the last, padded in front with -1
    lengths     int64 [W]        the number of tokens in `beginnings`
    lasts       int64 [W]        the last token of the word
    """

    allowing: Tensor
    allowed: Tensor
    banned: Tensor
    biased: Tensor
    biases: Tensor
    word_rows: Tensor
    beginnings: Tensor
    lengths: Tensor
    lasts: Tensor


def make_lists(which: list[int], settings: list, too_short: list[bool], device: torch.device) -> Lists:
    """Make the lists of a batch.

    Args:
        which: the rows of the logits that have constraints.
        settings: the SamplingSettings of each of these rows.
        too_short: whether each of them has fewer than `min_tokens` tokens, so that it may not end yet.
    """
    allowing: list[int] = []
    allowed: list[tuple[int, int]] = []
    banned: list[tuple[int, int]] = []
    biased: list[tuple[int, int, float]] = []
    words: list[tuple[int, list[int]]] = []
    for row, s, short in zip(which, settings, too_short, strict=True):
        if s.allowed_token_ids is not None:
            allowed += [(len(allowing), token_id) for token_id in s.allowed_token_ids]
            allowing.append(row)
        banned += [(row, word[0]) for word in s.bad_words_token_ids if len(word) == 1]
        banned += [(row, token_id) for token_id in s.ending_token_ids] if short else []
        biased += [(row, token_id, bias) for token_id, bias in s.logit_bias.items()]
        words += [(row, word) for word in s.bad_words_token_ids if len(word) > 1]
    longest = max((len(word) for _, word in words), default=1) - 1
    beginnings = [[-1] * (longest + 1 - len(word)) + word[:-1] for _, word in words]

    def tensor(values: list, dtype: torch.dtype = torch.int64) -> Tensor:
        return to_device(values, device, dtype)

    def pairs(values: list[tuple]) -> Tensor:
        return tensor([[value[0] for value in values], [value[1] for value in values]])

    return Lists(
        allowing=tensor(allowing),
        allowed=pairs(allowed),
        banned=pairs(banned),
        biased=pairs(biased),
        biases=tensor([bias for _, _, bias in biased], torch.float64),
        word_rows=tensor([row for row, _ in words]),
        beginnings=tensor(list(chain.from_iterable(beginnings))).view(len(words), longest),
        lengths=tensor([len(word) - 1 for _, word in words]),
        lasts=tensor([word[-1] for _, word in words]),
    )
