"""Matrix: a quantized matrix of a checkpoint, on its way to floats, to tiles on a CPU, or to a GPU."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopage.cpu import tile_linear
from nanopage.cpu.tile_linear import Blocks
from nanopage.cpu.tiled import TiledWeight
from nanopage.quantization import quantized_weights
from nanopage.quantization.quantized import QuantizedWeight
from nanopage.quantization.quantized_weights import FP8, MIDDLE, TILE, QuantizedMatrix

BLOCK = 32  # inputs of a group of `Blocks`


@dataclass
class Matrix:
    """A matrix [out, in]: weight = scale * (integer - zero point), or scale * float8.

    values: uint8, from 0 to 2**bits - 1, or float8_e4m3fn: [out, in]. Inputs of a group are adjacent.
    scales: float [groups, out], as stored.
    zeros: int32 [groups, out]; None: the middle, 2**(bits - 1). fp8 has none.
    bits: 4 or 8.
    group: inputs that share a scale and a zero point. The last group may have fewer.
    order: int64 [in], the input that each column belongs to; None if columns are in order.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group: int
    order: Tensor | None = None

    def dequantized(self) -> Tensor:
        """The weight, float32 [out, in], with columns in order."""
        padding = len(self.scales) * self.group - self.values.shape[1]
        groups = F.pad(self.values.float(), (0, padding)).unflatten(1, (-1, self.group))
        if self.values.dtype != FP8:
            groups = groups - (2 ** (self.bits - 1) if self.zeros is None else self.zeros.T[:, :, None])
        weight = (groups * self.scales.float().T[:, :, None]).flatten(1)[:, : self.values.shape[1]]
        return weight if self.order is None else torch.empty_like(weight).index_copy_(1, self.order, weight)

    def on_gpu(self, dtype: torch.dtype, device: torch.device) -> QuantizedWeight:
        """The weight for a GPU, without rounding anything. Args: dtype: of activations."""
        order = None if self.order is None else self.order.to(device)
        return QuantizedWeight(self._packed().to(device), dtype, order)

    def _packed(self) -> QuantizedMatrix:
        scales, in_features = self.scales.contiguous(), self.values.shape[1]
        if self.values.dtype == FP8:
            packed = F.pad(self.values.view(torch.uint8), (0, -in_features % TILE)).view(FP8)
            return QuantizedMatrix(packed, scales.float(), None, False, 8, self.group, in_features)
        zeros = self._signed_zeros()
        zeros = None if zeros is None else zeros.to(torch.float16).contiguous()
        return quantized_weights.pack(self._signed(), scales, zeros, True, self.bits, self.group)

    def tiled(self, dtype: torch.dtype) -> TiledWeight | None:
        """The weight in tiles on a CPU, or None if they cannot hold it. Tiles with groups round scales and offsets
        (scale * zero point) to float16. Args: dtype: of activations."""
        out_features, in_features = self.values.shape
        if self.order is not None or self.values.dtype == FP8:
            return None
        if self.bits == 8 and self.zeros is None and len(self.scales) == 1:
            tiles = tile_linear.tile_int8(self._signed(), self.scales[0].float())
            return TiledWeight(out_features, in_features, *tiles, dtype)
        scales = self.scales.float()
        overflows = scales.abs().max() * 2**self.bits > torch.finfo(torch.float16).max
        if self.group % BLOCK or in_features % self.group or overflows:
            return None
        repeats = self.group // BLOCK
        scales, zeros = scales.T.repeat_interleave(repeats, 1), self._signed_zeros()
        offsets = None if zeros is None else scales * zeros.T.repeat_interleave(repeats, 1)
        tiles = tile_linear.tile_blocks(Blocks(self._signed(), scales, offsets, self.bits))
        return TiledWeight(out_features, in_features, *tiles, dtype)

    def _signed(self) -> Tensor:
        """int8: integers of 8 bits from -128 on, as both kinds of weights store them. Those of 4 bits stay."""
        return (self.values ^ MIDDLE if self.bits == 8 else self.values).view(torch.int8)

    def _signed_zeros(self) -> Tensor | None:
        """Zero points of `_signed`, [groups, out]. None: they are 0."""
        if self.zeros is None:
            return None if self.bits == 8 else torch.full(self.scales.shape, 8)
        return self.zeros - (MIDDLE if self.bits == 8 else 0)


def join(parts: list[Matrix]) -> Matrix | None:
    """The rows of all parts as one matrix. None if their inputs are in different orders."""
    first = parts[0]
    for order in [part.order for part in parts]:
        if order is not first.order and (order is None or first.order is None or not order.equal(first.order)):
            return None
    values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(first.values.dtype)
    zeros = None if first.zeros is None else torch.cat([part.zeros for part in parts if part.zeros is not None], 1)
    scales = torch.cat([part.scales for part in parts], 1)
    return Matrix(values, scales, zeros, first.bits, first.group, first.order)
