"""Steps in which the tokens of an image see the whole image, also its later tokens (Gemma 3).

Chunks of prompts do not cut such an image (`Item.whole`), so K and V of all its tokens are there when one of them
attends. Such steps run eagerly, with attention in plain PyTorch. All other steps run as those of other models.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanopage.items.rows import ItemRows
from nanopage.kernels.grouped_attention import GroupedAttention
from nanopage.kernels.reference import PLAIN, Scoring, paged_attention
from nanopage.state.pages import write
from nanopage.step import Batch
from nanopage.worker.eager import Eager, Output, head_of, prepare, run_model


class WholeWay:
    """A way to run steps, for models whose images are seen whole.

    Args: way: runs steps without images; if it is the eager way, this one runs steps with images.
    """

    def __init__(self, way: Any, items: ItemRows):
        self.way, self.items = way, items

    def fits(self, batch: Batch) -> bool:
        return self.way.fits(batch) and (isinstance(self.way, Eager) or not self.items.reaches(batch))

    def run(self, batch: Batch) -> Output:
        if not isinstance(eager := self.way, Eager) or not self.items.reaches(batch):
            return self.way.run(batch)
        ahead = ahead_of(batch, self.items)
        input_ids, step = prepare(
            batch, eager.table, eager.kv_cache, lambda plain: WholeAttention(plain.slot_mapping, plain, ahead)
        )
        return run_model(eager.model, batch, input_ids, step, eager.table, head_of(eager.model))


def ahead_of(batch: Batch, items: ItemRows) -> Tensor:
    """How many later tokens each token of a step sees: int64 [T], on the CPU."""
    ahead, shift = torch.zeros(batch.num_tokens, dtype=torch.int64), 0
    for row, start, count in zip(batch.rows, batch.starts, batch.counts, strict=True):
        for item in items.left.get(row, ()):
            first, end = max(start, item.position), item.position + item.length
            if item.whole and first < end <= start + count:
                ahead[shift + first - start : shift + end - start] = torch.arange(end - first - 1, -1, -1)
        shift += count
    return ahead


@dataclass(slots=True)
class WholeAttention:
    """Attention of a step of T tokens (see layers/attention.py), one sequence after the other.

    plain: says where K and V are; slot_mapping: its own.
    ahead: int64 [T], on the CPU: how many later tokens each token sees.
    """

    slot_mapping: Tensor
    plain: GroupedAttention
    ahead: Tensor

    def write(self, k: Tensor, v: Tensor, kv_cache: Tensor, scales: tuple[float, float] = (1.0, 1.0)) -> None:
        write(k, v, kv_cache, self.slot_mapping, *scales)

    def attend(self, q: Tensor, kv_cache: Tensor, scoring: Scoring = PLAIN, out: Tensor | None = None) -> Tensor:
        where = self.plain.block_tables.long(), self.plain.query_lens, self.plain.seq_lens
        attended = paged_attention(q, kv_cache, *where, scoring, self.ahead)
        return attended if out is None else out.copy_(attended)
