"""The engine: requests come and go, and each step computes a batch of their tokens (milestones 6 to 9)."""

from functools import partial
from pathlib import Path

from torch import Tensor

from .attention import paged_attention
from .blocks import BlockManager, Sequence
from .cache import PagedCache, prepare
from .graphs import DecodeGraphs
from .model import Model
from .sampling import generator_for, sample
from .scheduler import Scheduler


class Engine:
    """Runs requests to completion, many at a time.

    Args: model_dir: see `Model`. num_blocks, block_size: size of the KV cache, which must hold the longest request
        alone. max_num_seqs, max_num_batched_tokens: see `Scheduler`.
    """

    def __init__(
        self, model_dir: str | Path, *, num_blocks: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int
    ):
        if min(num_blocks, block_size, max_num_seqs, max_num_batched_tokens) < 1:
            raise ValueError("num_blocks, block_size, max_num_seqs and max_num_batched_tokens must be at least 1")
        self.model = Model(model_dir)
        self.cache = PagedCache(self.model, num_blocks, block_size)
        self.blocks = BlockManager(num_blocks, block_size)
        self.scheduler = Scheduler(self.blocks, max_num_seqs, max_num_batched_tokens)
        self.running: list[Sequence] = self.scheduler.running
        self.max_len = min(num_blocks * block_size, self.model.max_len)
        self.attention = paged_attention  # or a function with its arguments
        self.graphs: DecodeGraphs | None = None  # see `capture`

    def add_request(
        self,
        request_id: str,
        prompt_ids: list[int],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        n: int = 1,
        stop_ids: tuple[int, ...] = (),
    ) -> None:
        """Queue a request. Its n answers share the blocks of the prompt, and differ in the noise of
        their tokens. An answer ends after `max_tokens` tokens, or with a token of `stop_ids`, which is its last.

        Raises: ValueError if a value is wrong, if prompt and answer could exceed `max_len`, or if the id is in use.
        """
        raise NotImplementedError("milestone 6")

    def has_unfinished(self) -> bool:
        raise NotImplementedError("milestone 6")

    def abort(self, request_id: str) -> None:
        """End what is left of a request, if anything is."""
        raise NotImplementedError("milestone 6")

    def step(self) -> dict[tuple[str, int], list[int]]:
        """Compute one batch. Returns: the new tokens of each (request_id, index) that has some."""
        raise NotImplementedError("milestone 6")

    def compute(self, batch: list[tuple[Sequence, int]]) -> Tensor:
        """Logits [B, vocab_size] of the last token that each sequence computes."""
        raise NotImplementedError("milestone 6")

    def update(self, batch: list[tuple[Sequence, int]], logits: Tensor) -> dict[tuple[str, int], list[int]]:
        """Count the tokens of a batch as computed, and sample the next token of each sequence that has no others left
        to compute. Forks start here: each samples its first token from the logits of the prompt."""
        raise NotImplementedError("milestone 6")

    def capture(self) -> None:
        """Record decode steps of a few sizes, to replay them from now on."""
        raise NotImplementedError("milestone 11")
