"""LoRALinear: a linear layer and the weights of the adapters in its slots (Hu et al. 2021; in batches: Punica, 2023).

y = x Wᵀ + x Aᵀ Bᵀ, with A and B of the adapter of each token. The weights of all slots are in static buffers, so that a
captured graph reads whatever the slots hold. Ranks are padded with zeros.
"""

from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TokenAdapters(Protocol):
    """Knows the adapter slot of each token of a step. Made for each step, like Attention."""

    def add(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor, sizes: list[int]) -> None:
        """Add the products of each token's adapter to y, in place.

        Args:
            y: [T, out].
            x: [T, in].
            a: [slots, parts, rank, in].
            b: [slots, out, rank]: its rows multiply the part of A to which their outputs belong.
            sizes: the outputs of each part.
        """

    def select(self, rows: Tensor) -> "TokenAdapters":
        """The same for these tokens alone."""


class LoRALinear(nn.Module):
    """A linear layer with slots for adapters, which are empty at first.

    Args:
        linear: a Linear, or one of the layers that replace it (packed.py, tiled.py, quantized.py).
        num_slots, rank: how many adapters it holds, and of which rank at most.

    Shapes: x [T, in] -> [T, out].
    """

    a: Tensor
    b: Tensor

    def __init__(self, linear: Any, num_slots: int, rank: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.linear, self.parts = linear, linear.parts
        self.sizes = list(self.parts.values())
        a = torch.zeros(num_slots, len(self.sizes), rank, linear.in_features, dtype=dtype, device=device)
        b = torch.zeros(num_slots, linear.out_features, rank, dtype=dtype, device=device)
        self.register_buffer("a", a, persistent=False)
        self.register_buffer("b", b, persistent=False)

    def forward(self, x: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
        y = self.linear(x)
        if adapters is not None:
            adapters.add(y, x, self.a, self.b, self.sizes)
        return y

    @torch.no_grad()
    def fill(self, slot: int, part: str, a: Tensor, b: Tensor) -> None:
        """Put the weights of an adapter for one part into a slot: A [r, in] and B [out, r], already scaled."""
        index = list(self.parts).index(part)
        begin = sum(self.sizes[:index])
        self.a[slot, index, : len(a)].copy_(a)
        self.b[slot, begin : begin + len(b), : len(a)].copy_(b)

    @torch.no_grad()
    def clear(self, slot: int, value: float = 0.0) -> None:
        """Fill the weights of a slot with zeros, or with NaN."""
        self.a[slot].fill_(value)
        self.b[slot].fill_(value)


class GroupedAdapters:
    """TokenAdapters in plain torch: one product for all tokens of an adapter.

    Args: slots: the slot of each token, -1 for none: int64 [T], on the host.
    """

    def __init__(self, slots: np.ndarray):
        self.slots = slots
        self.groups: list[tuple[int, Tensor | None]] = []  # (slot, its tokens); None: all tokens
        for slot in np.unique(slots).tolist():
            if slot >= 0:
                (index,) = np.nonzero(slots == slot)
                self.groups.append((slot, None if len(index) == len(slots) else torch.from_numpy(index)))

    def add(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor, sizes: list[int]) -> None:
        rank = a.shape[2]
        for slot, index in self.groups:
            small = F.linear(x if index is None else x[index], a[slot].flatten(0, 1))
            weights = b[slot].split(sizes)
            added = [F.linear(h, part) for h, part in zip(small.split(rank, 1), weights, strict=True)]
            product = added[0] if len(added) == 1 else torch.cat(added, 1)
            if index is None:
                y += product
            else:
                y.index_add_(0, index, product)

    def select(self, rows: Tensor) -> "GroupedAdapters":
        return GroupedAdapters(self.slots[rows.numpy()])


def lora_buffers(module: nn.Module) -> list[Tensor]:
    """The weights of all slots in a module."""
    linears = [child for child in module.modules() if isinstance(child, LoRALinear)]
    return [buffer for linear in linears for buffer in (linear.a, linear.b)]
