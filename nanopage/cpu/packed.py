"""Linear layers and an embedding for a CPU, with weights in oneDNN's blocked layout (see cpu/packed_linear.py).

`pack` replaces plain modules with these once the weights are loaded.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nanopage.cpu import packed_linear
from nanopage.layers.embedding import Embedding
from nanopage.layers.linear import Linear


class PackedLinear(nn.Module):
    """A Linear whose weight exists only in oneDNN's layout, which products read about twice as fast."""

    packed: Tensor
    tiles: Tensor | None
    bias: Tensor | None

    def __init__(self, linear: Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.data
        self.register_buffer("packed", packed_linear.pack(weight), persistent=False)
        self.register_buffer("tiles", packed_linear.tiles_of(self.packed, weight), persistent=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.nanopage.packed_linear(x, self.packed, self.bias)


class PackedRowLinear(PackedLinear):
    """A PackedLinear for a single row of input, to be compiled: a loop over the tiles, if there are any."""

    def forward(self, x: Tensor) -> Tensor:
        if self.tiles is None:
            return super().forward(x)
        return packed_linear.matvec(x, self.tiles, self.bias)


class PackedEmbedding(nn.Module):
    """An embedding tied to a packed head. It reads rows from the head's tiles, so the two still share one matrix."""

    packed: Tensor
    tiles: Tensor

    def __init__(self, head: PackedLinear):
        super().__init__()
        # The tiles are a view of `packed`, and the first stage of a pipeline has no head that would keep it.
        self.register_buffer("packed", head.packed, persistent=False)
        self.register_buffer("tiles", head.tiles, persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        return packed_linear.rows(self.tiles, input_ids)


def pack(module: nn.Module, kind: type[PackedLinear] = PackedLinear) -> None:
    """Pack every Linear in a module, and the embedding if it is tied to a Linear that has tiles."""
    replace_linears(module, kind, lambda head, _: None if head.tiles is None else PackedEmbedding(head))


def replace_linears(
    module: nn.Module, replace: Callable[[Linear], Any], replace_tied: Callable[[Any, Embedding], nn.Module | None]
) -> None:
    """Replace every Linear in a module, one after the other, so that at most one matrix exists twice.

    Args:
        replace: makes the replacement of a Linear, or returns it to keep it.
        replace_tied: makes the replacement of an embedding that is tied to a Linear, from the Linear's replacement and
            the embedding. If it returns None, the embedding stays as it is.
    """
    children = [(parent, name, child) for parent in module.modules() for name, child in parent.named_children()]
    for parent, name, child in children:
        if not isinstance(child, Linear):
            continue
        replacement = replace(child)
        if replacement is child:
            continue
        setattr(parent, name, replacement)
        for place, place_name, other in children:
            if not isinstance(other, Embedding) or other.weight is not child.weight:
                continue
            if (embedding := replace_tied(replacement, other)) is not None:
                setattr(place, place_name, embedding)
                other.register_parameter("weight", None)
        child.register_parameter("weight", None)
