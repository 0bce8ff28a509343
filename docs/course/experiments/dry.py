"""DryEngine: the engine of docs/build/mini_ref without a model and without prefix sharing. It schedules and pages as
the real one does, and computes nothing: every token is 0. What it shows depends on no processor and no rounding.
"""

import sys
from collections import deque
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "build"))
from mini_ref.blocks import BlockManager, Sequence
from mini_ref.engine import Engine
from mini_ref.scheduler import Scheduler


class PlainBlocks(BlockManager):
    """Without the prefixes of chapter 4: all tokens are 0, so that sequences would share all blocks."""

    def find_prefix(self, seq: Sequence) -> list[int]:
        return []

    def store_prefix(self, seq: Sequence) -> None:
        pass


class NoModel:
    """Takes the place of a Model. Its only token ends no sequence."""

    vocab_size = 1


class DryEngine(Engine):
    """An engine whose tokens have no meaning.

    Args: make_scheduler: of the block manager, `max_num_seqs` and `max_num_batched_tokens`.

    Attributes: batch: the last step, as `Scheduler.schedule` has returned it. tables: the block tables in it.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        make_scheduler=Scheduler,
    ):
        self.model = NoModel()  # type: ignore[assignment]
        self.blocks = PlainBlocks(num_blocks, block_size)
        self.scheduler = make_scheduler(self.blocks, max_num_seqs, max_num_batched_tokens)
        self.running = self.scheduler.running
        self.max_len = num_blocks * block_size
        self.batch: list[tuple[Sequence, int]] = []
        self.tables: dict[str, list[int]] = {}

    def add(self, name: str, num_tokens: int, max_tokens: int) -> Sequence:
        """Let a request with this many prompt tokens wait."""
        self.add_request(name, [0] * num_tokens, max_tokens=max_tokens)
        return self.scheduler.waiting[-1]

    def compute(self, batch: list[tuple[Sequence, int]]) -> Tensor:
        self.batch = batch
        self.tables = {seq.request_id: list(seq.block_table) for seq in self.running}
        return torch.zeros(len(batch), 1)


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
