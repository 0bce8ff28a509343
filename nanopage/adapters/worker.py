"""A worker with adapters: slots in its model, and the ways to run steps."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanopage.adapters.layers import TokenAdapters, lora_buffers
from nanopage.adapters.model import AdaptedDecoder
from nanopage.adapters.weights import AdapterLoader
from nanopage.config.model import ModelConfig
from nanopage.config.options import EngineConfig
from nanopage.cpu.aot_products import adapter_product
from nanopage.cpu.lora import GroupedAdapters, OperatorAdapters
from nanopage.device import GIB, to_device
from nanopage.layers.attention import Attention
from nanopage.models.decoder import Decoder
from nanopage.state.kv_cache import KVCache
from nanopage.state.sequence_table import SequenceTable
from nanopage.step import Batch
from nanopage.worker.cuda_graphs import CUDAGraphs
from nanopage.worker.eager import Output, Pages, attention_of_layers, head_of, prepare, reference_attention, run_model
from nanopage.worker.jit import compile_afresh
from nanopage.worker.model_runner import Way

logger = logging.getLogger("nanopage")


class AdaptedEager:
    """Runs any batch with the model's own modules, as Eager does.

    Args:
        make_attention: as in Eager.
        uses_triton, product: as in `adapters_of`.
    """

    def __init__(
        self,
        model: AdaptedDecoder,
        kv_cache: KVCache,
        table: SequenceTable,
        make_attention: Callable[[Pages], Attention] | None = None,
        uses_triton: bool = False,
        product: Callable[..., Tensor] | None = None,
    ):
        self.model, self.kv_cache, self.table = model, kv_cache, table
        self.make_attention = make_attention or reference_attention
        self.adapters_of = adapters_of(table, uses_triton, product)

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


def make_slots(
    decoder: Decoder, config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[Any, AdapterLoader]:
    """Give a loaded model slots for adapters. Returns: the model with slots, and what loads adapters into them.

    Raises: ValueError for a model that does not work with adapters.
    """
    model = AdaptedDecoder(decoder, config.max_loras, config.max_lora_rank, dtype, device)
    size = sum(buffer.nbytes for buffer in lora_buffers(model)) / GIB
    logger.info(f"{config.max_loras} slots for adapters of rank {config.max_lora_rank}: {size:.3f} GiB")
    return model, AdapterLoader(model, model_config, config.max_lora_rank)


def eager_on_cpu(
    model: Any, kv_cache: KVCache, table: SequenceTable, dtype: torch.dtype, enforce_eager: bool
) -> AdaptedEager:
    """The eager way on a CPU. Compiles the products of adapters on first use, except if enforce_eager forbids it or
    for other dtypes than float32 and bfloat16."""
    compiles = not enforce_eager and dtype in (torch.float32, torch.bfloat16)
    return AdaptedEager(model, kv_cache, table, product=adapter_product(dtype) if compiles else None)


def choose_ways(
    model: Any,
    kv_cache: KVCache,
    table: SequenceTable,
    config: EngineConfig,
    max_model_len: int,
    make_attention: Callable[[Pages], Attention],
    sample_all: Callable[..., Tensor] | None,
) -> tuple[list[Way], str]:
    """The ways to run a step on a GPU, in the order in which they are tried, and words for them.

    Args:
        make_attention: as in Eager.
        sample_all: as in CUDAGraphs.
    """
    eager = AdaptedEager(model, kv_cache, table, make_attention, uses_triton=True)
    if config.enforce_eager or sample_all is None:
        return [eager], "eagerly: layers with adapters are not compiled on a GPU"
    made = model, kv_cache, table, max_model_len, True, sample_all, compile_afresh
    graphs = CUDAGraphs(*made, adapters_of(table, True))
    graphs.capture(graphs.sizes)
    return [graphs, eager], "decodes as CUDA graphs, others eagerly: layers with adapters are not compiled on a GPU"
