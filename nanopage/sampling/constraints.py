"""What a request says about tokens before any is drawn: allowed ids, bad words, minimum length, logit bias.

All of it becomes a few lists of (row, token), applied with one operation each. The lists stay the same from step to
step while the same sequences run, so they are made once and kept on the device. Only words of several tokens have to
be compared with what was sampled; that, too, happens on the device.
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
    """The constraints of the rows of a sequence table."""

    def __init__(self, table: "SequenceTable"):
        self.table = table
        self._key: tuple | None = None  # of the batch that the lists are for
        self._lists: Lists | None = None

    def apply(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> Tensor:
        """Logits [B, vocab_size] of these rows, with everything that is forbidden at -inf. Copied if it changes.

        Args: positions: of the tokens to be sampled, [B].
        """
        sampling = self.table.sampling
        constrained = sampling.constrained[rows]
        if not constrained.any():
            return logits
        which = np.flatnonzero(constrained)
        num_output = positions[which] - self.table.num_prompt_tokens[rows[which]]
        settings = [sampling.settings[row] for row in rows[which].tolist()]
        too_short = num_output < [s.min_tokens for s in settings]
        key = sampling.version, rows.tobytes(), too_short.tobytes()
        if key != self._key:
            self._lists, self._key = make_lists(which.tolist(), settings, too_short.tolist(), self.table.device), key
        assert self._lists is not None
        return self._apply(self._lists, logits.clone(), rows, positions)

    def _apply(self, lists: "Lists", logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> Tensor:
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
        return logits

    def _complete_words(self, lists: "Lists", rows: np.ndarray, positions: np.ndarray) -> Tensor:
        """Which words of several tokens lack only their last one: bool [words]."""
        device = self.table.device
        row, position, num_prompt = to_device(
            torch.from_numpy(np.stack([rows, positions, self.table.num_prompt_tokens[rows]])), device
        )[:, lists.word_rows]
        length = lists.beginnings.shape[1]
        places = position[:, None] - length + torch.arange(length, device=device)
        before = self.table.tokens[row[:, None], places.clamp(min=0)]
        equal = (before == lists.beginnings) | (lists.beginnings < 0)  # shorter ones are padded in front
        return equal.all(dim=1) & (position - num_prompt >= lists.lengths)


@dataclass(slots=True)
class Lists:
    """The constraints of a batch. Rows are those of its logits.

    allowing    int64 [A]        rows that allow only some tokens
    allowed     int64 [2, n]     (index into `allowing`, token)
    banned      int64 [2, n]     (row, token)
    biased      int64 [2, n]     (row, token), and what to add: biases float64 [n]
    word_rows   int64 [W]        rows of words of several tokens
    beginnings  int64 [W, L]     their tokens but the last, behind padding of -1; lengths int64 [W]: how many
    lasts       int64 [W]        their last tokens
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
    """The lists of a batch of which rows `which` have these settings; `too_short` ones may not end yet."""
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
