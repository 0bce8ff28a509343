"""Decode steps, recorded once and replayed (milestone 11). `record` stands in for the capture of a CUDA graph."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from .attention import paged_attention
from .cache import PagedCache, Step
from .model import Model


def record(function: Callable[..., Tensor], *tensors: Tensor) -> Callable[[], Tensor]:
    """Run a function once and record its operations, for these shapes: what a GPU would launch, in order. The recording
    does all of it again with the same tensors, without the Python around it."""
    return partial(make_fx(function)(*tensors), *tensors)


def capture_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes to record, in order: 1, 2, 4 and multiples of 8 below `max_num_seqs`, and `max_num_seqs`."""
    return [*(size for size in (1, 2, 4, *range(8, max_num_seqs, 8)) if size < max_num_seqs), max_num_seqs]


def padding(size: int, max_blocks: int) -> Step:
    """A decode step of `size` sequences that are all padding: token 0 at position 0, which reads and writes the spare
    block, -1. Each tensor has memory of its own."""
    zeros, every = torch.zeros(2, size, dtype=torch.int64), torch.arange(size)
    return Step(zeros[0], zeros[1], every * 0 - 1, every, torch.full((size, max_blocks), -1), every.clone())


class DecodeGraphs:
    """Recordings of decode steps, one for each of a few batch sizes. A step runs in the next larger one, padded. Shapes
    and addresses are fixed: the inputs of a recording are buffers, which are filled anew for each step."""

    def __init__(self, model: Model, cache: PagedCache, max_num_seqs: int, max_blocks: int):
        self.recordings: dict[int, tuple[Step, Callable[[], Tensor]]] = {}
        for size in capture_sizes(max_num_seqs):
            buffers = padding(size, max_blocks)
            forward = partial(model.forward, attend=partial(cache.attend, buffers, paged_attention))
            self.recordings[size] = buffers, record(forward, buffers.token_ids, buffers.positions)

    def fits(self, step: Step) -> bool:
        """Whether each sequence of a step has one token, and a recording is large enough."""
        return len(step.token_ids) == len(step.last) <= max(self.recordings)

    def run(self, step: Step) -> Tensor:
        """Hidden states [B, hidden_size] of a decode step with B sequences."""
        count = len(step.last)
        buffers, replay = self.recordings[min(size for size in self.recordings if size >= count)]
        buffers.block_tables.fill_(-1)[:count, : step.block_tables.shape[1]] = step.block_tables
        for name, blank in (("token_ids", 0), ("positions", 0), ("slot_mapping", -1)):
            getattr(buffers, name).fill_(blank)[:count] = getattr(step, name)
        return replay()[:count]
