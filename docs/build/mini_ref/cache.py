"""The KV cache in blocks, and the tensors of a step (milestone 5)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .blocks import BlockManager, Sequence
from .model import Model


@dataclass
class Step:
    """The tokens that a step computes: T tokens of B sequences, those of the first sequence first. All are int64."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T], the place of each token in its sequence
    slot_mapping: Tensor  # [T], where its K and V go: block * block_size + offset
    rows: Tensor  # [T], its sequence, from 0 to B - 1
    block_tables: Tensor  # [B, max_blocks], those of the sequences; -1 past the end of a shorter one
    last: Tensor  # [B], the last token of each sequence, from 0 to T - 1


def prepare(batch: list[tuple[Sequence, int]], blocks: BlockManager) -> Step:
    """The tensors of a step that computes the next tokens of each sequence, as many as the batch says. Only reads."""
    token_ids, positions, slots, rows, last = [], [], [], [], []
    for row, (seq, num_tokens) in enumerate(batch):
        start, end = seq.num_computed, seq.num_computed + num_tokens
        token_ids += seq.token_ids[start:end]
        positions += list(range(start, end))
        slots += blocks.slots(seq, start, end)
        rows += [row] * num_tokens
        last.append(len(token_ids) - 1)
    width = max(len(seq.block_table) for seq, _ in batch)
    tables = [seq.block_table + [-1] * (width - len(seq.block_table)) for seq, _ in batch]
    return Step(*map(torch.tensor, (token_ids, positions, slots, rows, tables, last)))


class PagedCache:
    """K and V of all sequences: `kv` is [num_layers, 2, num_blocks + 1, block_size, num_kv_heads, head_dim]. The last
    block is spare: block -1 of tables, with slot -1 at its end. No sequence has it."""

    def __init__(self, model: Model, num_blocks: int, block_size: int):
        shape = model.num_layers, 2, num_blocks + 1, block_size, model.num_kv_heads, model.head_dim
        self.kv = torch.zeros(shape, dtype=model.dtype)

    def attend(self, step: Step, attention: Callable, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the K and V of a step's tokens to their slots in a layer. Then let the tokens attend by `attention`:
        `paged_attention`, or a function with its arguments. Otherwise as `model.Attend`."""
        kv = self.kv[layer]
        kv.flatten(1, 2)[:, step.slot_mapping] = torch.stack((k, v))  # flatten copies nothing here
        return attention(q, *kv, step.block_tables, step.rows, step.positions)
