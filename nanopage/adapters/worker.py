"""A worker with adapters: slots in its model, and what steps need to know of the adapters of their tokens."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from nanopage.adapters.layers import TokenAdapters, lora_buffers
from nanopage.adapters.model import AdaptedDecoder
from nanopage.adapters.weights import AdapterLoader
from nanopage.cpu.aot_products import adapter_product
from nanopage.cpu.lora import GroupedAdapters, OperatorAdapters
from nanopage.device import GIB
from nanopage.models.decoder import Decoder
from nanopage.state.sequence_table import SequenceTable
from nanopage.worker.setup import Setup
from nanopage.worker.ways import Wings

logger = logging.getLogger("nanopage")


def adapters_of(
    table: SequenceTable, uses_triton: bool, product: Callable[..., Tensor] | None = None
) -> Callable[[Tensor], TokenAdapters | None]:
    """A function from the row of each token in the sequence table, int64 [T], to the adapters of the tokens.

    Args:
        uses_triton: whether Triton kernels compute the products of adapters.
        product: computes them on a CPU, as the operator nanopage::add_adapters. None: plain torch does.
    """
    slots = table.adapter_slots
    assert slots is not None
    if uses_triton:
        from nanopage.adapters.kernels import TritonAdapters  # imports Triton

        return lambda rows: TritonAdapters(slots[rows])

    def on_cpu(rows: Tensor) -> TokenAdapters | None:
        chosen = slots.numpy()[rows.numpy()]
        if not (chosen >= 0).any():
            return None
        return GroupedAdapters(chosen) if product is None else OperatorAdapters(torch.from_numpy(chosen), product)

    return on_cpu


def attach_adapters(setup: Setup, decoder: Decoder, wings: Wings) -> AdaptedDecoder:
    """Give a loaded model slots for adapters. Returns: the model with slots."""
    config = setup.config
    model = AdaptedDecoder(decoder, config.max_loras, config.max_lora_rank, setup.dtype, setup.device)
    size = sum(buffer.nbytes for buffer in lora_buffers(model)) / GIB
    logger.info(f"{config.max_loras} slots for adapters of rank {config.max_lora_rank}: {size:.3f} GiB")
    wings.load_adapters = AdapterLoader(model, setup.model_config, config.max_lora_rank).load
    compiles = not setup.on_gpu and not config.enforce_eager and setup.dtype in (torch.float32, torch.bfloat16)

    def of_rows(table: SequenceTable) -> Callable[[Tensor], TokenAdapters | None]:
        # On a CPU, the products of adapters are compiled on first use.
        return adapters_of(table, setup.on_gpu, adapter_product(setup.dtype) if compiles else None)

    wings.adapters_of = of_rows
    return model
