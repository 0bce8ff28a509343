"""How much memory a worker uses: what a step takes on a GPU, and the sizes of the KV cache and of the host pool.

Once the weights are loaded, a worker calls `measure_step`, on a GPU, and then `measure_capacity`.
"""

import logging
from collections.abc import Callable
from functools import partial

import psutil
import torch
from torch import Tensor

from nanopage.config.model import ModelConfig
from nanopage.config.options import EngineConfig
from nanopage.device import GIB, free_bytes, total_ram
from nanopage.models.decoder import Decoder
from nanopage.params import MAX_LOGPROBS
from nanopage.state.kv_cache import KVCache
from nanopage.state.layer_kinds import BlockNeeds
from nanopage.step import Batch, BlockUpdate, Capacity, NewSequence, SamplingSettings
from nanopage.worker.cuda_graphs import CUDAGraphs
from nanopage.worker.eager import Eager
from nanopage.worker.jit import CompiledDecoder
from nanopage.worker.model_runner import ModelRunner
from nanopage.worker.piecewise_graphs import PiecewiseGraphs
from nanopage.worker.setup import Setup
from nanopage.worker.ways import Wings, captures, wrapper

logger = logging.getLogger("nanopage")

MANY_TOKENS = 2**31  # more than any sequence has
CPU_SHARE, CPU_MOST = 0.25, 4 * GIB  # of the RAM that is free once the weights are loaded


def measure_step(setup: Setup, wings: Wings, model: Decoder, sample_all: Callable[..., Tensor]) -> int:
    """Bytes of GPU memory that steps take in addition to the weights and the KV cache.

    Runs the largest possible step eagerly, on a KV cache of one block. With CUDA graphs, also captures the largest
    decode step and then the smallest, and the pieces of the largest and of the smallest other step. All graphs share
    the memory of the largest; the smallest shows what each further one adds. The splits of a long prompt's context take
    memory, too (PROMPT_SPLIT_BYTES): this step has none.
    """
    from nanopage.kernels.paged_attention import PROMPT_SPLIT_BYTES  # imports Triton

    # Not in inference mode: torch would compile the sampler again for tensors that are made there.
    config, device, kinds, most = setup.config, setup.device, setup.kinds, setup.longest
    vocab_size, budget = setup.model_config.vocab_size, config.token_budget(device.type)
    cache = KVCache(setup.part, 1, config.block_size, setup.kv_dtype, device, kinds=kinds)
    table = setup.make_table(most)
    table_bytes = table.num_bytes
    eager = wings.wrap(Eager(model, cache, table, setup.make_attention))
    runner = ModelRunner(model, cache, table, [eager], sample_all)
    batch = largest_batch(budget, config.max_num_seqs, most, config.block_size, vocab_size, len(kinds.windows))
    if setup.part.pooling is not None:
        for new in batch.new:
            new.sampling = SamplingSettings(pooling_type="MEAN")
    cache.clear([0])
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    runner.launch(batch).result()
    eager_bytes = torch.cuda.max_memory_allocated(device) - before + table_bytes + PROMPT_SPLIT_BYTES
    del runner, eager
    torch.cuda.empty_cache()
    if not captures(setup):
        return eager_bytes
    free = torch.cuda.mem_get_info(device)[0]
    graphs = CUDAGraphs(model, cache, table, sample_all, wrapper(setup))
    largest, smallest, free = _capture_bytes(graphs.capture, graphs.sizes, free, device)
    graph_bytes = largest + smallest * (len(graphs.sizes) - 1)
    if isinstance(model, CompiledDecoder):
        pieces = PiecewiseGraphs(model, cache, table, setup.make_attention, budget)
        largest, smallest, _ = _capture_bytes(partial(pieces.capture, pool=graphs.pool), pieces.sizes, free, device)
        graph_bytes += largest + smallest * (len(pieces.sizes) - 1)
        del pieces
    del graphs, table, cache
    torch.cuda.empty_cache()
    return eager_bytes + graph_bytes


def _capture_bytes(
    capture: Callable[[list[int]], None], sizes: list[int], free: int, device: torch.device
) -> tuple[int, int, int]:
    """Capture the largest and the smallest of these sizes. Returns: how many bytes of `free` the first took, how many
    more the second took, and how many bytes of GPU memory are free then."""
    left = []
    for captured in (sizes[-1:], sizes[:1]):
        capture(captured)
        torch.cuda.empty_cache()
        left.append(torch.cuda.mem_get_info(device)[0])
    return free - left[0], max(0, left[0] - left[1]), left[1]


def largest_batch(
    num_tokens: int, num_seqs: int, max_model_len: int, block_size: int, vocab_size: int, num_kinds: int = 1
) -> Batch:
    """A step of `num_tokens` prompt tokens of `num_seqs` sequences, with the sampling settings that take the most
    memory. All tokens go to block 0: use it only to measure.

    Few prompts have most of the tokens: the logits for log-probabilities of a prompt take memory for each of its
    tokens, up to PROMPT_LOGPROB_ROWS. All sequences but one have masks: masks of some rows take more memory than masks
    of all.
    """
    settings = SamplingSettings(
        temperature=1.0,
        top_p=0.9,
        frequency_penalty=0.1,
        dry_multiplier=0.1,
        logprobs=MAX_LOGPROBS,
        prompt_logprobs=MAX_LOGPROBS,
    )
    num_seqs = min(num_seqs, num_tokens)
    left = num_tokens - num_seqs  # every sequence has one token; the last ones get the others
    lengths = [1] * num_seqs
    for row in reversed(range(num_seqs)):
        lengths[row] += min(left, max_model_len - 1)
        left -= lengths[row] - 1
    batch = Batch()
    for row, length in enumerate(lengths):
        batch.new.append(NewSequence(row, [0] * length, length, row, settings))
        batch.blocks.append(BlockUpdate(row, 0, [0] * -(-length // block_size) * num_kinds))
        batch.rows.append(row)
        batch.starts.append(0)
        batch.counts.append(length)
        batch.sampled_from.append(batch.num_tokens - 1)
        batch.sampled_rows.append(row)
        if row > 0:
            batch.masks[row] = b"\xff" * -(-vocab_size // 8)
    return batch


def block_bytes(model_config: ModelConfig, block_size: int, dtype: torch.dtype, num_rows: int | None = None) -> int:
    """Bytes of one block, which holds `num_rows` layers. None: all layers."""
    num_rows = model_config.num_layers if num_rows is None else num_rows
    numbers = model_config.kv_parts * max(heads * dim for heads, dim in model_config.heads)  # of a token, in a layer
    return num_rows * block_size * numbers * dtype.itemsize


def measure_capacity(setup: Setup, step_bytes: int) -> Capacity:
    """What the worker can hold. Args: step_bytes: as `measure_step` returns it. Raises: as the functions below."""
    config, longest = setup.config, setup.longest
    size = block_bytes(setup.part, config.block_size, setup.kv_dtype, setup.kinds.num_rows)
    num_blocks = num_blocks_that_fit(setup, size, step_bytes) if setup.has_cache else 0
    max_model_len = fit_length(config, longest, setup.needs.longest(num_blocks, longest))
    host_blocks, dtype = num_host_blocks(config, num_blocks, size), str(setup.dtype).removeprefix("torch.")
    return Capacity(setup.device.type, dtype, num_blocks, host_blocks, max_model_len, setup.kinds.windows)


def num_blocks_that_fit(setup: Setup, size: int, step_bytes: int) -> int:
    """How many blocks of `size` bytes the KV cache can have, given the options and the memory that is free now. Several
    workers on CPUs are taken to share one machine.

    At most as many as `max_num_seqs` sequences of the longest kind can use, unless `num_gpu_blocks_override` sets the
    number.

    Raises: MemoryError if not even one token fits. Where `gpu_memory_utilization` sizes the cache of a GPU, also if the
        `max_model_len` that the user has set does not fit. The message has the sizes and the options that help.
    """
    config, needs, device = setup.config, setup.needs, setup.device
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    useful, free = config.max_num_seqs * needs.of([setup.longest]), free_bytes(device)
    if config.kv_cache_gib is not None:
        budget = config.kv_cache_gib * GIB
        if budget > free:
            raise MemoryError(f"kv_cache_gib={config.kv_cache_gib:g} is more than the {free / GIB:.2f} GiB free")
    elif device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return min(blocks_of_gpu(config, size, needs, total, total - free, step_bytes), useful)
    elif config.gpu_memory_utilization is not None:
        used = psutil.Process().memory_info().rss
        budget = min(config.gpu_memory_utilization * total_ram() / config.num_ranks - used, free)
    else:
        budget = min(CPU_SHARE * free, CPU_MOST) / config.num_ranks
    if budget < size * needs.of([1]):
        raise MemoryError(
            f"no room for the KV cache: {free / GIB:.2f} GiB are free on {device.type}, the options leave it "
            f"{budget / GIB:.2f} GiB, and {config.block_size} tokens take {size * needs.of([1]) / GIB:.4f} GiB. "
            "Raise kv_cache_gib or gpu_memory_utilization, or use a smaller model"
        )
    return min(int(budget // size), useful)


def blocks_of_gpu(config: EngineConfig, size: int, needs: BlockNeeds, total: int, used: int, step_bytes: int) -> int:
    """How many blocks of `size` bytes a GPU with `total` bytes of memory can hold: the share that
    `gpu_memory_utilization` allows, minus the `used` bytes and `step_bytes`. Raises: as `num_blocks_that_fit`."""
    share = config.gpu_memory_utilization or 0.9
    left = max(0, int(share * total) - used - step_bytes)
    tokens, needed = needs.longest(left // size, MANY_TOKENS), config.max_model_len or config.block_size
    sizes = (
        f"of the GPU's {total / GIB:.2f} GiB, gpu_memory_utilization={share:g} gives {share * total / GIB:.2f}; "
        f"weights and what else is there take {used / GIB:.2f}, the largest step takes {step_bytes / GIB:.2f}; "
        f"the {left / GIB:.2f} GiB left for the KV cache hold {tokens:,} tokens"
    )
    if tokens < needed:
        raise MemoryError(f"{sizes}, not {needed:,}: raise gpu_memory_utilization, or lower max_num_batched_tokens")
    logger.info(sizes)
    return left // size


def fit_length(config: EngineConfig, max_model_len: int, num_tokens: int) -> int:
    """The max_model_len for a KV cache of `num_tokens` tokens: a request that has the cache to itself must fit.

    Raises: MemoryError if the KV cache is smaller than the max_model_len that the user has set.
    """
    if max_model_len <= num_tokens:
        return max_model_len
    if config.max_model_len is not None:
        raise MemoryError(
            f"the KV cache holds {num_tokens:,} tokens, less than one request of max_model_len={max_model_len:,}: "
            "raise kv_cache_gib or gpu_memory_utilization, or lower max_model_len"
        )
    logger.info(f"max_model_len is {num_tokens:,}, not the model's {max_model_len:,}: the KV cache holds no more")
    return num_tokens


def num_host_blocks(config: EngineConfig, num_blocks: int, size: int) -> int:
    """How many blocks of `size` bytes the host pool has.

    `swap_space` sets the size. By default the pool is as large as the KV cache, within CPU_SHARE and CPU_MOST.

    Raises: MemoryError if `swap_space` is more than the free RAM.
    """
    if config.preemption_mode == "recompute":
        return 0
    free = free_bytes(torch.device("cpu"))
    if config.swap_space is None:
        return min(num_blocks, int(min(CPU_SHARE * free, CPU_MOST) / config.num_ranks) // size)
    if config.swap_space * GIB > free:
        raise MemoryError(f"swap_space={config.swap_space:g} is more than the {free / GIB:.2f} GiB free")
    return round(config.swap_space * GIB) // size
