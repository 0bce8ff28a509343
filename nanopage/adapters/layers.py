"""LoRAWeight: a weight, with the weights of adapters in its slots (Hu et al. 2021; in batches: Punica, 2023).

y = x Wᵀ + x Aᵀ Bᵀ, where each token's adapter gives A and B. The weights of all slots are in static buffers, so that a
captured graph reads whatever the slots hold. Ranks are padded with zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanopage.layers.linear import Linear

Add = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, list[int]], Tensor]
"""Adds the products of adapters: add(y, x, a, b, slots, sizes) returns y plus each token's product. May change y.

y      [T, out]
x      [T, in]
a      [slots, parts, rank, in]
b      [slots, rank, out]: each column multiplies the part of A that its output belongs to
slots  int64 [T], the adapter slot of each token, -1 for none
sizes  the number of outputs of each part
"""


@dataclass(slots=True)
class Running:
    """The step that a model is computing. Its LoRAWeights share this object: other layers know nothing of adapters.

    of_expert: the adapter slots of the tokens that an expert is computing. None outside of experts.
    """

    step: Any = None
    of_expert: Tensor | None = None

    def slots(self) -> Tensor | None:
        """The adapter slot of each row, -1 for none. None: no token of the step has an adapter."""
        if self.of_expert is not None:
            return self.of_expert
        return None if self.step is None else self.step.adapters


class LoRAWeight(nn.Module):
    """A weight with slots for adapters, which are empty at first.

    Args:
        linear: the layer whose weight gets the slots.
        num_slots, rank: how many adapters the weight holds, and their largest rank.
        running: the step that the model is computing.
        add: adds the products of adapters on this device.
    """

    a: Tensor
    b: Tensor
    has_rows = False

    def __init__(
        self,
        linear: Linear,
        num_slots: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        running: Running,
        add: Add,
    ):
        super().__init__()
        self.weight, self.parts, self.running, self.add = linear.weight, linear.parts, running, add
        self.sizes = list(self.parts.values())
        a = torch.zeros(num_slots, len(self.sizes), rank, linear.in_features, dtype=dtype, device=device)
        b = torch.zeros(num_slots, rank, linear.out_features, dtype=dtype, device=device)
        self.register_buffer("a", a, persistent=False)
        self.register_buffer("b", b, persistent=False)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y, slots = self.weight.product(x, bias), self.running.slots()
        return y if slots is None else self.add(y, x, self.a, self.b, slots, self.sizes)

    @torch.no_grad()
    def fill(self, slot: int, part: str, a: Tensor, b: Tensor) -> None:
        """Put the weights of an adapter for one part into a slot: A [r, in] and B [out, r], already scaled."""
        index = list(self.parts).index(part)
        begin = sum(self.sizes[:index])
        self.a[slot, index, : len(a)].copy_(a)
        self.b[slot, : len(a), begin : begin + len(b)].copy_(b.T)

    @torch.no_grad()
    def clear(self, slot: int, value: float = 0.0) -> None:
        """Fill the weights of a slot with zeros, or with NaN."""
        self.a[slot].fill_(value)
        self.b[slot].fill_(value)


def lora_buffers(module: nn.Module) -> list[Tensor]:
    """The weights of all slots in a module."""
    weights = [child for child in module.modules() if isinstance(child, LoRAWeight)]
    return [buffer for weight in weights for buffer in (weight.a, weight.b)]
