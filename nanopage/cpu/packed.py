"""Weights in oneDNN's blocked layout, for a CPU (see cpu/packed_linear.py)."""

import torch
from torch import Tensor, nn

from nanopage.cpu import packed_linear
from nanopage.layers.linear import Linear, replace_weights


class PackedWeight(nn.Module):
    """A weight that exists only in oneDNN's layout. Products read this layout about twice as fast. If the weight has
    tiles, its rows are read from them.

    Args: matrix: [out, in].
    """

    packed: Tensor
    tiles: Tensor | None

    def __init__(self, matrix: Tensor):
        super().__init__()
        self.register_buffer("packed", packed_linear.pack(matrix), persistent=False)
        self.register_buffer("tiles", packed_linear.tiles_of(self.packed, matrix), persistent=False)
        self.has_rows = self.tiles is not None

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.ops.nanopage.packed_linear(x, self.packed, bias)

    def rows(self, indices: Tensor) -> Tensor:
        assert self.tiles is not None
        return packed_linear.rows(self.tiles, indices)


class PackedRowWeight(PackedWeight):
    """A PackedWeight for a single row of input, to be compiled: a loop over the tiles, if there are any."""

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.tiles is None:
            return super().product(x, bias)
        return packed_linear.matvec(x, self.tiles, bias)


def pack(module: nn.Module, kind: type[PackedWeight] = PackedWeight) -> None:
    """Pack the weight of every Linear in a module, and of the embedding if it is tied to one that has tiles."""

    def replace(linear: Linear) -> PackedWeight:
        return kind(linear.weight.matrix.data)

    replace_weights(module, replace)
