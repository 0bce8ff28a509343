"""A worker with adapters: slots in its model, and what steps need to know of the adapters of their tokens."""

import logging
from collections.abc import Callable
from functools import partial

from torch import Tensor

from nanopage.adapters.layers import TokenAdapters, lora_buffers
from nanopage.adapters.model import AdaptedDecoder
from nanopage.adapters.weights import AdapterLoader
from nanopage.device import GIB
from nanopage.models.decoder import Decoder
from nanopage.state.sequence_table import SequenceTable
from nanopage.worker.setup import Setup
from nanopage.worker.ways import Wings

logger = logging.getLogger("nanopage")


Choose = Callable[[Tensor, Tensor], TokenAdapters | None]
"""From the adapter slots of the rows of the sequence table, int64 [rows], and the row of each token, int64 [T], to the
adapters of the tokens."""


def adapters_on_gpu(slots: Tensor, rows: Tensor) -> TokenAdapters:
    """Triton kernels compute the products."""
    from nanopage.adapters.kernels import TritonAdapters  # imports Triton

    return TritonAdapters(slots[rows])


def attach_adapters(setup: Setup, decoder: Decoder, wings: Wings, choose: Choose) -> AdaptedDecoder:
    """Give a loaded model slots for adapters. Returns: the model with slots.

    Args: choose: what computes the products of adapters on this device.
    """
    config = setup.config
    model = AdaptedDecoder(decoder, config.max_loras, config.max_lora_rank, setup.dtype, setup.device)
    size = sum(buffer.nbytes for buffer in lora_buffers(model)) / GIB
    logger.info(f"{config.max_loras} slots for adapters of rank {config.max_lora_rank}: {size:.3f} GiB")
    wings.load_adapters = AdapterLoader(model, setup.model_config, config.max_lora_rank).load

    def of_rows(table: SequenceTable) -> Callable[[Tensor], TokenAdapters | None]:
        assert table.adapter_slots is not None
        return partial(choose, table.adapter_slots)

    wings.adapters_of = of_rows
    return model
