"""EncoderWorker: one device with an encoder. It has no KV cache and keeps nothing between batches."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from nanopage.config.options import EngineConfig
from nanopage.cpu.packed import pack
from nanopage.cpu.packed_linear import can_pack
from nanopage.cpu.threads import limit_threads
from nanopage.device import resolve_device, resolve_dtype, set_cuda_precision, to_device
from nanopage.pooling.encoder import Span
from nanopage.pooling.encoder_config import EncoderBatch, EncoderConfig
from nanopage.pooling.encoder_loader import load_encoder

logger = logging.getLogger("nanopage")


class EncoderWorker:
    """Loads an encoder and runs batches.

    Raises: ValueError, MemoryError as Worker; ValueError for weights that are missing, broken or do not fit.
    """

    def __init__(
        self,
        config: EngineConfig,
        encoder_config: EncoderConfig,
        path: Path,
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
        logger.info(f"{path.name} in {dtype} on {self.device.type}; {encoder_config.pooling.task}")

    @torch.inference_mode()
    def encode(self, batch: EncoderBatch) -> np.ndarray:
        """The vector of each sequence: float32 [B, size]."""
        lens = np.array(batch.seq_lens)
        positions = np.arange(lens.sum()) - np.repeat(lens.cumsum() - lens, lens)
        inputs = np.stack([batch.token_ids, batch.token_types, positions])
        input_ids, token_types, positions = to_device(torch.from_numpy(inputs), self.device)
        return self.model(input_ids, token_types, positions, spans_of(batch.seq_lens)).cpu().numpy()


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
