"""A worker with adapters: slots in its model, and the eager way to run steps."""

import logging
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from nanopage.adapters.layers import TokenAdapters, lora_buffers
from nanopage.adapters.model import AdaptedDecoder
from nanopage.adapters.weights import AdapterLoader
from nanopage.cpu.aot_products import adapter_product
from nanopage.cpu.lora import GroupedAdapters, OperatorAdapters
from nanopage.device import GIB, to_device
from nanopage.layers.attention import Attention
from nanopage.models.decoder import Decoder
from nanopage.state.kv_cache import KVCache
from nanopage.state.sequence_table import SequenceTable
from nanopage.step import Batch
from nanopage.worker.eager import Output, Pages, attention_of_layers, head_of, prepare, reference_attention, run_model
from nanopage.worker.setup import Setup
from nanopage.worker.ways import Wings

logger = logging.getLogger("nanopage")


class AdaptedEager:
    """Runs any batch with the model's own modules, as Eager does. On a CPU, the products of adapters are compiled on
    first use, except if enforce_eager forbids it or for other dtypes than float32 and bfloat16."""

    def __init__(
        self,
        setup: Setup,
        model: AdaptedDecoder,
        kv_cache: KVCache,
        table: SequenceTable,
        make_attention: Callable[[Pages], Attention] | None = None,
    ):
        self.model, self.kv_cache, self.table = model, kv_cache, table
        self.make_attention = make_attention or reference_attention
        compiles = not setup.config.enforce_eager and setup.dtype in (torch.float32, torch.bfloat16)
        product = adapter_product(setup.dtype) if compiles and not setup.on_gpu else None
        self.adapters_of = adapters_of(table, setup.on_gpu, product)

    def fits(self, batch: Batch) -> bool:
        return True

    def run(self, batch: Batch) -> Output:
        inputs = prepare(batch, self.table)
        attentions = attention_of_layers(inputs, self.kv_cache, self.make_attention)
        rows = to_device(torch.from_numpy(np.repeat(batch.rows, batch.counts)), self.table.device)
        model = partial(self.model, adapters=self.adapters_of(rows))
        head = head_of(self.model)
        return run_model(model, batch, inputs, attentions, self.kv_cache, self.table, head)


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
    """Give a loaded model slots for adapters. Returns: the model with slots.

    Raises: ValueError for a model that does not work with adapters.
    """
    config = setup.config
    model = AdaptedDecoder(decoder, config.max_loras, config.max_lora_rank, setup.dtype, setup.device)
    size = sum(buffer.nbytes for buffer in lora_buffers(model)) / GIB
    logger.info(f"{config.max_loras} slots for adapters of rank {config.max_lora_rank}: {size:.3f} GiB")
    wings.load_adapters = AdapterLoader(model, setup.model_config, config.max_lora_rank).load
    wings.adapters_of = partial(adapters_of, uses_triton=setup.on_gpu)
    wings.make_eager = partial(AdaptedEager, setup)
    return model
