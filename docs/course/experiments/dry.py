"""DryEngine: examples/minimal_engine.py without a model. It schedules and pages as the real one does, and computes
nothing: every token is 0. What it shows depends on no processor and no rounding.
"""

import sys
from collections import deque
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
import minimal_engine
from minimal_engine import BlockManager, Scheduler, Sequence


class NoModel:
    """Takes the place of a Model. No token ends a sequence."""

    class config:
        max_position_embeddings = 2**30

    def forward(self, input_ids: Tensor, positions: Tensor, slot_mapping: Tensor, chunks: list) -> Tensor:
        return torch.zeros(len(chunks), 1)


class DryEngine(minimal_engine.Engine):
    """An engine whose tokens have no meaning.

    Args: make_scheduler: of the block manager, `max_num_seqs` and `max_num_batched_tokens`.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        make_scheduler=Scheduler,
        block_manager: BlockManager | None = None,
    ):
        self.model = NoModel()  # type: ignore[assignment]
        self.block_manager = block_manager or BlockManager(num_blocks, block_size)
        self.scheduler = make_scheduler(self.block_manager, max_num_seqs, max_num_batched_tokens)
        self.max_len = num_blocks * block_size
        self.ends = frozenset()

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)


class StaticScheduler(Scheduler):
    """Static batching: fills a batch, over several steps if the token budget makes it, and starts no other request
    before all of the batch have ended. Its pool must hold all of them."""

    def schedule(self) -> list[tuple[Sequence, int]]:
        if not self.running:
            self.may_start = self.max_num_seqs
        others, self.waiting = self.waiting, deque()
        while others and len(self.waiting) < self.may_start:
            self.waiting.append(others.popleft())
        count = len(self.waiting)
        batch = super().schedule()
        self.may_start -= count - len(self.waiting)
        self.waiting += others
        return batch
