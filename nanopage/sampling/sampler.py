"""Sampler: samples one token from each row of a batch's logits.

    logits ─▶ masks ─▶ constraints ─▶ penalties ─▶ greedy rows:     argmax
                                                   plain rows:      argmax(logits + temperature * noise)
                                                   truncated rows:  the same among the tokens that top-k, top-p and
                                                                    min-p keep

With Gumbel noise, argmax(logits + temperature * noise) is a sample of softmax(logits / temperature). This is the
Gumbel-max trick (Maddison et al. 2014).

Masks, constraints and penalties are skipped if no row needs them. On a CPU, the kinds of rows are sampled one after the
other, so that noise is computed only for the rows that use it. On a GPU, one compiled function samples all rows
(`sample_rows`).
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from nanopage.device import to_device
from nanopage.sampling.argmax import argmax
from nanopage.sampling.constraints import Constraints
from nanopage.sampling.dry import apply_dry
from nanopage.sampling.masks import apply_masks
from nanopage.sampling.noise import gumbel_noise
from nanopage.sampling.penalties import Penalties
from nanopage.sampling.samples import Samples
from nanopage.sampling.truncation import sample_truncated
from nanopage.state.sequence_table import SequenceTable


class Sampler:
    """Samples tokens for rows of a sequence table.

    Args:
        table: the sequence table.
        sample_all: `sample_rows` with its first argument given, on a GPU. None: sample each kind of rows by itself.
    """

    def __init__(self, table: SequenceTable, sample_all: Callable[..., Tensor] | None = None):
        self.table, self.sample_all = table, sample_all
        self.constraints, self.penalties = Constraints(table), Penalties(table)

    def __call__(
        self, logits: Tensor, rows: np.ndarray, positions: np.ndarray, masks: dict[int, bytes] | None = None
    ) -> Samples:
        """Sample a token for each row, and write it to the sequence table.

        Args:
            logits: [B, vocab_size].
            rows: of the sequence table, [B].
            positions: of the tokens to be sampled, [B].
            masks: of some of the rows (see `Batch.masks`).
        """
        tokens = self.sample(self.change(logits, rows, positions, masks), rows, positions)
        self.table.record(rows, positions, tokens)
        return Samples(tokens, logits, self.table.sampling.num_logprobs[rows])

    def changes_logits(self, rows: np.ndarray, positions: np.ndarray) -> bool:
        """Whether any of these rows has constraints or penalties at these positions."""
        sampling = self.table.sampling
        return bool((sampling.penalized[rows] | sampling.dry[rows] | self.constraints.find(rows, positions)).any())

    def change(
        self, logits: Tensor, rows: np.ndarray, positions: np.ndarray, masks: dict[int, bytes] | None = None
    ) -> Tensor:
        """Apply masks, constraints and penalties to logits [B, vocab_size]. Returns a copy in at least float32 if
        anything changes."""
        if not masks and not self.changes_logits(rows, positions):
            return logits
        dtype = torch.promote_types(logits.dtype, torch.float32)
        changed = logits.to(dtype, copy=True, memory_format=torch.contiguous_format)
        if masks:
            apply_masks(changed, masks)
        self.constraints.apply(changed, rows, positions)
        self.penalties.apply(changed, rows, positions)
        apply_dry(self.table, changed, rows, positions)
        return changed

    def sample(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> Tensor:
        """Sample a token for each row, without constraints and penalties.

        Returns: int64 [B]; NO_TOKEN for a row whose largest logit is not finite.
        """
        sampling = self.table.sampling
        if self.sample_all is not None:
            row, position = to_device(torch.from_numpy(np.stack([rows, positions])), logits.device)
            return self.sample_all(logits, row, position, sampling.temperature, sampling.seed, sampling.limits)
        greedy = sampling.greedy[rows]
        if greedy.all():
            return argmax(logits)
        logits = at_least_float32(logits)
        truncated = sampling.truncated[rows] & ~greedy
        kinds = {"greedy": greedy, "plain": ~greedy & ~truncated, "truncated": truncated}
        tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        inputs = torch.from_numpy(np.stack([np.arange(len(rows)), rows, positions]))
        for kind, chosen in kinds.items():
            which = np.flatnonzero(chosen)
            if not len(which):
                continue
            everything = len(which) == len(rows)
            some, index, position = inputs if everything else inputs[:, torch.from_numpy(which)]
            target: Tensor | slice = slice(None) if everything else some
            part = logits[target]
            if kind == "greedy":
                tokens[target] = argmax(part)
                continue
            temperatures, seeds = sampling.temperature[index], sampling.seed[index]
            if kind == "plain":
                tokens[target] = gumbel_max(part, temperatures, seeds, position)
                continue
            limits = [limit[index] for limit in sampling.limits]
            tokens[target] = sample_truncated(part, temperatures, limits, seeds, position)
        return tokens


def sample_rows(
    find_floors: Callable[..., Tensor],
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seed: Tensor,
    limits: list[Tensor],
) -> Tensor:
    """Sample a token for each row, whatever its temperature and truncation: int64 [B]; NO_TOKEN as in `argmax`.

    A GPU runs this, in CUDA graphs and in other steps. Nothing in it depends on values on the host.

    Args:
        find_floors: finds the smallest logits that may be sampled, as `kernels.floors.find_floors` does.
        logits: [B, vocab_size], of any floating type.
        rows: of the sequence table, int64 [B].
        positions: of the tokens to be sampled, int64 [B].
        temperature, seed, limits: of all rows of the sequence table.
    """
    floors = find_floors(logits, rows, temperature, *limits)
    logits = at_least_float32(logits)
    kept = torch.where(logits < floors[:, None], -torch.inf, logits)  # NaN is kept: it gives NO_TOKEN
    return gumbel_max(kept, temperature[rows], seed[rows], positions)


def at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def gumbel_max(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Sample a token from each row of logits [B, vocab_size] at its temperature. A temperature of 0 gives the argmax.

    Args: temperatures, seeds, positions: [B].
    Returns: int64 [B]; NO_TOKEN as in `argmax`.
    """
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return argmax(logits + temperatures[:, None].to(logits.dtype) * gumbel_noise(seeds, positions, ids))
