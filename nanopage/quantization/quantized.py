"""Linear layers and an embedding for a GPU, with weights of 4 or 8 bits (see quantization/quantized_linear.py).

`quantize` replaces plain modules with these. Those of a quantized checkpoint are made while it is loaded.
"""

import torch
from torch import Tensor, nn

from nanopage.cpu.packed import replace_linears
from nanopage.cpu.tile_linear import INT4_GROUP
from nanopage.layers.embedding import Embedding
from nanopage.layers.linear import Linear
from nanopage.quantization import quantized_weights
from nanopage.quantization.quantized_weights import QuantizedWeight


class QuantizedLinear(nn.Module):
    """A Linear whose weight has 4 or 8 bits.

    Args:
        linear: its sizes and its bias.
        order: int64 [in], the input of each column of the weight. None: in order.
    """

    packed: Tensor
    scales: Tensor
    offsets: Tensor | None
    order: Tensor | None
    bias: Tensor | None

    def __init__(self, linear: Linear, weight: QuantizedWeight, order: Tensor | None = None):
        from nanopage.quantization import quantized_linear  # noqa: F401 (registers the operator; imports Triton)

        super().__init__()
        self.parts, self.out_features, self.in_features = linear.parts, linear.out_features, linear.in_features
        self.bits, self.group, self.zero_points = weight.bits, weight.group, weight.zero_points
        tensors = {"packed": weight.packed, "scales": weight.scales, "offsets": weight.offsets, "order": order}
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)
        self.bias = linear.bias

    @property
    def format(self) -> tuple:
        """What compiled code depends on, beside the type."""
        tensors = self.packed.dtype, self.packed.shape, self.offsets is None, self.order is None
        return (*tensors, self.bits, self.group, self.zero_points)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.order is None else x[:, self.order]
        return torch.ops.nanopage.quantized_linear(
            x, self.packed, self.scales, self.offsets, self.bias, self.bits, self.group, self.zero_points
        )


class QuantizedEmbedding(nn.Module):
    """An embedding that shares the weight of a QuantizedLinear. `dtype` is that of activations."""

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype):
        super().__init__()
        self.weight, self.dtype = weight, dtype

    def forward(self, input_ids: Tensor) -> Tensor:
        return quantized_weights.dequantize(self.weight, input_ids).to(self.dtype)


def quantize(module: nn.Module, kind: str, device: torch.device) -> None:
    """Quantize every Linear in a module on `device`, one at a time, and the embedding if it is tied to one of them.

    Args:
        kind: "int8", "fp8" or "int4". With int4, the head, whose rounding costs the most, and matrices whose number of
            inputs is not a multiple of INT4_GROUP become int8. With fp8, the head stays as it is.
    """
    head, made = getattr(module, "lm_head", None), {}

    def replace(linear: Linear) -> nn.Module:
        if linear is head and kind == "fp8":
            return linear
        weight = linear.weight.data.to(device)
        if kind == "fp8":
            rounded = quantized_weights.round_to_fp8(weight)
        elif kind == "int4" and linear is not head and linear.in_features % INT4_GROUP == 0:
            rounded = quantized_weights.round_to_int4(weight)
        else:
            rounded = quantized_weights.round_to_int8(weight)
        replacement = QuantizedLinear(linear, rounded)
        made[replacement] = rounded
        return replacement

    def replace_tied(head: QuantizedLinear, embedding: Embedding) -> QuantizedEmbedding:
        return QuantizedEmbedding(made[head], embedding.weight.dtype)

    replace_linears(module, replace, replace_tied)
