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
        if any(seq.request_id == request_id for seq in (*self.scheduler.waiting, *self.running)):
            raise ValueError(f"{request_id}: another request has this id")
        if not prompt_ids or max_tokens < 1 or len(prompt_ids) + max_tokens > self.max_len:
            raise ValueError(f"{request_id}: prompt and max_tokens must be 1 or more, {self.max_len} together at most")
        if not all(token in range(self.model.vocab_size) for token in prompt_ids):
            raise ValueError(f"{request_id}: the tokens of the prompt must be 0 to {self.model.vocab_size - 1}")
        if not 1 <= n <= self.scheduler.max_num_seqs or not temperature >= 0:
            raise ValueError(f"{request_id}: n must be 1 to {self.scheduler.max_num_seqs}, temperature at least 0")
        options = max_tokens, temperature, seed, tuple(stop_ids)
        first, *others = (Sequence(request_id, list(prompt_ids), *options, index) for index in range(n))
        first.forks = others
        self.scheduler.waiting.append(first)

    def has_unfinished(self) -> bool:
        return bool(self.scheduler.waiting or self.running)

    def abort(self, request_id: str) -> None:
        """End what is left of a request, if anything is."""
        for seq in [seq for seq in self.running if seq.request_id == request_id]:
            self.scheduler.finish(seq)
        for seq in [seq for seq in self.scheduler.waiting if seq.request_id == request_id]:
            self.scheduler.waiting.remove(seq)

    def step(self) -> dict[tuple[str, int], list[int]]:
        """Compute one batch. Returns: the new tokens of each (request_id, index) that has some."""
        batch = self.scheduler.schedule()
        return self.update(batch, self.compute(batch)) if batch else {}

    def compute(self, batch: list[tuple[Sequence, int]]) -> Tensor:
        """Logits [B, vocab_size] of the last token that each sequence computes."""
        for source, target in self.blocks.copies:
            self.cache.kv[:, :, target] = self.cache.kv[:, :, source]
        self.blocks.copies.clear()
        step = prepare(batch, self.blocks)
        if self.graphs and self.graphs.fits(step):
            return self.model.logits(self.graphs.run(step))
        attend = partial(self.cache.attend, step, self.attention)
        return self.model.logits(self.model.forward(step.token_ids, step.positions, attend)[step.last])

    def update(self, batch: list[tuple[Sequence, int]], logits: Tensor) -> dict[tuple[str, int], list[int]]:
        """Count the tokens of a batch as computed, and sample the next token of each sequence that has no others left
        to compute. Forks start here: each samples its first token from the logits of the prompt."""
        new: dict[tuple[str, int], list[int]] = {}
        for (seq, num_tokens), row in zip(batch, logits, strict=True):
            seq.num_computed += num_tokens
            self.blocks.store_prefix(seq)
            if seq.num_computed < len(seq.token_ids):
                continue  # its next token is known
            for each in (seq, *self.scheduler.fork(seq)):
                generator = generator_for(each.seed, each.index, len(each.token_ids))
                each.token_ids.append(sample(row, each.temperature, generator))
                new[each.request_id, each.index] = each.token_ids[-1:]
                if each.ended:
                    self.scheduler.finish(each)
        return new

    def capture(self) -> None:
        """Record decode steps of a few sizes, to replay them from now on."""
        sizes = self.scheduler.max_num_seqs, self.blocks.blocks_for(self.max_len)
        self.graphs = DecodeGraphs(self.model, self.cache, *sizes)
