"""HeadWorker: runs a head (heads.py) beside the model of a worker.

    step of the model ─▶ states of its tokens ─▶ K and V of the head      in every step (`read`)
    states of accepted tokens ─▶ head ─▶ token ─▶ head ─▶ token ...       when the engine wants drafts (`draft`)

The head has pages of its own, one layer, in the model's blocks: block tables, prefix cache, copies and swaps are the
model's. Position p of a page has K and V of the state at p and of the token at p + 1. So a step writes up to the last
position but one of each sequence, and the next step goes on from there. A draft continues in blocks of its own, which
begin with a copy of the sequence's last block, and changes nothing else.

Where a sequence begins with a cached prefix, its first token does not belong to what the last position of the prefix
has. Nothing corrects this: it changes drafts, and no output.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanopage.checks.speculation import MOST_ROWS
from nanopage.device import to_device
from nanopage.layers.attention import StepContext
from nanopage.models.decoder import Decoder
from nanopage.speculation.head_files import HeadFiles
from nanopage.state.kv_cache import KVCache
from nanopage.state.sequence_table import SequenceTable, zeros
from nanopage.step import Batch
from nanopage.worker.eager import Output, prepare
from nanopage.worker.model_runner import Way
from nanopage.worker.setup import Setup
from nanopage.worker.ways import Wings
from nanopage.worker.worker import Worker

logger = logging.getLogger("nanopage")


class Known(NamedTuple):
    """A sequence that is to get a draft: its row, how many of its tokens are known, the last one, and the length of the
    draft."""

    row: int
    num_tokens: int
    last: int
    length: int


class HeadWorker:
    """Reads the states of every step, and makes drafts.

    Args: files: of the head. model: as it was loaded.
    """

    def __init__(self, setup: Setup, files: HeadFiles, model: Decoder):
        self.setup, self.model, self.most = setup, model, min(setup.config.max_num_seqs, MOST_ROWS)
        self.head, self.config = files.load(setup.dtype, setup.device), files.config
        self.taps: dict[int, Any] = dict.fromkeys(self.head.taps)  # the inputs of the model's layers in the last step
        speculation = setup.config.speculation
        assert speculation is not None
        self.longest = speculation.num_speculative_tokens
        # By row of the table: the position of the first of the states [n, hidden_size] of its last tokens
        self.states: dict[int, tuple[int, Tensor]] = {}
        self.works = False  # from `start` on, until something fails

    def start(self, worker: Worker) -> None:
        """Make the head's pages, once the worker has its own."""
        capacity, setup, size = worker.capacity, self.setup, self.setup.config.block_size
        self.runner, table = worker.runner, worker.runner.table
        self.per_draft = (size + self.longest - 2) // size + 1  # blocks of a draft
        self.first = capacity.num_blocks  # of these blocks
        made = self.first + self.most * self.per_draft, size, setup.dtype, setup.device, capacity.num_host_blocks
        self.kv_cache = KVCache(self.config, *made)
        self.kv_cache.tensor.zero_()
        self.of_model = worker.kv_cache
        worker.runner.kv_cache = self  # type: ignore[assignment]  # which moves blocks of both
        kind = table.windows.index(None)
        self.table, self.pages = table, part_of(table, table.tokens[:, 1:], table.blocks[:, :, kind : kind + 1])
        # Of drafts: token p is what follows position p, as in `pages`.
        dtype, width = table.tokens.dtype, table.blocks.shape[1] + self.per_draft
        tokens = zeros(self.most, table.tokens.shape[1] + self.longest, dtype, setup.device)
        blocks = zeros(self.most, width, dtype, setup.device)[:, :, None]
        self.drafts = part_of(table, tokens, blocks)
        self.make_attention = replace(setup, part=self.config).make_attention if setup.on_gpu else None
        self.works = True

    def move(self, batch: Batch) -> None:
        """As `KVCache.move`."""
        self.of_model.move(batch)
        if self.works:
            try:
                self.kv_cache.move(batch)
            except Exception as error:
                self.give_up(error)

    def give_up(self, error: Exception) -> None:
        logger.warning(f"the head of speculative_config failed, and makes no more drafts: {error}", exc_info=error)
        self.works = False
        self.states.clear()

    def read(self, batch: Batch) -> None:
        """Write K and V of the head for the tokens of a step that the model has computed."""
        for new in batch.new:
            self.states.pop(new.row, None)
        inputs = [self.taps[tap][: batch.num_tokens].to(self.setup.dtype) for tap in self.head.taps]
        states = self.head.begin(self.model, inputs)
        self.taps.update(dict.fromkeys(self.taps))  # frees their memory
        pairs, parts = Batch(), []
        for row, start, own in zip(batch.rows, batch.starts, states.split(batch.counts), strict=True):
            before = self._state(row, start - 1)
            found = own[:-1] if before is None else torch.cat((before, own[:-1]))
            if len(found):
                pairs.rows.append(row)
                pairs.starts.append(start if before is None else start - 1)
                pairs.counts.append(len(found))
                parts.append(found)
            kept = own if len(own) <= self.longest + 1 else own[-self.longest - 1 :].clone()
            self.states[row] = start + len(own) - len(kept), kept
        for fork in batch.forks:
            if fork.parent in self.states:
                self.states[fork.row] = self.states[fork.parent]
        if parts:
            x, step = self._join(pairs, self.pages, torch.cat(parts))
            layer: Any = self.head.layer
            _, k, v = layer.before(x, *step.rotations[0])
            step.write(layer.self_attn, k, v)

    @torch.inference_mode()
    def draft(self, wanted: Sequence[tuple[int, int, int, int]]) -> list[list[int]]:
        """Make drafts. They are empty where the state before the last known token is not known. Args: as `Known`."""
        asked = [Known(*each) for each in wanted]
        found = {each.row: self._state(each.row, each.num_tokens - 2) for each in asked}
        states_of = {row: state for row, state in found.items() if state is not None}
        ready = sorted((each for each in asked if each.row in states_of), key=lambda each: -each.length)
        if not ready:
            return [[] for _ in asked]
        self._begin(ready)
        states, made = torch.cat([states_of[each.row] for each in ready]), []
        rows, ends, lengths = np.array([(each.row, each.num_tokens, each.length) for each in ready]).T
        for place in range(ready[0].length):
            num = int((lengths > place).sum())
            pairs = Batch(rows=[*range(num)], starts=(ends[:num] - 2 + place).tolist(), counts=[1] * num)
            x, step = self._join(pairs, self.drafts, states[:num])
            states = self.head.end(self.head.layer(x, step))
            tokens = self._sample(self.head.logits(self.model, states), rows[:num], ends[:num] + place)
            self.drafts.record(np.arange(num), ends[:num] - 1 + place, tokens)
            made.append(tokens)
        columns = [tokens.tolist() for tokens in made]
        drafts = {each.row: [column[i] for column in columns[: each.length]] for i, each in enumerate(ready)}
        return [[*takewhile(lambda token: token >= 0, drafts.get(each.row, []))] for each in asked]  # NO_TOKEN ends one

    def _state(self, row: int, position: int) -> Tensor | None:
        """The state at a position of a row, [1, hidden_size]. None if it is not known."""
        first, states = self.states.get(row, (0, None))
        index = position - first
        return None if states is None or not 0 <= index < len(states) else states[index : index + 1]

    def _join(self, pairs: Batch, table: SequenceTable, states: Tensor) -> tuple[Tensor, StepContext]:
        """The input of the head's layer, and where K and V of these positions are."""
        next_ids, step = prepare(pairs, table, self.kv_cache, self.make_attention)
        embeds = (self.head.embed_tokens or self.model.embed_tokens)(next_ids)
        step.rotations = self.head.rotary(step.positions, states.dtype)
        return self.head.join(embeds.to(states.dtype), states), step

    def _begin(self, ready: list[Known]) -> None:
        """Give drafts their blocks: those of their sequences, and from the one on that is written to, blocks of their
        own, with a copy of what the sequence has there."""
        device, count, size = self.drafts.device, len(ready), self.setup.config.block_size
        rows, ends, last = np.array([(known.row, known.num_tokens, known.last) for known in ready]).T
        each, row, block = to_device(torch.from_numpy(np.stack([np.arange(count), rows, (ends - 2) // size])), device)
        tables, places = self.pages.blocks[row, :, 0], torch.arange(self.per_draft, device=device)
        own = self.first + self.per_draft * each[:, None] + places
        self.drafts.blocks[:count, : tables.shape[1], 0] = tables
        self.drafts.blocks[each[:, None], block[:, None] + places, 0] = own.to(tables.dtype)
        cache = self.kv_cache.tensor
        cache.index_copy_(2, own[:, 0], cache.index_select(2, tables[each, block].long()))
        self.drafts.record(np.arange(count), ends - 2, to_device(torch.from_numpy(last), device))

    def _sample(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> Tensor:
        """Sample as the model does, with the settings and the noise of each row."""
        sampler = self.runner.sampler
        tokens = sampler.sample(sampler.change(logits, rows, positions), rows, positions)
        self.table.record(rows, positions, tokens)  # for penalties of the next one; steps overwrite them
        return tokens


class Watched:
    """A way to run a step whose states a HeadWorker reads.

    Args: wrap: wraps a way in what else needs it (see `Wings`). way: runs the step.
    """

    def __init__(self, heads: HeadWorker, wrap: Callable[[Way], Way], way: Any):
        self.heads, self.way = heads, wrap(way)

    def fits(self, batch: Batch) -> bool:
        return self.way.fits(batch)

    def run(self, batch: Batch) -> Output:
        output = self.way.run(batch)
        if self.heads.works:
            try:
                self.heads.read(batch)
            except Exception as error:
                self.heads.give_up(error)
        return output


def part_of(table: SequenceTable, tokens: Tensor, blocks: Tensor) -> SequenceTable:
    """The same table with these tokens and blocks, of layers of one kind, without items and adapters."""
    part = copy.copy(table)
    part.windows, part.tokens, part.blocks, part.items, part.adapter_slots = (None,), tokens, blocks, None, None
    part.taps = {}
    return part


def attach_head(setup: Setup, files: HeadFiles, model: Decoder, wings: Wings) -> None:
    """Attach a head to a worker that is about to be made. Raises: as `HeadFiles.load`."""
    wings.heads = HeadWorker(setup, files, model)
    wings.wrap = partial(Watched, wings.heads, wings.wrap)
