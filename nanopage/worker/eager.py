"""The eager way to run a step: Python calls the model's modules, without a captured graph. It can run any batch. On a
GPU the model may be compiled (jit.py).

Each way to run a step has two methods: `fits(batch)` says whether the way can run a batch, and `run(batch)` runs it.
ways.py lists the others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanopage.device import to_device
from nanopage.kernels.grouped_attention import GroupedAttention
from nanopage.layers.attention import Attention, StepContext
from nanopage.models.decoder import Decoder
from nanopage.state.kv_cache import KVCache
from nanopage.state.layer_kinds import STATE
from nanopage.state.sequence_table import SequenceTable
from nanopage.step import Batch
from nanopage.worker.prompt_outputs import wants_prompt_logprobs
from nanopage.worker.state_pages import state_pages


@dataclass(slots=True)
class Output:
    """What the model computes for a batch.

    logits  [S, vocab_size] of the S tokens of `sampled_from`; None if there are none
    hidden  [T, hidden_size] of all tokens, if prompt_outputs.py needs them, and in pipeline stages before the last
    tokens  int64 [S]: tokens that a CUDA graph has already sampled and written to the sequence table. A graph applies
            no masks, constraints or penalties: if a row has one, the runner ignores `tokens` and samples from `logits`
    """

    logits: Tensor | None
    hidden: Tensor | None = None
    tokens: Tensor | None = None


class Eager:
    """Runs any batch with the model's own modules.

    Args:
        make_attention: makes the attention of a step from the plain one, for the layers of one kind. None: it stays
            plain.
    """

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        table: SequenceTable,
        make_attention: Callable[[GroupedAttention], Attention] | None = None,
    ):
        self.model, self.kv_cache, self.table, self.make_attention = model, kv_cache, table, make_attention

    def fits(self, batch: Batch) -> bool:
        return True

    def run(self, batch: Batch) -> Output:
        input_ids, step = prepare(batch, self.table, self.kv_cache, self.make_attention)
        return run_model(self.model, batch, input_ids, step, self.table, head_of(self.model))


def prepare(
    batch: Batch,
    table: SequenceTable,
    kv_cache: KVCache,
    make_attention: Callable[[GroupedAttention], Attention] | None = None,
) -> tuple[Tensor, StepContext]:
    """Look up a batch's tokens and blocks in the sequence table: input_ids, int64 [T], and what the layers need.

    In the example of `step.Batch`, with blocks of 16 tokens and the block tables [4, 9] and [2], `positions` are
    [20, 0, 1, 2, 3, 4, 5], `slot_mapping` [148, 32, 33, 34, 35, 36, 37] (148 = 9 * 16 + 4), `query_lens` [1, 6] and
    `seq_lens` [21, 6].

    Args: make_attention: as in Eager.
    """
    rows, starts, counts = (np.array(values) for values in (batch.rows, batch.starts, batch.counts))
    block_size = table.block_size
    sequence = np.repeat(np.arange(len(rows)), counts)  # the sequence of each token
    positions = np.arange(len(sequence)) + np.repeat(starts - (counts.cumsum() - counts), counts)
    of_tokens = rows[sequence]
    if table.device.type == "cpu":
        # With NumPy: torch's operators on small tensors take several times as long.
        blocks = np.ascontiguousarray(table.blocks.numpy()[of_tokens, positions // block_size].T)
        slots = torch.from_numpy(blocks * block_size + positions % block_size)  # [kinds of layers, T]
        input_ids = torch.from_numpy(table.tokens.numpy()[of_tokens, positions])
        token_rows, places = torch.from_numpy(of_tokens), torch.from_numpy(positions)
    else:
        token_rows, places = to_device(torch.from_numpy(np.stack([of_tokens, positions])), table.device)
        blocks_there = table.blocks[token_rows, places // block_size].T.contiguous().long()
        slots = blocks_there * block_size + places % block_size
        input_ids = table.tokens[token_rows, places].long()
    tables = {window: table.tables_of(window, rows, starts, counts) for window in set(table.windows) - {STATE}}
    states = state_pages(batch, table)
    attentions: list[Any] = []
    for kind, window in enumerate(table.windows):
        if window == STATE:
            attentions.append(states[kind])
            continue
        block_tables, seq_lens = tables[window]
        lengths = torch.from_numpy(counts), torch.from_numpy(seq_lens)
        plain = GroupedAttention(slots[kind], block_tables[kind], *lengths)
        attentions.append(plain if make_attention is None else make_attention(plain))
    embeds = None
    if (items := table.items) is not None:
        embeds, places = items.embeds_of(batch), items.positions_of(batch, places)
    layers = kv_cache.kinds.of_layers, kv_cache.layers
    adapters = table.adapters_of(token_rows)
    return input_ids, StepContext(places, attentions, *layers, adapters=adapters, embeds=embeds, taps=table.taps)


def head_of(model: Decoder) -> Callable[[Tensor], Tensor] | None:
    """What computes logits of hidden states; None in a pipeline stage that is not the last."""
    return None if model.lm_head is None else model.logits


def run_model(
    model: Callable[[Tensor, StepContext], Tensor],
    batch: Batch,
    input_ids: Tensor,
    step: StepContext,
    table: SequenceTable,
    head: Callable[[Tensor], Tensor] | None,
) -> Output:
    """Run the model on a batch, and its head on the tokens to be sampled from.

    Args:
        model: computes hidden states as `Decoder.forward` does.
        head: computes logits of hidden states (see `Decoder.logits`). None: the output has all hidden states instead.
    """
    used, device = sorted(set(batch.sampled_from)), input_ids.device
    # Those of all tokens are for log-probabilities of prompts, for the next stage, or for a wing.
    keeps_all = head is None or len(step.kinds) in step.taps or wants_prompt_logprobs(batch, table)
    if not keeps_all and len(used) < len(input_ids):
        step.rows = to_device(used or [0], device)  # oneDNN cannot multiply matrices without rows
    hidden = model(input_ids, step)
    whole = hidden if keeps_all else None
    if head is None or not used:
        return Output(None, whole)
    logits = head(hidden[to_device(used, device)] if keeps_all else hidden)
    if used != batch.sampled_from:  # completions that fork from one prompt share its logits
        logits = logits[to_device(torch.from_numpy(np.searchsorted(used, batch.sampled_from)), device)]
    return Output(logits, whole)
