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
    raise NotImplementedError("milestone 11")


def padding(size: int, max_blocks: int) -> Step:
    """A decode step of `size` sequences that are all padding: token 0 at position 0, which reads and writes the spare
    block, -1. Each tensor has memory of its own."""
    raise NotImplementedError("milestone 11")


class DecodeGraphs:
    """Recordings of decode steps, one for each of a few batch sizes. A step runs in the next larger one, padded. Shapes
    and addresses are fixed: the inputs of a recording are buffers, which are filled anew for each step."""

    def __init__(self, model: Model, cache: PagedCache, max_num_seqs: int, max_blocks: int):
        raise NotImplementedError("milestone 11")

    def fits(self, step: Step) -> bool:
        """Whether each sequence of a step has one token, and a recording is large enough."""
        raise NotImplementedError("milestone 11")

    def run(self, step: Step) -> Tensor:
        """Hidden states [B, hidden_size] of a decode step with B sequences."""
        raise NotImplementedError("milestone 11")
