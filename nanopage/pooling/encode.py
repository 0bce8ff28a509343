"""The way to run a step of an encoder on the usual worker. It replaces the eager way.

An encoder's layers keep nothing of a sequence, so sequences need no blocks. Prompts are not divided: each runs in one
step (see `Scheduler.arrange`).
"""

from itertools import chain
from typing import Any

import numpy as np
import torch

from nanopage.device import to_device
from nanopage.pooling.encoder import Span
from nanopage.step import Batch
from nanopage.worker.eager import Output, prepare


class Encode:
    """Runs any batch. Sequences of equal length share calls of attention.

    Args: eager: the Eager that it replaces, with an Encoder.
    """

    def __init__(self, eager: Any):
        self.model, self.table, self.kv_cache = eager.model, eager.table, eager.kv_cache

    def fits(self, batch: Batch) -> bool:
        return True

    def run(self, batch: Batch) -> Output:
        by_length = np.argsort(batch.counts, kind="stable")
        rows, starts, counts = ([v[i] for i in by_length] for v in (batch.rows, batch.starts, batch.counts))
        input_ids, step = prepare(Batch(rows=rows, starts=starts, counts=counts), self.table, self.kv_cache)
        settings = (self.table.sampling.settings[row] for row in rows)
        types = [each.token_types or [0] * count for each, count in zip(settings, counts, strict=True)]
        token_types = to_device([*chain.from_iterable(types)], self.table.device, torch.int64)
        hidden = self.model(input_ids, token_types, step.positions, spans_of(counts))
        parts = hidden.split(counts)
        return Output(None, torch.cat([parts[i] for i in np.argsort(by_length)]))


def spans_of(seq_lens: list[int]) -> list[Span]:
    """Group adjacent sequences of equal length."""
    spans: list[Span] = []
    start = 0
    for length in seq_lens:
        if spans and spans[-1].length == length:
            spans[-1] = spans[-1]._replace(num=spans[-1].num + 1)
        else:
            spans.append(Span(start, 1, length))
        start += length
    return spans
