"""KVCache: the paged tensor that holds every sequence's keys and values, and how large it may be."""

import contextlib
import logging
from collections.abc import Iterator

import psutil
import torch

from nanopage.config import EngineConfig, ModelConfig
from nanopage.device import free_bytes, to_device, total_ram
from nanopage.step import Batch

logger = logging.getLogger("nanopage")

GIB = 2**30
SWAP_BYTES = 2**26
CPU_SHARE, CPU_MOST = 0.25, 4 * GIB  # of the RAM available once the weights are loaded


class KVCache:
    """One tensor [num_layers, 2, num_blocks, num_kv_heads, head_dim * block_size]; [l, 0] is K and [l, 1] is V. What
    is in a block: kernels/pages.py.

    On a CPU its memory is only reserved: the system backs it with RAM as blocks are first cleared and used. The host
    pool, [num_host_blocks, num_layers, 2, num_kv_heads, head_dim * block_size], is made by the first swap; beside a GPU
    it is pinned, and takes all its memory then.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
    ):
        shape = (config.num_layers, 2, num_blocks, config.num_kv_heads, config.head_dim * block_size)
        self.tensor = torch.empty(shape, dtype=dtype, device=device)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_host_blocks = num_host_blocks
        self.host: torch.Tensor | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # for copies to and from the host

    def move(self, batch: Batch) -> None:
        """Swap, copy and clear the blocks that a batch names."""
        self.swap_out(batch.swap_out)
        self.swap_in(batch.swap_in)
        self.copy(batch.copies)
        if self._stream is None:  # the kernels of a GPU read nothing beyond a sequence's end
            self.clear(batch.cleared)

    def clear(self, blocks: list[int]) -> None:
        """Zero blocks in all layers. Attention reads whole blocks and masks what lies beyond a sequence's end; what it
        masks must be finite (NaN times a weight of 0 is NaN), so no former owner's values may remain."""
        if blocks:
            self.tensor.index_fill_(2, self._index(blocks), 0)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks (from, to) in all layers. All are read before any is written."""
        if pairs:
            sources, targets = zip(*pairs, strict=True)
            self.tensor.index_copy_(2, self._index(targets), self.tensor.index_select(2, self._index(sources)))

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks to the host pool: (block, host block)."""
        for some in self._batched(pairs):
            host = self._host_pool()
            blocks = self._index([block for block, _ in some])
            leaving = self.tensor.index_select(2, blocks).movedim(2, 0).contiguous()
            with self._copying():
                for row, (_, host_block) in enumerate(some):
                    host[host_block].copy_(leaving[row], non_blocking=True)
            if self._stream is not None:
                leaving.record_stream(self._stream)

    def swap_in(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks back from the host pool: (host block, block)."""
        for some in self._batched(pairs):
            host = self._host_pool()
            coming = torch.empty((len(some), *host.shape[1:]), dtype=host.dtype, device=self.tensor.device)
            with self._copying():
                for row, (host_block, _) in enumerate(some):
                    coming[row].copy_(host[host_block], non_blocking=True)
            if self._stream is not None:
                torch.cuda.current_stream(self.tensor.device).wait_stream(self._stream)
            self.tensor.index_copy_(2, self._index([block for _, block in some]), coming.movedim(0, 2))

    def _batched(self, pairs: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        """So many at a time as take SWAP_BYTES of the device's memory on their way."""
        count = max(1, SWAP_BYTES * self.num_blocks // self.tensor.nbytes)
        for begin in range(0, len(pairs), count):
            yield pairs[begin : begin + count]

    def _index(self, blocks) -> torch.Tensor:
        return to_device(blocks, self.tensor.device)

    def _host_pool(self) -> torch.Tensor:
        if self.host is None:
            layers, two, _, *rest = self.tensor.shape
            shape = (self.num_host_blocks, layers, two, *rest)  # a block in one piece
            self.host = torch.empty(shape, dtype=self.tensor.dtype, pin_memory=self._stream is not None)
        return self.host

    def _copying(self) -> contextlib.AbstractContextManager:
        """Copies begin when the work so far is done, and later work need not wait for them."""
        if self._stream is None:
            return contextlib.nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self.tensor.device))
        return torch.cuda.stream(self._stream)


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return config.num_layers * 2 * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize


def num_blocks_that_fit(
    engine: EngineConfig,
    model: ModelConfig,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    step_bytes: int = 0,
) -> int:
    """How many blocks the options and the memory that is free now (with the weights loaded) give.

    Never more than `max_num_seqs` sequences of `max_model_len` can use.

    Args:
        step_bytes: that steps will take of a GPU's memory beside weights and KV cache.

    Raises: MemoryError, saying what is there and which options help, if not even one block fits; on a GPU also if the
        `max_model_len` that was asked for does not.
    """
    if engine.num_gpu_blocks_override is not None:
        return engine.num_gpu_blocks_override
    size = block_bytes(model, engine.block_size, dtype)
    useful = engine.max_num_seqs * -(-max_model_len // engine.block_size)
    free = free_bytes(device)
    if engine.kv_cache_gib is not None:
        budget = engine.kv_cache_gib * GIB
        if budget > free:
            raise MemoryError(f"kv_cache_gib={engine.kv_cache_gib:g} is more than the {free / GIB:.2f} GiB there are")
    elif device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return min(blocks_of_gpu(engine, size, total, total - free, step_bytes), useful)
    elif engine.gpu_memory_utilization is not None:
        used = psutil.Process().memory_info().rss
        budget = min(engine.gpu_memory_utilization * total_ram() - used, free)
    else:
        budget = min(CPU_SHARE * free, CPU_MOST)
    if budget < size:
        raise MemoryError(
            f"no room for the KV cache: {free / GIB:.2f} GiB are free on {device.type}, the options leave it "
            f"{budget / GIB:.2f} GiB, and one block of {engine.block_size} tokens takes {size / GIB:.4f} GiB. "
            "Raise kv_cache_gib or gpu_memory_utilization, or use a smaller model"
        )
    return min(int(budget // size), useful)


def blocks_of_gpu(engine: EngineConfig, size: int, total: int, used: int, step_bytes: int) -> int:
    """How many blocks of `size` bytes fit into the share of a GPU's `total` memory that `gpu_memory_utilization` gives,
    less what is `used` already and what steps will take. Raises MemoryError as `num_blocks_that_fit`."""
    share = engine.gpu_memory_utilization or 0.9
    left = max(0, int(share * total) - used - step_bytes)
    tokens, needed = left // size * engine.block_size, engine.max_model_len or engine.block_size
    sizes = (
        f"of the GPU's {total / GIB:.2f} GiB, gpu_memory_utilization={share:g} gives {share * total / GIB:.2f}; "
        f"weights and what else is there take {used / GIB:.2f}, the largest step takes {step_bytes / GIB:.2f}; "
        f"the {left / GIB:.2f} GiB left for the KV cache hold {tokens:,} tokens"
    )
    if tokens < needed:
        raise MemoryError(f"{sizes}, not {needed:,}: raise gpu_memory_utilization, or lower max_num_batched_tokens")
    logger.info(sizes)
    return left // size


def num_host_blocks(engine: EngineConfig, num_blocks: int, size: int) -> int:
    """How many blocks of `size` bytes the host pool has: `swap_space`, else as many as the KV cache, within limits.

    Raises: MemoryError if `swap_space` is more than the RAM there is.
    """
    if engine.preemption_mode == "recompute":
        return 0
    free = free_bytes(torch.device("cpu"))
    if engine.swap_space is None:
        return min(num_blocks, int(min(CPU_SHARE * free, CPU_MOST)) // size)
    if engine.swap_space * GIB > free:
        raise MemoryError(f"swap_space={engine.swap_space:g} is more than the {free / GIB:.2f} GiB there are")
    return round(engine.swap_space * GIB) // size
