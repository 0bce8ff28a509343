"""KVCache: the paged tensor that holds every sequence's keys and values, and the host pool for swapped blocks.

`memory.py` decides how large both are.
"""

import contextlib
from collections.abc import Iterator
from math import prod

import torch

from nanopage.config.model import ModelConfig
from nanopage.device import to_device
from nanopage.files.model_files import memory_errors
from nanopage.state.layer_kinds import STATE, LayerKinds, one_kind
from nanopage.state.pages import movable
from nanopage.step import Batch

SWAP_BYTES = 2**26  # of temporary device memory for each piece of a swap


class KVCache:
    """Holds the keys and values of all sequences, and moves blocks.

    tensor  [num_layers, 2, num_blocks, num_kv_heads, head_dim * block_size]: K in [l, 0] and V in [l, 1] of layer l.
            state/pages.py describes the layout of a block. With latent attention, there is no V. If there are several
            kinds of layers (layer_kinds.py), the first dimension is only as large as the largest kind, and a block
            belongs to the layers of one kind
    layers  of each layer, its part of `tensor`: [2, num_blocks, num_kv_heads, head_dim * block_size], with the sizes
            of its own heads. Layers with a state keep it there (recurrent/states.py)
    movable   the same memory in a dtype that all operators know (state/pages.py); the methods below work on it
    host    the host pool, [num_host_blocks, num_layers, 2, num_kv_heads, head_dim * block_size]; None before the first
            swap

    On a CPU, `tensor` takes RAM only as blocks are first written. With a GPU, the host pool is pinned, so the first
    swap takes the memory of the whole pool.

    Args: kinds: of the worker's layers. None: all are of one kind.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
        kinds: LayerKinds | None = None,
    ):
        self.kinds = kinds or one_kind(config.num_layers)
        blocks = num_blocks + (STATE in self.kinds.windows)  # one more, for the padding of CUDA graphs
        heads, dim = max(config.heads, key=prod)
        shape = (self.kinds.num_rows, config.kv_parts, blocks, heads, dim * block_size)
        with memory_errors("the KV cache, which kv_cache_gib or gpu_memory_utilization makes smaller"):
            self.tensor = torch.empty(shape, dtype=dtype, device=device)
        flat, places = self.tensor.flatten(3), zip(self.kinds.rows, config.heads, strict=True)
        self.layers = [flat[row][..., : n * dim * block_size].unflatten(2, (n, -1)) for row, (n, dim) in places]
        self.movable = movable(self.tensor)
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
        if self._stream is None:  # the kernels of a GPU ignore what is beyond a sequence's end
            self.clear(batch.cleared)

    def clear(self, blocks: list[int]) -> None:
        """Zero blocks in all layers that they hold.

        Attention on a CPU reads whole blocks and masks the slots beyond a sequence's end. The masked values must be
        finite, because NaN times a weight of 0 is NaN, so the values of a block's previous owner must not remain.
        """
        if blocks:
            self.movable.index_fill_(2, self._index(blocks), 0)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks in all layers: (from, to). All blocks are read before any is written."""
        if pairs:
            sources, targets = zip(*pairs, strict=True)
            self.movable.index_copy_(2, self._index(targets), self.movable.index_select(2, self._index(sources)))

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks to the host pool: (block, host block)."""
        for some in self._batched(pairs):
            host = self._host_pool()
            blocks = self._index([block for block, _ in some])
            leaving = self.movable.index_select(2, blocks).movedim(2, 0).contiguous()
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
            self.movable.index_copy_(2, self._index([block for _, block in some]), coming.movedim(0, 2))

    def _batched(self, pairs: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        """Split pairs into parts whose blocks take at most SWAP_BYTES, or into single pairs if a block takes more."""
        count = max(1, SWAP_BYTES * self.num_blocks // max(1, self.tensor.nbytes))
        for begin in range(0, len(pairs), count):
            yield pairs[begin : begin + count]

    def _index(self, blocks) -> torch.Tensor:
        return to_device(blocks, self.tensor.device)

    def _host_pool(self) -> torch.Tensor:
        if self.host is None:
            layers, parts, _, *rest = self.tensor.shape
            shape = (self.num_host_blocks, layers, parts, *rest)  # each block is contiguous
            self.host = torch.empty(shape, dtype=self.movable.dtype, pin_memory=self._stream is not None)
        return self.host

    def _copying(self) -> contextlib.AbstractContextManager:
        """A context whose copies run on a stream of their own. They start after all work that was submitted before.
        Work that is submitted later does not wait for them, unless its stream is told to."""
        if self._stream is None:
            return contextlib.nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self.tensor.device))
        return torch.cuda.stream(self._stream)
