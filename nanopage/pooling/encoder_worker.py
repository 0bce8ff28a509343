"""EncoderWorker: one device with an encoder. It has no KV cache and keeps nothing between batches.

An encoder runs on the usual engine. Its layers keep nothing of a sequence, so that sequences need no blocks, and its
prompts are not divided: each is computed in one step (see `Scheduler.arrange`).
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nanopage.config.options import EngineConfig
from nanopage.cpu.packed import pack
from nanopage.cpu.packed_linear import can_pack
from nanopage.cpu.threads import limit_threads
from nanopage.device import resolve_device, resolve_dtype, set_cuda_precision, to_device
from nanopage.pooling.encoder import Span
from nanopage.pooling.encoder_config import EncoderConfig
from nanopage.pooling.encoder_loader import load_encoder
from nanopage.step import NO_TOKEN, Batch, BatchResult, Capacity, PooledStates

logger = logging.getLogger("nanopage")


class EncoderWorker:
    """Loads an encoder and runs batches, as a Worker does.

    Raises: ValueError, MemoryError as Worker; ValueError for weights that are missing, broken or do not fit.
    """

    def __init__(
        self,
        config: EngineConfig,
        encoder_config: EncoderConfig,
        path: Path,
        max_model_len: int,
        on_progress: Callable[[int, int], None] | None = None,
    ):
        self.device = resolve_device(config.device)
        self.dtype, why = resolve_dtype(config.dtype, encoder_config.dtype, self.device)
        if why:
            logger.info(why)
        if self.device.type == "cpu":
            limit_threads()
        else:
            set_cuda_precision()
        self.model = load_encoder(path, encoder_config, self.dtype, self.device, on_progress)
        if self.device.type == "cpu" and can_pack(self.dtype):
            pack(self.model)
        dtype = str(self.dtype).removeprefix("torch.")
        self.capacity = Capacity(self.device.type, dtype, 0, 0, max_model_len, windows=())
        logger.info(f"{path.name} in {dtype} on {self.device.type}; {encoder_config.pooling.task}")

    @torch.inference_mode()
    def launch(self, batch: Batch) -> "Encoded":
        """Start a batch, all of whose sequences are new. Those of equal length are computed together."""
        started = time.perf_counter()
        new = sorted(batch.new, key=lambda sequence: len(sequence.token_ids))
        if not new:
            return Encoded([], [], torch.empty(0, 0), 0.0)
        lens = np.array([len(sequence.token_ids) for sequence in new])
        inputs = np.zeros((3, lens.sum()), dtype=np.int64)
        inputs[0] = np.concatenate([sequence.token_ids for sequence in new])
        inputs[1] = np.concatenate([s.sampling.token_types or [0] * len(s.token_ids) for s in new])
        inputs[2] = np.arange(lens.sum()) - np.repeat(lens.cumsum() - lens, lens)
        input_ids, token_types, positions = to_device(torch.from_numpy(inputs), self.device)
        vectors = self.model(input_ids, token_types, positions, spans_of(lens.tolist()))
        rows = [sequence.row for sequence in new]
        return Encoded(batch.sampled_rows, rows, vectors, time.perf_counter() - started)

    def rest(self) -> None:
        """Nothing is left to do when no request runs."""

    def compile(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Nothing is compiled."""


@dataclass(slots=True)
class Encoded:
    """A batch that has been started.

    sampled_rows  as in Batch: the engine takes a token for each, which ends its sequence
    rows          of each vector
    vectors       float32 [B, size]
    seconds       that launching took
    """

    sampled_rows: list[int]
    rows: list[int]
    vectors: Tensor
    seconds: float

    def result(self) -> BatchResult:
        """Wait for the vectors. See `BatchResult.pooled`."""
        started = time.perf_counter()
        vectors = dict(zip(self.rows, self.vectors.cpu().numpy(), strict=True))
        tokens = [0 if np.isfinite(vectors[row]).all() else NO_TOKEN for row in self.sampled_rows]
        pooled = [PooledStates(row, 0, vector.tobytes()) for row, vector in vectors.items()]
        waited = time.perf_counter() - started
        return BatchResult(tokens, pooled=pooled, model_seconds=self.seconds, wait_seconds=waited)


def spans_of(seq_lens: list[int]) -> list[Span]:
    """Group neighbours of equal length."""
    spans: list[Span] = []
    start = 0
    for length in seq_lens:
        if spans and spans[-1].length == length:
            spans[-1] = spans[-1]._replace(num=spans[-1].num + 1)
        else:
            spans.append(Span(start, 1, length))
        start += length
    return spans
