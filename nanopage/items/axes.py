"""Positions of three axes: M-RoPE (Qwen2-VL, Wang et al. 2024).

A token has three positions: in time, and its row and its column in an image. In text, all three are equal, and count
on from the largest position before them. So after an image, positions lag behind the number of tokens. They depend on
the images of the prompt alone, and a worker learns them with the items of a sequence.

    tokens     a  [ an image of 2 x 3 tokens ]  b  c
    time       0   1  1  1  1  1  1             4  5
    row        0   1  1  1  2  2  2             4  5
    column     0   1  2  3  1  2  3             4  5
"""

import numpy as np
import torch
from torch import Tensor, nn

from nanopage.config.rope import RopeConfig
from nanopage.device import to_device
from nanopage.layers.rotary import RotaryEmbedding
from nanopage.step import Batch, Item

SECTIONS = "mrope_section"  # in RopeConfig.params: how many frequencies follow each axis, in turns


class Axes:
    """What positions differ by from the places of tokens, for the running sequences.

    Args:
        unit: how many pixels of a side become a token.
        num_rows: of the sequence table.
    """

    def __init__(self, unit: int, num_rows: int, device: torch.device):
        self.unit = unit
        self.offsets = [np.zeros((1, 3), dtype=np.int64)] * num_rows  # by row (see `offsets_of`)
        self.shifts = torch.zeros(num_rows, dtype=torch.int64, device=device)  # by row, of all tokens after the images

    def update(self, batch: Batch) -> None:
        """Learn the items of sequences that begin."""
        rows = [new.row for new in batch.new] + [fork.row for fork in batch.forks]
        for new in batch.new:
            self.offsets[new.row] = offsets_of(new.items, self.unit)
        for fork in batch.forks:
            self.offsets[fork.row] = self.offsets[fork.parent]
        if rows:
            shifts = to_device([int(self.offsets[row][-1, 0]) for row in rows], self.shifts.device)
            self.shifts.index_copy_(0, to_device(rows, self.shifts.device), shifts)

    def of(self, batch: Batch, places: Tensor) -> Tensor:
        """The positions of the T tokens of a batch: int64 [T], or [T, 3] if those of a token differ.

        Args: places: of the tokens in their sequences, int64 [T].
        """
        parts = []
        for row, start, count in zip(batch.rows, batch.starts, batch.counts, strict=True):
            known = self.offsets[row]
            parts.append(known[np.arange(start, start + count).clip(max=len(known) - 1)])
        offsets = np.concatenate(parts)
        if not offsets.any():
            return places
        if (offsets == offsets[:, :1]).all():
            return places + to_device(torch.from_numpy(offsets[:, 0].copy()), places.device)
        return places[:, None] + to_device(torch.from_numpy(offsets), places.device)


def offsets_of(items: list[Item], unit: int) -> np.ndarray:
    """What the three positions of each token of a prompt differ by from its place: int64 [N, 3], up to the token after
    the last image. All later tokens are as that one."""
    images = [item for item in items if item.kind == "image"]
    end = max((item.position + item.length for item in images), default=0)
    offsets = np.zeros((end + 1, 3), dtype=np.int64)
    for item in images:
        rows, columns = (side // unit for side in item.payload["pixels"].shape[1:])
        index, after = np.arange(item.length), item.position + item.length
        in_image = np.stack([0 * index, *np.divmod(index, columns)], axis=1)
        offsets[item.position : after] += in_image - index[:, None]
        offsets[after:] += max(rows, columns) - item.length
    return offsets


class AxesRotary(nn.Module):
    """As `RotaryEmbedding` of one rope, which has SECTIONS. Positions may be [T, 3], too."""

    def __init__(self, head_dim: int, rope: RopeConfig):
        super().__init__()
        self.plain, self.sections = RotaryEmbedding((head_dim, rope)), list(rope.params[SECTIONS])

    def forward(self, positions: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        if positions.ndim == 1:
            return self.plain(positions, dtype)
        rotations = (torch.stack(self.plain(axis, dtype)[0]) for axis in positions.unbind(1))
        parts = [both.split(self.sections, dim=-1) for both in rotations]  # of each axis
        cos, sin = torch.cat([parts[turn % 3][turn] for turn in range(len(self.sections))], dim=-1)
        return [(cos, sin)]
