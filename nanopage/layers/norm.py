"""RMSNorm (Zhang & Sennrich 2019): x / rms(x) * weight. Models differ in when they round."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Normalizes the last dimension, in float32 for half-precision inputs. Shape: [..., size] -> same.

    Args:
        offset: multiply by offset + weight, and round the product to the input's dtype (Gemma: 1; OLMo 2: 0). None:
            multiply by weight after rounding (Llama).
    """

    def __init__(self, size: int, eps: float, offset: float | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        y = unit_norm(x, self.eps)
        if self.offset is None:
            return y.to(x.dtype) * self.weight
        return (y * (self.offset + self.weight.to(y.dtype))).to(x.dtype)


def unit_norm(x: Tensor, eps: float) -> Tensor:
    """x / rms(x), in float32 for half-precision inputs. Shape: [..., size] -> same."""
    # Not F.rms_norm: on a CPU it is several kernels, and several times slower on long prompts.
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
