"""StatePages: which blocks of the KV cache have the states of a step's sequences (see recurrent/states.py)."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanopage.device import to_device
from nanopage.state.layer_kinds import STATE
from nanopage.state.sequence_table import SequenceTable
from nanopage.step import Batch


@dataclass(slots=True)
class StatePages:
    """Where the states of B sequences are, in the layers of one kind.

    sources   int64 [B]  the block with the state of each sequence before the step; -1: it begins, without one
    targets   int64 [B]  the block for its new state
    starts    int64 [B], on the CPU  the tokens of each sequence before the step
    counts    int64 [B], on the CPU  the tokens of each sequence
    kept      int64 [B], on the CPU  how many of them the new state is of: all but those of a draft
    encoded   int64 [B], on the CPU  the positions of an encoder that each sequence attends to. None: without items
    divided   the sequences by their counts (recurrent/sequences.py), once it is known
    """

    sources: Tensor
    targets: Tensor
    starts: np.ndarray
    counts: np.ndarray
    kept: np.ndarray
    encoded: np.ndarray | None = None
    divided: Any = None


def state_pages(batch: Batch, table: SequenceTable) -> dict[int, StatePages]:
    """Look up the states of a batch in the block tables, for each kind of layers with a state."""
    kinds = [kind for kind, window in enumerate(table.windows) if window == STATE]
    if not kinds:
        return {}
    rows, starts, counts = (np.array(values) for values in (batch.rows, batch.starts, batch.counts))
    sampled = np.array(sorted(set(batch.sampled_from)), dtype=np.int64)
    index = np.searchsorted(counts.cumsum(), sampled, side="right")  # the row of each token that is sampled from
    kept = counts - np.maximum(np.bincount(index, minlength=len(rows)) - 1, 0)  # such tokens but the first are a draft
    before, after = (np.maximum(0, ends - 1) // table.block_size for ends in (starts, starts + kept))
    places = to_device(torch.from_numpy(np.stack([rows, before, after])), table.device)
    begins = to_device(torch.from_numpy(starts == 0), table.device)
    blocks = table.blocks[places[0], places[1:]].long().movedim(2, 0).contiguous()  # [kinds, 2, B], for compiled code
    lengths = starts, counts, kept, None if table.items is None else table.items.encoded_of(batch.rows)
    return {kind: StatePages(blocks[kind, 0].masked_fill(begins, -1), blocks[kind, 1], *lengths) for kind in kinds}
