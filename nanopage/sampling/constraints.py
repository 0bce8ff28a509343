"""Constraints on the tokens that may be sampled: allowed ids, bad words, minimum length and logit bias.

The constraints of a sequence are sent to the device once, when it begins to run (`Rules`). The constraints of a batch
are joined there into a few lists of places in the logits (`Lists`), and each list is applied with one operation. The
lists are kept until the batch or the settings of a row change, or a sequence reaches its minimum length. Only bad words
of several tokens depend on the tokens sampled so far, and these are compared on the device, too.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from nanopage.device import to_device
from nanopage.state.sampling_table import Rules
from nanopage.state.sequence_table import SequenceTable


class Constraints:
    """Applies the constraints of rows of a sequence table to their logits."""

    def __init__(self, table: SequenceTable):
        self.table = table
        self._key: tuple | None = None  # of the batch that the lists are for
        self._lists: Lists | None = None

    def find(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Which rows have constraints on the tokens at these positions: bool [B]."""
        return self.table.sampling.constrained[rows] | self._too_short(rows, positions)

    def apply(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> None:
        """Set the logits of forbidden tokens to -inf, and add biases, in place. Does not synchronize with the device.

        Args:
            logits: [B, vocab_size], contiguous.
            rows: of the sequence table, [B].
            positions: of the tokens to be sampled, [B].
        """
        found = self.find(rows, positions)
        if not found.any():
            return
        sampling, short = self.table.sampling, self._too_short(rows, positions)
        key = sampling.version, rows.tobytes(), short.tobytes()
        if key != self._key:
            which = np.flatnonzero(found).tolist()
            rules = [sampling.rules[row] for row in rows[which].tolist()]
            self._lists, self._key = make_lists(which, rules, short[which].tolist(), logits), key
        assert self._lists is not None
        self._apply(self._lists, logits, rows, positions)

    def _too_short(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Which rows have fewer than `min_tokens` tokens, so that they may not end yet: bool [B]."""
        return positions - self.table.num_prompt_tokens[rows] < self.table.sampling.min_tokens[rows]

    def _apply(self, lists: "Lists", logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> None:
        flat = logits.view(-1)
        if len(lists.allowing):
            allowed = flat.index_select(0, lists.allowed)
            logits.index_fill_(0, lists.allowing, -torch.inf)
            flat.index_copy_(0, lists.allowed, allowed)
        if len(lists.banned):
            flat.index_fill_(0, lists.banned, -torch.inf)
        if len(lists.lasts):
            # Several words may end in the same token: the smallest value counts.
            values = torch.full_like(lists.lasts, torch.inf, dtype=logits.dtype)
            values.masked_fill_(self._complete_words(lists, rows, positions), -torch.inf)
            flat.scatter_reduce_(0, lists.lasts, values, "amin")
        if len(lists.biased):
            flat.index_add_(0, lists.biased, lists.biases.to(logits.dtype))

    def _complete_words(self, lists: "Lists", rows: np.ndarray, positions: np.ndarray) -> Tensor:
        """Whether each word lacks only its last token: bool [W], for the bad words of several tokens."""
        numbers = np.stack([rows, positions, self.table.num_prompt_tokens[rows]])
        row, position, num_prompt = to_device(torch.from_numpy(numbers), self.table.device)[:, lists.word_rows, None]
        length = lists.beginnings.shape[1]
        places = position - length + torch.arange(length, device=self.table.device)
        equal = self.table.tokens[row, places.clamp(min=0)] == lists.beginnings
        return ((equal & (places >= num_prompt)) | (lists.beginnings < 0)).all(dim=1)


@dataclass(slots=True)
class Lists:
    """The constraints of a batch, on the device. A place is row of the logits * vocab_size + token.

    allowing    int64 [A]     rows of the logits that allow only some tokens
    allowed     int64 [n]     places of the tokens that they allow
    banned      int64 [n]     places
    biased      int64 [n]     places
    biases      float64 [n]   what to add to these logits
    word_rows   int64 [W]     the row of the logits of each bad word of several tokens
    beginnings  int64 [W, L]  all tokens of the word except the last, padded in front with -1
    lasts       int64 [W]     the place of its last token
    """

    allowing: Tensor
    allowed: Tensor
    banned: Tensor
    biased: Tensor
    biases: Tensor
    word_rows: Tensor
    beginnings: Tensor
    lasts: Tensor


def make_lists(which: list[int], rules: list[Rules], too_short: list[bool], logits: Tensor) -> Lists:
    """Join the constraints of a batch.

    Args:
        which: the rows of the logits [B, vocab_size] that have constraints.
        rules: of each of these rows.
        too_short: whether each of them may not end yet.
    """
    device, vocab_size = logits.device, logits.shape[1]

    def rows_of(parts: list[tuple[int, Tensor]]) -> Tensor:
        """The row of each token: int64 [n]."""
        row, count = to_device([[row for row, _ in parts], [len(ids) for _, ids in parts]], device, torch.int64)
        return row.repeat_interleave(count, output_size=sum(len(ids) for _, ids in parts))

    def join(tensors: list[Tensor]) -> Tensor:
        return torch.cat(tensors) if tensors else torch.empty(0, dtype=torch.int64, device=device)

    def places_of(parts: list[tuple[int, Tensor]]) -> Tensor:
        return rows_of(parts) * vocab_size + join([ids for _, ids in parts])

    rows = list(zip(which, rules, too_short, strict=True))
    allowed = [(row, rule.allowed) for row, rule, _ in rows if rule.allowed is not None]
    banned = [(row, rule.banned) for row, rule, _ in rows] + [(row, rule.endings) for row, rule, short in rows if short]
    biased = [(row, rule.biased) for row, rule, _ in rows]
    words = [(row, rule.lasts) for row, rule, _ in rows if len(rule.lasts)]
    beginnings = [rule.beginnings for rule in rules if len(rule.lasts)]
    longest = max((part.shape[1] for part in beginnings), default=0)
    return Lists(
        allowing=to_device([row for row, _ in allowed], device, torch.int64),
        allowed=places_of(allowed),
        banned=places_of(banned),
        biased=places_of(biased),
        biases=join([rule.biases for rule in rules]),
        word_rows=rows_of(words),
        beginnings=join([pad(part, (longest - part.shape[1], 0), value=-1) for part in beginnings]),
        lasts=places_of(words),
    )
