"""The products of LoRA adapters on a CPU: in plain torch, one adapter after another, and as an operator, by which
lora.cpp computes those of all adapters."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanopage.cpu.packed_linear import library


class GroupedAdapters:
    """`adapters.layers.TokenAdapters` in plain torch: one product for all tokens of an adapter.

    Args: slots: the slot of each token, -1 for none: int64 [T], on the host.
    """

    def __init__(self, slots: np.ndarray):
        self.slots = slots
        self.groups: list[tuple[int, Tensor | None]] = []  # (slot, its tokens); None: all tokens
        for slot in np.unique(slots).tolist():
            if slot >= 0:
                (index,) = np.nonzero(slots == slot)
                self.groups.append((slot, None if len(index) == len(slots) else torch.from_numpy(index)))

    def add(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor, sizes: list[int]) -> Tensor:
        rank = a.shape[2]
        for slot, index in self.groups:
            small = F.linear(x if index is None else x[index], a[slot].flatten(0, 1))
            weights = b[slot].split(sizes, 1)
            added = [h @ part for h, part in zip(small.split(rank, 1), weights, strict=True)]
            product = added[0] if len(added) == 1 else torch.cat(added, 1)
            if index is None:
                y += product
            else:
                y.index_add_(0, index, product)
        return y

    def select(self, rows: Tensor) -> "GroupedAdapters":
        return GroupedAdapters(self.slots[rows.numpy()])


def adapters_on_cpu(
    product: Callable[..., Tensor] | None, slots: Tensor, rows: Tensor
) -> "GroupedAdapters | OperatorAdapters | None":
    """The adapters of tokens; None if no token has one.

    Args:
        product: computes the products, as the operator nanopage::add_adapters. None: plain torch does.
        slots, rows: the adapter slot of each row of the sequence table, and the row of each token, int64 [T].
    """
    chosen = slots.numpy()[rows.numpy()]
    if not (chosen >= 0).any():
        return None
    return GroupedAdapters(chosen) if product is None else OperatorAdapters(torch.from_numpy(chosen), product)


def add_adapters(y: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor, sizes: list[int]) -> Tensor:
    """`TokenAdapters.add` for tokens with these slots. Leaves y as it is."""
    return GroupedAdapters(slots.numpy()).add(y.clone(), x, a, b, sizes)


# Registered as an operator, so that compiled code calls lora.cpp for it.
library.define("add_adapters(Tensor y, Tensor x, Tensor a, Tensor b, Tensor slots, int[] sizes) -> Tensor")
library.impl("add_adapters", add_adapters, "CompositeExplicitAutograd")


@torch.library.register_fake("nanopage::add_adapters", lib=library)
def _(y, x, a, b, slots, sizes):
    return y.new_empty(y.shape)


class OperatorAdapters:
    """`adapters.layers.TokenAdapters` by one call for all adapters.

    Args:
        slots: the slot of each token, -1 for none: int64 [T].
        product: the operator nanopage::add_adapters, or what computes the same.
    """

    def __init__(self, slots: Tensor, product: Callable[..., Tensor] = torch.ops.nanopage.add_adapters):
        self.slots, self.product = slots, product

    def add(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor, sizes: list[int]) -> Tensor:
        return self.product(y, x, a, b, self.slots, sizes)

    def select(self, rows: Tensor) -> "OperatorAdapters":
        return OperatorAdapters(self.slots[rows], self.product)
