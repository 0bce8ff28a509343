"""SequenceTable: what a worker knows of each running sequence, in tensors with one row for each sequence.

    tokens         [rows, max_model_len + 1]   all tokens of the sequence; sampled tokens are added on the device
    block_tables   [rows, max_blocks * kinds]  for each logical block, the physical block of each kind of layers (see
                                               layer_kinds.py; in most models there is one kind)
    sampling                                   the sampling settings (see state/sampling_table.py)

The tables are on the device. Each Batch says what has changed, and `update` writes it to the tables. A step reads its
input tokens from `tokens`, so the next step can use a sampled token before the host has seen it.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanopage.device import to_device
from nanopage.state.pages import pad_tables
from nanopage.state.sampling_table import SamplingTable
from nanopage.step import Batch, Fork


class SequenceTable:
    """Holds the tokens, block tables and sampling settings of all running sequences.

    Args:
        num_rows: the most sequences that the table can hold.
        has_adapters: keep the adapter slot of each sequence, too: `adapter_slots` [rows], -1 for none.
        windows: of each kind of layers.
    """

    def __init__(
        self,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        has_adapters: bool = False,
        windows: Sequence[int | None] = (None,),
    ):
        self.block_size, self.device, self.windows = block_size, device, tuple(windows)
        # int32 for the kernels of a GPU; int64 on a CPU, because torch's indexing is faster with it.
        dtype = torch.int32 if device.type == "cuda" else torch.int64
        self.tokens = zeros(num_rows, max_model_len + 1, dtype, device)
        shape = num_rows, -(-max_model_len // block_size), len(windows)
        self.block_tables = zeros(num_rows, shape[1] * shape[2], dtype, device)
        self.blocks = self.block_tables.view(shape)  # the same memory: [rows, max_blocks, kinds]
        self.num_prompt_tokens = np.zeros(num_rows, dtype=np.int64)
        self.sampling = SamplingTable(num_rows, vocab_size, device)
        self.items: Any = None  # the ItemRows (items/rows.py) of a worker whose prompts may have items
        self.taps: dict[int, Any] = {}  # `StepContext.taps` of every step, for a wing that wants some
        self.adapter_slots: Tensor | None = None
        if has_adapters:
            self.adapter_slots = torch.full((num_rows,), -1, dtype=torch.int64, device=device)

    @property
    def num_bytes(self) -> int:
        """The size of `tokens` and `block_tables`."""
        return self.tokens.nbytes + self.block_tables.nbytes

    def update(self, batch: Batch) -> None:
        """Apply what has changed since the previous batch."""
        write_entries(self.tokens, [(new.row, 0, new.token_ids) for new in batch.new])
        for new in batch.new:
            self.num_prompt_tokens[new.row] = new.num_prompt_tokens
        self.sampling.add(batch.new)
        if self.items is not None:
            self.items.update(batch)
        if self.adapter_slots is not None:
            write_entries(self.adapter_slots[:, None], [(new.row, 0, [new.adapter_slot]) for new in batch.new])
        if batch.forks:
            self._fork(batch.forks)
        write_entries(self.block_tables, [(update.row, update.first, update.blocks) for update in batch.blocks])
        if batch.tokens:
            rows, positions, token_ids = np.array(batch.tokens, dtype=np.int64).T
            self.record(rows, positions, to_device(torch.from_numpy(token_ids), self.device))

    def record(self, rows: Tensor | np.ndarray, positions: Tensor | np.ndarray, tokens: Tensor) -> None:
        """Write tokens to the table, where the next step reads them.

        NO_TOKEN is written as token 0: its sequence ends, but may already be part of the next batch.

        Args: rows, positions: of each token, [B]; tokens: int64 [B], on the device.
        """
        if self.device.type == "cpu":  # with NumPy: torch takes several times as long for a few tokens
            self.tokens.numpy()[np.asarray(rows), np.asarray(positions)] = tokens.numpy().clip(min=0)
            return
        places = rows * self.tokens.shape[1] + positions
        index = places if isinstance(places, Tensor) else to_device(torch.from_numpy(places), self.device)
        self.tokens.view(-1).index_copy_(0, index, tokens.clamp(min=0).to(self.tokens.dtype))

    def tables_of(
        self, window: int | None, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray
    ) -> tuple[Tensor, np.ndarray]:
        """What B sequences attend to. Their queries are their last `counts` tokens, from `starts` on.

        Returns: block tables [kinds, B, max_blocks], each from the first block on that the window reaches, and the
            number of tokens of each sequence from the start of that block on, int64 [B].
        """
        size, seq_lens, on_cpu = self.block_size, starts + counts, self.device.type == "cpu"
        num_blocks = -(-seq_lens // size)
        first = np.zeros_like(starts) if window is None else np.maximum(0, starts + 1 - window) // size
        if not first.any():
            if on_cpu:
                blocks = torch.from_numpy(pad_tables(self.blocks.numpy()[rows, : num_blocks.max()], num_blocks))
            else:  # the kernels of a GPU read nothing behind a sequence's last block
                each_row = to_device(torch.from_numpy(rows), self.device)
                blocks = self.blocks[:, : int(num_blocks.max())].index_select(0, each_row)
            return blocks.permute(2, 0, 1).contiguous(), seq_lens
        places = np.arange((num_blocks - first).max())
        places = first[:, None] + np.where(places < (num_blocks - first)[:, None], places, 0)
        if on_cpu:
            blocks = torch.from_numpy(self.blocks.numpy()[rows[:, None], places])
        else:
            each_row, columns = (to_device(torch.from_numpy(array), self.device) for array in (rows, places))
            blocks = self.blocks[each_row[:, None], columns]
        return blocks.permute(2, 0, 1).contiguous(), seq_lens - first * size

    def adapters_of(self, rows: Tensor) -> Tensor | None:
        """The adapter slot of each token, -1 for none: int64 [T]. None if adapters are not enabled. On a CPU, None also
        if no token has one; on a GPU, checking that would mean synchronizing with it.

        Args: rows: of each token, int64 [T], on the device.
        """
        if self.adapter_slots is None:
            return None
        if rows.is_cuda:
            return self.adapter_slots[rows]
        slots = self.adapter_slots.numpy()[rows.numpy()]  # torch takes several times as long for a few tokens
        return torch.from_numpy(slots) if (slots >= 0).any() else None

    def _fork(self, forks: list[Fork]) -> None:
        parents, rows = [fork.parent for fork in forks], [fork.row for fork in forks]
        source, target = to_device(parents, self.device), to_device(rows, self.device)
        num_tokens = max(fork.num_tokens for fork in forks)
        tokens = self.tokens[:, :num_tokens]
        tokens.index_copy_(0, target, tokens.index_select(0, source))
        self.num_prompt_tokens[rows] = self.num_prompt_tokens[parents]
        self.sampling.fork(forks)
        if self.adapter_slots is not None:
            self.adapter_slots.index_copy_(0, target, self.adapter_slots.index_select(0, source))


def zeros(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":  # np.zeros takes memory only where it is written to
        return torch.from_numpy(np.zeros((num_rows, width), dtype=np.int64 if dtype == torch.int64 else np.int32))
    return torch.zeros(num_rows, width, dtype=dtype, device=device)


def write_entries(table: Tensor, entries: list[tuple[int, int, list[int]]]) -> None:
    """table[row, first : first + len(values)] = values, for each (row, first, values)."""
    if not entries:
        return
    width = table.shape[1]
    places = [np.arange(row * width + first, row * width + first + len(values)) for row, first, values in entries]
    index = to_device(torch.from_numpy(np.concatenate(places)), table.device)
    values = to_device(list(chain.from_iterable(values for _, _, values in entries)), table.device, table.dtype)
    table.view(-1).index_copy_(0, index, values)
