"""The ways to run a step, which a worker lists once, when it starts, and what wings add to them.

    decodes as CUDA graphs            GPU   cuda_graphs.py
    others as graphs of pieces        GPU   piecewise_graphs.py; if they are too large, they call compiled code (jit.py)
    with layers compiled beforehand   CPU   cpu/aot.py
    eagerly                                 eager.py

ModelRunner takes the first one that fits a batch.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanopage.device import GIB
from nanopage.models.decoder import Decoder
from nanopage.state.kv_cache import KVCache
from nanopage.state.sampling_table import SamplingTable
from nanopage.state.sequence_table import SequenceTable
from nanopage.step import AdapterLoad
from nanopage.worker.cuda_graphs import CUDAGraphs, make_sample_all, no_wrap
from nanopage.worker.eager import Eager
from nanopage.worker.jit import CompiledDecoder, compile_afresh, warm_up_sampling
from nanopage.worker.model_runner import Way
from nanopage.worker.piecewise_graphs import PiecewiseGraphs
from nanopage.worker.setup import Setup

logger = logging.getLogger("nanopage")


@dataclass
class Wings:
    """What wings attach to a worker (see startup/worker.py). The defaults add nothing.

    stored_as      how weights are stored, for the log; None: as floats (weights/storage.py)
    load_adapters  loads adapters into slots. Returns why some could not be loaded, by their indexes
    compiled       makes the way with compiled layers on a CPU (cpu/aot.py). Or a text: how steps run instead, and why
    wrap           makes a way to run a part of a model, or an encoder, from a way to run a decoder
                   (distributed/parallel.py, pooling/encode.py)
    threads        sets the number of threads on a CPU before each step (cpu/threads.py)
    items          inputs of running sequences that are no tokens (items/rows.py)
    standby        gives memory back and takes it again, and exchanges weights (standby/worker.py)
    heads          drafts of heads, which read hidden states of the model (speculation/head_worker.py)
    """

    stored_as: str | None = None
    load_adapters: Callable[[list[AdapterLoad]], dict[int, str]] = lambda loads: {}
    compiled: Callable[[KVCache, SequenceTable], Any] | str = "eagerly"
    wrap: Callable[[Way], Way] = lambda way: way
    threads: Any = None
    items: Any = None
    standby: Any = None
    heads: Any = None


def why_not_compiled(setup: Setup) -> str | None:
    """Why this worker compiles nothing of the model. None: it may compile. "": enforce_eager was given, which
    explains itself. On a CPU, `weights.storage.why_eager` adds the reasons that the weights give.
    """
    config = setup.config
    if setup.model_config.model_impl == "transformers":
        return "transformers' own modules are not compiled"
    if setup.model_config.residual_in_float32:
        return "hidden states in float32 are not compiled"
    if setup.on_gpu and setup.model_config.state:
        return "layers with a state are not compiled on a GPU"
    if setup.model_config.latent is not None:
        return "layers with latent attention are not compiled"
    if setup.model_config.full_heads is not None:
        return "layers with heads of two sizes, or that share K and V, are not compiled"
    if setup.on_gpu and config.enable_lora:
        return "layers with adapters are not compiled on a GPU"
    if config.enforce_eager:
        return ""
    # Exchanges between the workers of a stage happen inside layers.
    if config.tensor_parallel_size > 1 or (setup.on_gpu and config.pipeline_parallel_size > 1):
        return "a divided model is not compiled"
    return None


def captures(setup: Setup) -> bool:
    """Whether decodes are CUDA graphs, also of layers that are not compiled. Stages wait for hidden states of other
    stages, which a graph cannot do. Attention to an encoder's positions looks at blocks on the host."""
    config, encoded = setup.config, setup.model_config.encoded_positions
    return setup.on_gpu and not config.enforce_eager and config.pipeline_parallel_size == 1 and not encoded


def wrapper(setup: Setup) -> Callable[[Callable], Callable]:
    """What compiles the functions before and after the model, if they may be compiled."""
    return compile_afresh if captures(setup) and setup.config.tensor_parallel_size == 1 else no_wrap


def list_ways(
    setup: Setup,
    wings: Wings,
    model: Decoder,
    kv_cache: KVCache,
    table: SequenceTable,
    sample_all: Callable[..., Tensor] | None,
) -> tuple[list[Way], str, Any]:
    """Args: sample_all: on a GPU (see `make_sampling`).

    Returns: the ways in the order in which they are tried; how steps run, and why ways are left out, for the log; and
        the way with layers compiled beforehand, if there is one.
    """
    made = model, kv_cache, table
    eager = Eager(*made, setup.make_attention if setup.on_gpu else None)
    ways: list[Way] = []
    compiled, why = None, why_not_compiled(setup)
    words = f"eagerly: {why}" if why else "eagerly"
    started, free = time.perf_counter(), torch.cuda.mem_get_info(setup.device)[0] if setup.on_gpu else 0
    if captures(setup):
        assert sample_all is not None
        graphs = CUDAGraphs(*made, sample_all, wrapper(setup))
        graphs.capture(graphs.sizes)
        ways, words = [graphs], f"decodes as CUDA graphs, others {words}"
    if why is None and setup.on_gpu:
        assert isinstance(model, CompiledDecoder)
        budget = setup.config.token_budget(setup.device.type)
        pieces = PiecewiseGraphs(model, kv_cache, table, setup.make_attention, budget)
        pieces.capture(pieces.sizes, graphs.pool)
        used, seconds = (free - torch.cuda.mem_get_info(setup.device)[0]) / GIB, time.perf_counter() - started
        logger.info(
            f"captured {len(graphs.graphs)} CUDA graphs of decode steps and {sum(map(len, pieces.graphs.values()))} of "
            f"pieces of other steps in {seconds:.1f} s, {used:.2f} GiB"
        )
        ways, most = [graphs, pieces], pieces.sizes[-1]
        words = f"decodes as CUDA graphs, others of up to {most} tokens as graphs of pieces, or compiled"
    elif why is None and callable(make := wings.compiled):
        compiled = make(kv_cache, table)
        ways, words = [compiled], "with compiled layers"
        if compiled.layers is None and compiled.may_compile:
            words = "eagerly until the layers are compiled"
        elif compiled.layers is None:
            words = "eagerly: NANOPAGE_COMPILE=never"
    elif why is None:
        words = str(wings.compiled)
    return [wings.wrap(way) for way in [*ways, eager]], words, compiled


def make_sampling(setup: Setup) -> Callable[..., Tensor]:
    """Make the function that samples all rows of a batch on a GPU, compiled and warmed up for this setup's sizes."""
    sample_all = make_sample_all(wrapper(setup))
    sampling = SamplingTable(setup.config.max_num_seqs + 1, setup.model_config.vocab_size, setup.device)
    warm_up_sampling(sample_all, sampling, setup.dtype, setup.device)
    return sample_all
