"""Encoder-decoder models: what the encoder makes of an item becomes K and V of the layers with cross-attention.

Those layers keep it as their state, in the layout of a block (state/layer_kinds.py). It is written once, before the
first step of a sequence, and copied, swapped and shared with the block from then on.
"""

import torch
from torch import Tensor

from nanopage.items.rows import ItemRows
from nanopage.state.layer_kinds import STATE
from nanopage.state.pages import write
from nanopage.step import Batch
from nanopage.worker.eager import Output


class WriteEncoded:
    """A way to run a step that first writes the states of sequences that begin.

    Args: way: runs the rest of the step.
    """

    def __init__(self, items: ItemRows, way):
        self.items, self.way = items, way
        self.model, self.kv_cache, self.table = way.model, way.kv_cache, way.table

    def fits(self, batch: Batch) -> bool:
        return self.way.fits(batch)

    def run(self, batch: Batch) -> Output:
        rows = [row for row, start in zip(batch.rows, batch.starts, strict=True) if start == 0]
        begun = [(row, item) for row in rows for item in self.items.left.get(row, ())]
        outputs = self.items.outputs_of([item for _, item in begun])
        for row, item in begun:
            self._write(row, outputs[item.hash])
        return self.way.run(batch)

    def _write(self, row: int, encoded: Tensor) -> None:
        block_size = self.kv_cache.block_size
        offsets = torch.arange(len(encoded), device=encoded.device)
        kinds = self.kv_cache.kinds
        for layer, kind, cache in zip(self.model.layers, kinds.of_layers, self.kv_cache.layers, strict=True):
            if kinds.windows[kind] == STATE:
                slots = self.table.blocks[row, 0, kind].long() * block_size + offsets  # a sequence has one block
                k, v = layer.self_attn.keys_and_values(encoded)
                write(k, v, cache, slots)
