"""Weights of 4 or 8 bits on a GPU (see quantization/quantized_linear.py).

`quantize` replaces weights in floats with these. For a quantized checkpoint, they are made while it is loaded.
"""

import torch
from torch import Tensor, nn

from nanopage.cpu.tile_linear import INT4_GROUP
from nanopage.layers.linear import Linear, replace_weights
from nanopage.layers.weight import Weight
from nanopage.quantization import quantized_weights
from nanopage.quantization.quantized_weights import QuantizedMatrix


class QuantizedWeight(nn.Module):
    """A weight whose integers are converted to floats during a product.

    Args:
        dtype: the dtype of activations.
        order: int64 [in], the input that each column of the matrix belongs to. None: columns are in order.
    """

    packed: Tensor
    scales: Tensor
    offsets: Tensor | None
    order: Tensor | None

    def __init__(self, matrix: QuantizedMatrix, dtype: torch.dtype, order: Tensor | None = None):
        from nanopage.quantization import quantized_linear  # noqa: F401 (registers the operator; imports Triton)

        super().__init__()
        self.bits, self.group, self.zero_points = matrix.bits, matrix.group, matrix.zero_points
        self.in_features, self.dtype = matrix.in_features, dtype
        self.has_rows = order is None
        tensors = {"packed": matrix.packed, "scales": matrix.scales, "offsets": matrix.offsets, "order": order}
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)

    @property
    def format(self) -> tuple:
        """What compiled code depends on, besides the type."""
        tensors = self.packed.dtype, self.packed.shape, self.offsets is None, self.order is None
        return (*tensors, self.bits, self.group, self.zero_points)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x = x if self.order is None else x[:, self.order]
        return torch.ops.nanopage.quantized_linear(
            x, self.packed, self.scales, self.offsets, bias, self.bits, self.group, self.zero_points
        )

    def rows(self, indices: Tensor) -> Tensor:
        return quantized_weights.dequantize(self, indices).to(self.dtype)


def quantize(module: nn.Module, kind: str, device: torch.device) -> None:
    """Quantize the weight of every Linear in a module on `device`, one at a time, and the embedding's weight if the
    embedding is tied to one of them.

    Args:
        kind: "int8", "fp8" or "int4". With int4, two kinds of matrices become int8: the head, whose rounding costs the
            most, and matrices whose number of inputs is not a multiple of INT4_GROUP. With fp8, the head is unchanged.
    """
    head = getattr(module, "lm_head", None)

    def replace(linear: Linear) -> Weight:
        if linear is head and kind == "fp8":
            return linear.weight
        matrix = linear.weight.matrix.data.to(device)
        if kind == "fp8":
            rounded = quantized_weights.round_to_fp8(matrix)
        elif kind == "int4" and linear is not head and linear.in_features % INT4_GROUP == 0:
            rounded = quantized_weights.round_to_int4(matrix)
        else:
            rounded = quantized_weights.round_to_int8(matrix)
        return QuantizedWeight(rounded, matrix.dtype)

    replace_weights(module, replace)
