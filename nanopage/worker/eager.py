"""The eager way to run a step: Python calls the model's modules, without a captured graph. It can run any batch. On a
GPU the model may be compiled (jit.py).

Each way to run a step has two methods: `fits(batch)` says whether the way can run a batch, and `run(batch)` runs it.
ModelRunner takes the first way that fits. The other ways are `aot.py`, for a CPU, and `cuda_graphs.py` and
`piecewise_graphs.py`, for a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanopage.device import to_device
from nanopage.kernels.pages import pad_tables
from nanopage.kernels.reference import ReferenceAttention
from nanopage.layers.attention import Attention
from nanopage.models.decoder import Decoder
from nanopage.step import Batch
from nanopage.worker.kv_cache import KVCache
from nanopage.worker.sequence_table import SequenceTable


@dataclass(slots=True)
class Inputs:
    """A batch of T tokens of B sequences as tensors. All are on the device except the lengths.

    input_ids, positions  int64 [T]
    slot_mapping          int64 [T]              block * block_size + offset of each token
    block_tables          [B, max_blocks]        physical block of each logical block; on a CPU, padded by pad_tables
    query_lens            int64 [B], on the CPU  tokens of each sequence in this step
    seq_lens              int64 [B], on the CPU  tokens of each sequence, including this step's
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    query_lens: Tensor
    seq_lens: Tensor


@dataclass(slots=True)
class Output:
    """What the model computes for a batch.

    logits  [S, vocab_size] of the S tokens of `sampled_from`; None if there are none
    hidden  [T, hidden_size] of all tokens, if a sequence asked for log-probabilities of its prompt, or in a pipeline
            stage that is not the last
    tokens  int64 [S]: tokens that the way has already sampled and written to the sequence table (CUDA graphs). If a row
            has a mask, constraints or penalties, which the way does not apply, they are ignored and `logits` sampled
    """

    logits: Tensor | None
    hidden: Tensor | None = None
    tokens: Tensor | None = None


class Eager:
    """Runs any batch with the model's own modules.

    Args: make_attention: makes the attention of a step from its inputs. None: plain attention.
    """

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        table: SequenceTable,
        make_attention: Callable[[Inputs], Attention] | None = None,
    ):
        self.model, self.kv_cache, self.table = model, kv_cache, table
        self.make_attention = make_attention or reference_attention

    def fits(self, batch: Batch) -> bool:
        return True

    def run(self, batch: Batch) -> Output:
        inputs = prepare(batch, self.table)
        attention = self.make_attention(inputs)
        return run_model(self.model, batch, inputs, attention, self.kv_cache, self.table, head_of(self.model))


def prepare(batch: Batch, table: SequenceTable) -> Inputs:
    """Look up a batch's tokens and blocks in the sequence table."""
    rows, starts, counts = (np.array(values) for values in (batch.rows, batch.starts, batch.counts))
    seq_lens, block_size = starts + counts, table.block_size
    num_blocks = -(-seq_lens // block_size)
    sequence = np.repeat(np.arange(len(rows)), counts)  # the sequence of each token
    positions = np.arange(len(sequence)) + np.repeat(starts - (counts.cumsum() - counts), counts)
    lens = torch.from_numpy(counts), torch.from_numpy(seq_lens)
    if table.device.type == "cpu":
        # With NumPy: torch's operators on small tensors take several times as long.
        blocks = pad_tables(table.block_tables.numpy()[rows, : num_blocks.max()], num_blocks)
        slots = blocks[sequence, positions // block_size] * block_size + positions % block_size
        input_ids = table.tokens.numpy()[rows[sequence], positions]
        made = [torch.from_numpy(array) for array in (input_ids, positions, slots, blocks)]
        return Inputs(made[0], made[1], made[2], made[3], *lens)
    token_rows, sequence, positions = to_device(
        torch.from_numpy(np.stack([rows[sequence], sequence, positions])), table.device
    )
    each_row = to_device(torch.from_numpy(rows), table.device)
    # The kernels of a GPU read nothing behind a sequence's last block.
    block_tables = table.block_tables[:, : int(num_blocks.max())].index_select(0, each_row)
    slots = block_tables[sequence, positions // block_size].long() * block_size + positions % block_size
    input_ids = table.tokens[token_rows, positions].long()
    return Inputs(input_ids, positions, slots, block_tables, *lens)


def reference_attention(inputs: Inputs) -> ReferenceAttention:
    """Plain attention (kernels/reference.py)."""
    return ReferenceAttention(inputs.slot_mapping, inputs.block_tables, inputs.query_lens, inputs.seq_lens)


def head_of(model: Decoder) -> Callable[[Tensor], Tensor] | None:
    """What computes logits of hidden states; None in a pipeline stage that is not the last."""
    return None if model.lm_head is None else model.logits


def wants_prompt_logprobs(batch: Batch, table: SequenceTable) -> bool:
    """Whether a sequence of the batch asked for log-probabilities of its prompt."""
    return any(table.sampling.settings[row].prompt_logprobs is not None for row in batch.rows)


def run_model(
    model: Callable[..., Tensor],
    batch: Batch,
    inputs: Inputs,
    attention: Attention,
    kv_cache: KVCache,
    table: SequenceTable,
    head: Callable[[Tensor], Tensor] | None,
) -> Output:
    """Run the model on a batch, and its head on the rows to be sampled.

    Args:
        model: computes hidden states of input_ids, positions, kv_cache, attention and rows (see `Decoder.forward`).
        head: computes logits of hidden states (see `Decoder.logits`). None: the output has all hidden states instead.
    """
    if head is None:
        return Output(None, model(inputs.input_ids, inputs.positions, kv_cache.tensor, attention, None))
    scored = wants_prompt_logprobs(batch, table)
    sampled = np.array(batch.sampled_from, dtype=np.int64)
    used = np.unique(sampled)  # completions that fork from one prompt share its logits
    everything = len(used) == len(inputs.input_ids)
    # At least one row: oneDNN cannot multiply matrices without rows.
    rows = None if scored or everything else to_device(used.tolist() or [0], table.device)
    hidden = model(inputs.input_ids, inputs.positions, kv_cache.tensor, attention, rows)
    if not len(used):
        return Output(None, hidden if scored else None)
    chosen = hidden if not scored or everything else hidden[to_device(used.tolist(), table.device)]
    logits = head(chosen)
    if len(used) < len(sampled):
        logits = logits[to_device(np.searchsorted(used, sampled).tolist(), table.device)]
    return Output(logits, hidden if scored else None)
