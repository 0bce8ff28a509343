"""ModelRunner: runs a Batch through the model and the sampler, and returns a BatchResult.

`launch` starts a step and returns a `Launched`. Its `result` waits for the step and reads the tokens.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nanopage.models.decoder import Decoder
from nanopage.sampling.sampler import Sampler
from nanopage.sampling.samples import Samples
from nanopage.state.kv_cache import KVCache
from nanopage.state.sequence_table import SequenceTable
from nanopage.step import NO_TOKEN, Batch, BatchResult, PooledStates, PromptLogprobs
from nanopage.worker.eager import Output
from nanopage.worker.prompt_outputs import pool, prompt_logprobs


class Way(Protocol):
    """A way to run a step. ways.py lists them."""

    def fits(self, batch: Batch) -> bool:
        """Whether this way can run a batch now. Called once before `run`; may load or start compiling code."""

    def run(self, batch: Batch) -> Output:
        """Run a batch that fits. Does not synchronize with a GPU."""


class ModelRunner:
    """Runs one model on one device.

    Args:
        kv_cache: the pages of K and V.
        table: the state of each running sequence.
        ways: ways to run a step, in order of preference. The last one fits every batch.
        sample_all: how a GPU samples the rows of a batch (see `Sampler`).
    """

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        table: SequenceTable,
        ways: list[Way],
        sample_all: Callable[..., Tensor] | None = None,
    ):
        self.model, self.kv_cache, self.table, self.ways = model, kv_cache, table, ways
        self.sampler = Sampler(table, sample_all)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> "Launched":
        """Move blocks, update the sequence table and run a batch.

        Does not synchronize with a GPU, unless the step computes log-probabilities of prompts.
        """
        started = time.perf_counter()
        self.kv_cache.move(batch)
        self.table.update(batch)
        launched = Launched(batch, started=record_event(self.table.device))
        if batch.rows:
            self._run(launched, started)
        if not batch.awaits_masks:
            self._sample(launched)
        return launched

    @torch.inference_mode()
    def add_masks(self, launched: "Launched", masks: dict[int, bytes]) -> None:
        """Sample the tokens of the step that was launched last, which awaits these masks."""
        launched.batch.masks |= masks
        self._sample(launched)

    def _run(self, launched: "Launched", started: float) -> None:
        batch = launched.batch
        way = next(way for way in self.ways if way.fits(batch))
        prepared = time.perf_counter()
        launched.output = way.run(batch)
        result = launched.partial
        result.prepare_seconds, result.model_seconds = prepared - started, time.perf_counter() - prepared

    def _sample(self, launched: "Launched") -> None:
        batch, output, started = launched.batch, launched.output, time.perf_counter()
        launched.output = None
        if output is not None and output.logits is not None:
            rows, positions = np.array(batch.sampled_rows), sampled_positions(batch)
            changed = batch.masks or self.sampler.changes_logits(rows, positions)
            if output.tokens is not None and not changed:
                launched.samples = Samples(output.tokens, output.logits, self.table.sampling.num_logprobs[rows])
            else:
                launched.samples = self.sampler(output.logits, rows, positions, batch.masks)
        if output is not None and output.hidden is not None:
            launched.prompt_logprobs = prompt_logprobs(self.model, self.table, batch, output.hidden)
            launched.pooled = pool(self.model, self.table, batch, output.hidden)
            if launched.pooled:
                launched.partial.token_ids = [0] * len(batch.sampled_rows)
                launched.sampled_rows = batch.sampled_rows
        launched.partial.sample_seconds = time.perf_counter() - started
        launched.ended = record_event(self.table.device)


def sampled_positions(batch: Batch) -> np.ndarray:
    """The positions of the tokens to be sampled: int64 [S]. In the example of `step.Batch`: [21, 6]."""
    sampled, ends = np.array(batch.sampled_from), np.cumsum(batch.counts)  # ends: of each sequence in the step
    index = np.searchsorted(ends, sampled, side="right")  # the sequence of each token
    shifts = np.array(batch.starts) + np.array(batch.counts) - ends  # from places in the step to positions
    return sampled + 1 + shifts[index]


@dataclass(slots=True)
class Launched:
    """A step that has been started.

    output: of the model, until tokens are sampled from it.
    """

    batch: Batch
    output: Output | None = None
    samples: Samples | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    pooled: list[tuple[int, int, Tensor]] = field(default_factory=list)
    sampled_rows: list[int] = field(default_factory=list)  # of a batch with pooled rows
    partial: BatchResult = field(default_factory=BatchResult)  # holds the times so far
    started: torch.cuda.Event | None = None  # before the inputs, on a GPU
    ended: torch.cuda.Event | None = None  # after it

    @torch.inference_mode()
    def result(self) -> BatchResult:
        """Wait for the step and return its result. Synchronizes with the device."""
        result, started = self.partial, time.perf_counter()
        if self.samples is not None:
            result.token_ids, result.logprobs = self.samples.result()
        result.prompt_logprobs = self.prompt_logprobs
        vectors = torch.stack([vector for _, _, vector in self.pooled]).cpu().numpy() if self.pooled else ()
        for (row, start, _), vector in zip(self.pooled, vectors, strict=True):
            result.pooled.append(PooledStates(row, start, vector.tobytes()))
            if row in self.sampled_rows and not np.isfinite(vector).all():
                result.token_ids[self.sampled_rows.index(row)] = NO_TOKEN
        if self.started is not None and self.ended is not None:
            self.ended.synchronize()
            result.device_seconds = self.started.elapsed_time(self.ended) / 1000
        result.wait_seconds = time.perf_counter() - started
        return result


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Mark the current point in a GPU's work, to measure times. None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
