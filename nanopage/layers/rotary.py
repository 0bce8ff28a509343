"""Rotary position embeddings (RoFormer, Su et al. 2021) and the ways checkpoints stretch them to longer contexts."""

import math

import torch
from torch import Tensor, nn

from nanopage.config.rope import RopeConfig


class RotaryEmbedding(nn.Module):
    """Computes the rotations of all heads: positions [T] -> (cos, sin) of each rope, [T, 1, rotated / 2] in `dtype`.
    A rope with a temperature has rotations of q and of k: [T, 2, rotated / 2].

    Args: ropes: of the model, each with the size of the heads that it rotates. None: there is no such rope.
    """

    frequencies: Tensor

    def __init__(self, *ropes: tuple[int, RopeConfig | None]):
        super().__init__()
        known = [(size, rope) for size, rope in ropes if rope is not None]
        frequencies, scales = zip(*(inverse_frequencies(*each) for each in known), strict=True)
        self.factors = [(scale, rope.temperature) for scale, (_, rope) in zip(scales, known, strict=True)]
        self.sizes = [len(each) for each in frequencies]
        self.register_buffer("frequencies", torch.cat(frequencies), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        rotations = []
        for frequencies, (scale, temperature) in zip(self.frequencies.split(self.sizes), self.factors, strict=True):
            # Angles are float32: bfloat16 cannot tell position 256 from 257.
            angles = positions[:, None, None].float() * frequencies
            cos, sin = angles.cos() * scale, angles.sin() * scale
            if temperature is not None:
                beta, length = temperature
                of_q = 1 + beta * (positions / length).floor().log1p()[:, None, None]
                cos, sin = torch.cat((cos * of_q, cos), dim=1), torch.cat((sin * of_q, sin), dim=1)
            rotations.append((cos.to(dtype), sin.to(dtype)))
        return rotations


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the heads of x [T, heads, head_dim] by the cos and sin [T, 1, rotated / 2] of RotaryEmbedding: the first
    `rotated` dimensions of each."""
    rotated = 2 * cos.shape[-1]
    if rotated < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotated], cos, sin), x[..., rotated:]), dim=-1)
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((torch.addcmul(x1 * cos, x2, sin, value=-1), torch.addcmul(x2 * cos, x1, sin)), dim=-1)


def inverse_frequencies(head_dim: int, rope: RopeConfig) -> tuple[Tensor, float]:
    """The frequencies, float32 [rotated / 2] on the CPU, and the scale of cos and sin. For all `config.ROPE_TYPES`,
    and "none", which does not rotate."""
    head_dim = rope.num_rotated(head_dim)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.rope_type == "none":
        return torch.zeros_like(frequencies), 1.0
    if rope.rope_type == "proportional":  # Gemma 4: the slowest dimensions are not rotated
        frequencies[int(rope.params["partial_rotary_factor"] * head_dim // 2) :] = 0
    if rope.rope_type in ("linear", "proportional"):  # position interpolation, Chen et al. 2023
        return frequencies / rope.params["factor"], 1.0
    if rope.rope_type == "llama3":
        return _llama3(frequencies, rope.params), 1.0
    if rope.rope_type == "yarn":
        return _yarn(frequencies, head_dim, rope.theta, rope.params)
    if rope.rope_type == "longrope":
        return _longrope(frequencies, rope.params)
    return frequencies, 1.0  # also "dynamic": it differs only beyond max_position_embeddings, where no sequence goes


def _llama3(frequencies: Tensor, params: dict) -> Tensor:
    """Llama 3.1: stretch the dimensions that turn rarely in the original context, keep those that turn often, and blend
    in between."""
    turns = params["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # in the original context
    low, high = params["low_freq_factor"], params["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / params["factor"]


def _yarn(frequencies: Tensor, head_dim: int, theta: float, params: dict) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): interpolate slow dimensions, keep fast ones, and sharpen attention by `scale`."""
    factor, original = params["factor"], params["original_max_position_embeddings"]

    def dimension_turning(times: float) -> float:  # the dimension that turns this often in the original context
        return head_dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_turning(params.get("beta_fast") or 32)
    high = dimension_turning(params.get("beta_slow") or 1)
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / max(high - low, 0.001)
    interpolate = ramp.clamp(0, 1)
    frequencies = frequencies * (1 - interpolate) + frequencies / factor * interpolate

    scale = params.get("attention_factor")
    if scale is None:
        mscale, mscale_all_dim = params.get("mscale"), params.get("mscale_all_dim")
        above, below = (mscale, mscale_all_dim) if mscale and mscale_all_dim else (1.0, 0.0)
        scale = magnitude(factor, above) / magnitude(factor, below)
    return frequencies, float(scale)


def magnitude(factor: float, mscale: float) -> float:
    """How much YaRN sharpens attention to a context that is stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(frequencies: Tensor, params: dict) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al. 2024): a divisor for each frequency, one list for sequences within the original context and
    one for longer ones. As in vLLM, the most tokens that a sequence may have decide which list is used."""
    original = params["original_max_position_embeddings"]
    factors = params["long_factor" if params["length"] > original else "short_factor"]
    factor = params.get("factor") or params["max_position_embeddings"] / original
    scale = params.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return frequencies / torch.tensor(factors, dtype=torch.float32, device="cpu"), float(scale)
