"""HeadWorker: runs a head (heads.py) beside the model of a worker.

    step of the model ─▶ states of its tokens ─▶ K and V of the head      in every step (`read`)
    states of accepted tokens ─▶ head ─▶ token ─▶ head ─▶ token ...       when the engine wants drafts (`draft`)

The head has pages of its own, one layer, in the model's blocks: block tables, prefix cache, copies and swaps are the
model's. Position p of a page has K and V of the state at p and of the token at p + 1. So a step writes up to the last
position but one of each sequence, and the next step goes on from there. A draft continues in blocks of its own, which
begin with a copy of the sequence's last block, and changes nothing else.

Where a sequence begins with a cached prefix, as a fork, or comes back from the host, the state before its first token
is not known. Nothing corrects what the pages have there: it changes drafts, and no output.
"""

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanopage.checks.speculation import MOST_ROWS
from nanopage.device import to_device
from nanopage.layers.attention import StepContext
from nanopage.models.decoder import Decoder
from nanopage.state.kv_cache import KVCache
from nanopage.state.sequence_table import SequenceTable, zeros
from nanopage.step import Batch
from nanopage.worker.eager import Output, prepare
from nanopage.worker.model_runner import Way
from nanopage.worker.setup import Setup
from nanopage.worker.worker import Worker

logger = logging.getLogger("nanopage")


class HeadWorker:
    """Reads the states of every step, and makes drafts.

    Args: head: with its weights. model: as it was loaded.
    """

    def __init__(self, setup: Setup, head: Any, model: Decoder):
        self.setup, self.head, self.model = setup, head, model
        assert setup.config.speculation is not None
        self.length = setup.config.speculation.num_speculative_tokens
        self.taps: dict[int, Any] = dict.fromkeys(head.taps)  # the inputs of the model's layers in the last step
        # By row of the table: the position of the first of the states [n, hidden_size] of its last tokens
        self.states: dict[int, tuple[int, Tensor]] = {}
        self.works = False  # from `start` on, until something fails

    def start(self, worker: Worker) -> None:
        """Make the head's pages, once the worker has its own."""
        capacity, setup, size, table = worker.capacity, self.setup, worker.kv_cache.block_size, worker.runner.table
        self.per_draft = (size + self.length - 2) // size + 1  # blocks of a draft
        self.first = capacity.num_blocks  # of these blocks
        num_blocks = self.first + self.per_draft * min(setup.config.max_num_seqs, MOST_ROWS)
        self.kv_cache = KVCache(self.head.config, num_blocks, size, setup.dtype, setup.device, capacity.num_host_blocks)
        self.kv_cache.tensor.zero_()  # attention reads positions that nothing was written to, as above
        self.runner, self.of_model = worker.runner, worker.kv_cache
        worker.runner.kv_cache = self  # type: ignore[assignment]  # which moves blocks of both
        kind, (num_rows, width, _) = table.windows.index(None), table.blocks.shape
        self.pages = part_of(table, table.blocks[:, :, kind : kind + 1])
        blocks = zeros(num_rows, width + self.per_draft, table.blocks.dtype, setup.device)
        self.drafts = part_of(table, blocks[:, :, None])
        self.make_attention = replace(setup, part=self.head.config).make_attention if setup.on_gpu else None
        self.works = True

    def attempt(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method, unless one has failed. After a failure there are no more drafts. Returns: None then."""
        try:
            return method(*arguments) if self.works else None
        except Exception as error:
            logger.warning(f"the head of speculative_config failed, and makes no more drafts: {error}", exc_info=error)
            self.works = False
            self.states.clear()

    def move(self, batch: Batch) -> None:
        """As `KVCache.move`."""
        self.of_model.move(batch)
        self.attempt(self.kv_cache.move, batch)

    def read(self, batch: Batch) -> None:
        """Write K and V of the head for the tokens of a step that the model has computed."""
        for row in [new.row for new in batch.new] + [fork.row for fork in batch.forks]:
            self.states.pop(row, None)
        inputs = [self.taps[tap][: batch.num_tokens].to(self.setup.dtype) for tap in self.head.taps]
        states = self.head.begin(self.model, inputs)
        self.taps.update(dict.fromkeys(self.taps))  # frees their memory
        found = []
        for row, start, own in zip(batch.rows, batch.starts, states.split(batch.counts), strict=True):
            if (before := self.state(row, start - 1)) is not None:
                start, own = start - 1, torch.cat((before, own))
            if len(own) > 1:
                found.append((row, start, own[:-1]))
            kept = own[-self.length - 1 :].clone()  # a view would keep the states of the whole step
            self.states[row] = start + len(own) - len(kept), kept
        if found:
            rows, starts, parts = zip(*found, strict=True)
            pairs = Batch(rows=[*rows], starts=[*starts], counts=[*map(len, parts)])
            x, step = self._join(pairs, self.pages, torch.cat(parts))
            layer = self.head.layer
            _, k, v = layer.before(x, *step.rotations[0])
            step.write(layer.self_attn, k, v)

    def state(self, row: int, position: int) -> Any:
        """The state at a position of a row, [1, hidden_size]. None if it is not known."""
        first, states = self.states.get(row, (0, ()))
        index = position - first
        return states[index : index + 1] if 0 <= index < len(states) else None

    @torch.inference_mode()
    def draft(self, wanted: list[tuple[int, int, int]]) -> list[list[int]]:
        """Make drafts. Args: wanted: of each, the row, how many of its tokens are known, and the length, the longest
        first. The state before the last known token is known."""
        rows, ends, lengths = np.array(wanted).T
        states, made = torch.cat([self.state(row, num_tokens - 2) for row, num_tokens, _ in wanted]), []
        self._begin(rows, (ends - 2) // self.kv_cache.block_size)
        for place in range(lengths[0]):
            num = int((lengths > place).sum())
            rows, places = rows[:num], ends[:num] + place  # of the tokens to be sampled
            pairs = Batch(rows=rows.tolist(), starts=(places - 2).tolist(), counts=[1] * num)
            x, step = self._join(pairs, self.drafts, states[:num])
            states, logits = self.head.end(self.model, self.head.layer(x, step))
            made.append(self.runner.sampler(logits, rows, places))  # and writes them to the table; steps overwrite them
        columns = [samples.result()[0] for samples in made]
        drafts = [[column[i] for column in columns[:length]] for i, length in enumerate(lengths)]
        return [[*takewhile(lambda token: token >= 0, draft)] for draft in drafts]  # NO_TOKEN ends one

    def _begin(self, rows: np.ndarray, blocks: np.ndarray) -> None:
        """Give drafts their blocks: those of their sequences, and from these on, which are written to, blocks of their
        own, with a copy of what the sequence has there."""
        both = np.stack([np.arange(len(rows)), rows, blocks])
        each, row, block = to_device(torch.from_numpy(both), self.setup.device)
        places = torch.arange(self.per_draft, device=self.setup.device)
        own, shared = self.first + self.per_draft * each[:, None] + places, self.pages.blocks[row, :, 0]
        self.drafts.blocks[row, : shared.shape[1], 0] = shared
        self.drafts.blocks[row[:, None], block[:, None] + places, 0] = own.to(shared.dtype)
        cache = self.kv_cache.tensor
        cache.index_copy_(2, own[:, 0], cache.index_select(2, shared[each, block].long()))

    def _join(self, pairs: Batch, table: SequenceTable, states: Tensor) -> tuple[Tensor, StepContext]:
        """The input of the head's layer, and where K and V of these positions are."""
        next_ids, step = prepare(pairs, table, self.kv_cache, self.make_attention)
        embeds = (self.head.embed_tokens or self.model.embed_tokens)(next_ids)
        step.rotations = self.head.rotary(step.positions, states.dtype)
        return self.head.join(embeds.to(states.dtype), states), step


class Watched:
    """A way to run a step whose states a HeadWorker reads.

    Args: wrap: wraps a way in what else needs it (see `Wings`). way: runs the step.
    """

    def __init__(self, heads: HeadWorker, wrap: Callable[[Way], Way], way: Any):
        self.heads, self.way = heads, wrap(way)
        self.fits = self.way.fits

    def run(self, batch: Batch) -> Output:
        output = self.way.run(batch)
        self.heads.attempt(self.heads.read, batch)
        return output


def part_of(table: SequenceTable, blocks: Tensor) -> SequenceTable:
    """The same table with these blocks, of layers of one kind, without items and adapters. The token at p is the one
    that follows position p."""
    part = copy.copy(table)
    vars(part).update(windows=(None,), tokens=table.tokens[:, 1:], blocks=blocks)
    vars(part).update(items=None, adapter_slots=None, taps={})
    return part
