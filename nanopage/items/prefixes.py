"""Prefix tuning (Li and Liang 2021): trained K and V of each layer, as if tokens had come before those of a prompt.

PEFT saves them as one tensor, `prompt_embeddings` [tokens, layers * 2 * num_kv_heads * head_dim]; K is already rotated.
The prompt has placeholders in their place, which no step computes (`Item.given`): a sequence begins behind them, and
`WriteGiven` puts K and V into its first blocks. From then on they are blocks like all others: cached by the hash of the
item, shared, copied and swapped. A sequence that is recomputed begins behind them again.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from nanopage.config.model import ModelConfig
from nanopage.config.options import SIZES, EngineConfig
from nanopage.device import to_device
from nanopage.items.items import make_item
from nanopage.state.layer_kinds import first_block
from nanopage.state.pages import write
from nanopage.step import Batch, Item
from nanopage.worker.eager import Output
from nanopage.worker.model_runner import Way

REORDERED = ("Glm4ForCausalLM", "GlmForCausalLM")  # K has another order here than in transformers (families/glm4.py)


def prefix_width(config: EngineConfig, model_config: ModelConfig) -> int:
    """How many numbers each token of a prefix has. Raises: ValueError naming what prefixes do not work with."""
    for option in config.given(*SIZES, "distributed_executor_backend"):
        raise ValueError(f"peft_type='PREFIX_TUNING' does not work with {option}")
    if model_config.architecture in REORDERED:
        raise ValueError("peft_type='PREFIX_TUNING' does not work with GLM-4, whose K has another order here")
    if model_config.state or model_config.latent or model_config.kv_sources or len({*model_config.heads}) > 1:
        raise ValueError(
            "peft_type='PREFIX_TUNING' needs a model whose layers have K and V of their own, of equal size"
        )
    return 2 * model_config.num_layers * model_config.num_kv_heads * model_config.head_dim


def prefix_item(embeds: Item, model_config: ModelConfig) -> Item:
    """The item of a prefix. Args: embeds: its rows, as an item of embeddings."""
    rows = embeds.payload["embeds"].reshape(embeds.length, model_config.num_layers, 2, -1, model_config.head_dim)
    item = make_item("prefix", 0, embeds.length, {"k_and_v": rows.transpose(1, 2, 0, 3, 4)})
    return replace(item, given=True)


class WriteGiven:
    """A way to run a step that first writes the K and V that sequences begin with.

    Args:
        layers: of the model.
        wrap: wraps a way in what else needs it (see `Wings`).
        way: runs the step.
    """

    def __init__(self, layers: Iterable[Any], wrap: Callable[[Way], Way], way: Any):
        self.layers, self.way = layers, wrap(way)
        self.kv_cache, self.table = way.kv_cache, way.table

    def fits(self, batch: Batch) -> bool:
        return self.way.fits(batch)

    def run(self, batch: Batch) -> Output:
        given = [(new.row, item) for new in batch.new for item in new.items if item.given]
        starts = dict(zip(batch.rows, batch.starts, strict=True)) if given else {}
        for row, item in given:
            if starts.get(row) == item.length:  # else a prefix in the cache is longer
                self._write(row, item)
        return self.way.run(batch)

    def _write(self, row: int, item: Item) -> None:
        """Write K and V of the tokens that the windows of later tokens reach. Blocks from the prefix cache already have
        the same."""
        size, kinds, device = self.kv_cache.block_size, self.kv_cache.kinds, self.table.device
        given = to_device(torch.tensor(item.payload["k_and_v"]), device)
        for layer, kind, cache, both in zip(self.layers, kinds.of_layers, self.kv_cache.layers, given, strict=True):
            first = first_block(kinds.windows[kind], item.length, size) * size
            places = torch.arange(first, item.length, device=device)
            slots = self.table.blocks[row, places // size, kind].long() * size + places % size
            k, v = both[:, first:]
            write(k, v, cache, slots, *layer.self_attn.scoring.kv_scales)
