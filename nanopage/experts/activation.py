"""The activation of GPT-OSS's experts."""

import torch
from torch import Tensor


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """gate * sigmoid(alpha * gate) * (up + 1), where gate is at most `limit`, and up lies between -limit and limit.

    Shape: [T, 2 * intermediate_size] -> [T, intermediate_size]. Numbers of gate and up alternate.
    """
    gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)
