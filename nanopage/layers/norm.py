"""RMSNorm (Zhang & Sennrich 2019): x / rms(x) * weight."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Normalizes the last dimension, in float32 for half-precision inputs. Shape: [..., size] -> same."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # Not F.rms_norm: on a CPU it is several kernels, and several times slower on long prompts.
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return y.to(x.dtype) * self.weight
