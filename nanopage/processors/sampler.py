"""ProcessedSampler: runs the processors of requests."""

import numpy as np
import torch
from torch import Tensor

from nanopage.processors.masks import MaskWithProcessors
from nanopage.sampling.sampler import Sampler


class ProcessedSampler(Sampler):
    """Changes the logits of rows with processors first. Masks, constraints and penalties follow."""

    def change(
        self, logits: Tensor, rows: np.ndarray, positions: np.ndarray, masks: dict[int, bytes] | None = None
    ) -> Tensor:
        """See `Sampler`. Raises: TypeError, ValueError for what is no row of logits; what a processor raises."""
        processed = {i: mask for i, mask in (masks or {}).items() if isinstance(mask, MaskWithProcessors)}
        if processed:
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        for index, mask in processed.items():
            for call in mask.calls:
                row = call(logits[index].clone())
                if not isinstance(row, Tensor):
                    raise TypeError(f"logits_processors must return logits, not {type(row).__name__}")
                if row.shape != logits[index].shape:
                    raise ValueError(f"logits_processors must return {len(logits[index])} logits, not {[*row.shape]}")
                logits[index] = row
        return super().change(logits, rows, positions, masks)
