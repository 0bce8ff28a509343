"""Weight: how a Linear or an Embedding holds its matrix.

Floats           as floats                        here
PackedWeight     in oneDNN's layout, on a CPU     cpu/packed.py
TiledWeight      in tiles, on a CPU               cpu/tiled.py
QuantizedWeight  with 4 or 8 bits, on a GPU       quantization/quantized.py
LoRAWeight       one of these, and adapters       adapters/layers.py
SlicedWeight     divided among workers            distributed/exchanged.py
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Weight(Protocol):
    """A matrix [out, in], as an nn.Module. A tied embedding and head share one.

    has_rows: whether `rows` can be called. A LoRAWeight has no `rows`, because embeddings take no adapters.
    """

    has_rows: bool

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x Wᵀ + b. Shapes: x [T, in], bias [out] -> [T, out]."""

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the matrix, for an embedding: int64 [T] -> [T, in]."""


class Floats(nn.Module):
    """A matrix of floats."""

    has_rows = True

    def __init__(self, out_features: int, in_features: int):
        super().__init__()
        self.matrix = nn.Parameter(torch.empty(out_features, in_features))

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, self.matrix, bias)

    def rows(self, indices: Tensor) -> Tensor:
        return F.embedding(indices, self.matrix)


def own_parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a layer by the names that checkpoints give them. A matrix of floats is the `weight` of the
    layer that uses it."""
    if isinstance(layer, Floats):
        return {}
    own, weight = dict(layer.named_parameters(recurse=False)), getattr(layer, "weight", None)
    return {"weight": weight.matrix} | own if isinstance(weight, Floats) else own
