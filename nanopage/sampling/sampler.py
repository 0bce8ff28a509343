"""Sampler: samples one token from each row of a batch's logits. A stage that no row needs is skipped.

    logits ─▶ constraints ─▶ penalties ─▶ greedy rows:     argmax
                                          plain rows:      argmax(logits + temperature * noise)
                                          truncated rows:  the same among the tokens that top-k, top-p and min-p keep

With Gumbel noise, argmax(logits + temperature * noise) is a sample of softmax(logits / temperature). This is the
Gumbel-max trick (Maddison et al. 2014).
"""

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanopage.device import to_device, to_host
from nanopage.sampling.argmax import argmax
from nanopage.sampling.constraints import Constraints
from nanopage.sampling.noise import gumbel_noise
from nanopage.sampling.penalties import Penalties
from nanopage.sampling.samples import Check, Samples
from nanopage.sampling.truncation import CANDIDATES, sample_among, sample_truncated, truncate_among

if TYPE_CHECKING:
    from nanopage.worker.sequence_table import SequenceTable


class Sampler:
    """Samples tokens for rows of a sequence table.

    Args:
        table: the sequence table.
        defer: sample top-k, top-p and min-p from a few candidates without waiting to see whether these were enough.
            `Samples.settle` finds that out before the next step.
    """

    def __init__(self, table: "SequenceTable", defer: bool = False):
        self.table, self.defer = table, defer
        self.constraints, self.penalties = Constraints(table), Penalties(table)

    def __call__(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> Samples:
        """Sample a token for each row.

        Args:
            logits: [B, vocab_size].
            rows: of the sequence table, [B].
            positions: of the tokens to be sampled, [B].
        """
        checks: list[Check] | None = [] if self.defer else None
        tokens = self.sample(self.change(logits, rows, positions), rows, positions, checks)
        return Samples(self.table, tokens, logits, rows, positions, checks or [])

    def needs_more_than_noise(self, rows: np.ndarray, positions: np.ndarray) -> bool:
        """Whether the tokens of any of these rows at these positions need constraints, penalties or truncation."""
        return bool(self.table.sampling.truncated[rows].any()) or self._changes(rows, positions)

    def change(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> Tensor:
        """Apply constraints and penalties to logits [B, vocab_size]: at least float32. Returns a copy if anything
        changes."""
        if not self._changes(rows, positions):
            return at_least_float32(logits)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        changed = logits.to(dtype, copy=True, memory_format=torch.contiguous_format)
        self.constraints.apply(changed, rows, positions)
        self.penalties.apply(changed, rows, positions)
        return changed

    def _changes(self, rows: np.ndarray, positions: np.ndarray) -> bool:
        """Whether any row has constraints or penalties."""
        return bool((self.table.sampling.penalized[rows] | self.constraints.find(rows, positions)).any())

    def sample(
        self, logits: Tensor, rows: np.ndarray, positions: np.ndarray, checks: list[Check] | None = None
    ) -> Tensor:
        """Sample a token for each row, without constraints and penalties.

        Args: checks: a list to which the checks of truncated rows are added. None: sample these rows from as many
            candidates as needed.

        Returns: int64 [B]; NO_TOKEN for a row whose largest logit is not finite.
        """
        sampling = self.table.sampling
        greedy = sampling.greedy[rows]
        if greedy.all():
            return argmax(logits)
        truncated = sampling.truncated[rows] & ~greedy
        kinds = {"greedy": greedy, "plain": ~greedy & ~truncated, "truncated": truncated}
        tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        inputs = to_device(torch.from_numpy(np.stack([np.arange(len(rows)), rows, positions])), logits.device)
        for kind, chosen in kinds.items():
            which = np.flatnonzero(chosen)
            if not len(which):
                continue
            everything = len(which) == len(rows)
            some, index, position = (
                inputs if everything else inputs[:, to_device(torch.from_numpy(which), logits.device)]
            )
            target: Tensor | slice = slice(None) if everything else some
            part = logits[target]
            if kind == "greedy":
                tokens[target] = argmax(part)
                continue
            temperatures, seeds = sampling.temperature[index].to(logits.dtype), sampling.seed[index]
            if kind == "plain":
                tokens[target] = gumbel_max(part, temperatures, seeds, position)
                continue
            scaled = part / temperatures[:, None]
            limits = [sampling.top_k[index], sampling.top_p[index], sampling.min_p[index]]
            if checks is None:
                tokens[target] = sample_truncated(scaled, limits, seeds, position)
                continue
            values, ids, exact = truncate_among(CANDIDATES, scaled, limits)
            tokens[target] = sample_among(values, ids, seeds, position)
            again = partial(sample_truncated, scaled, limits, seeds, position)
            checks.append(Check(to_host(exact), target, again))
        return tokens


def at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def gumbel_max(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Sample a token from each row of logits [B, vocab_size] at its temperature. A temperature of 0 gives the argmax.

    Args: temperatures, seeds, positions: [B].
    Returns: int64 [B]; NO_TOKEN as in `argmax`.
    """
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return argmax(logits + temperatures[:, None] * gumbel_noise(seeds, positions, ids))
