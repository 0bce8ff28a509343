"""Mamba-2's mixer (Dao & Gu 2024), as Mamba-2 and Granite 4 have it: a short convolution and a state for each head, in
place of attention.

    gate, x|b|c, t = in_proj(input)          x|b|c = silu(conv(x|b|c))          t = softplus(t + dt_bias)
    y = ssd(t x, -t exp(A_log), b, c) + D x                                     out_proj(norm(y * silu(gate)))

ssd.py computes the third line. It keeps a matrix of each head, and the convolution keeps its last inputs.
"""

from dataclasses import dataclass
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopage.checks.fields import Fields
from nanopage.config.model import ModelConfig
from nanopage.files.model_files import shown
from nanopage.layers.linear import Linear
from nanopage.layers.mlp import ACTIVATIONS
from nanopage.recurrent.sequences import Prompts
from nanopage.recurrent.ssd import scan
from nanopage.recurrent.states import States, causal_conv

INFINITY = {"__float__": "Infinity"}  # as transformers 5 writes it


@dataclass(frozen=True)
class Mamba2Config:
    """The sizes of a mixer, and what else it needs to know. `ModelConfig.mixer` has the fields as plain data.

    head_dim, state_size: P and N of the state of a head.
    num_groups: of heads, which share b and c.
    width: of the convolution, the present token included.
    bias, conv_bias: whether the projections, and the convolution, have biases.
    time_step_limit: the least and the greatest t. None: there is no greatest.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    width: int
    bias: bool
    conv_bias: bool
    time_step_limit: tuple[float, float | None]

    @property
    def inner_size(self) -> int:
        """Of x and the gate."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: x, b and c."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def state(self) -> tuple[tuple[int, ...], ...]:
        """As `ModelConfig.state`."""
        return (self.channels, self.width - 1), (self.num_heads, self.head_dim, self.state_size)


def read_mixer(fields: Fields, sizes: dict[str, tuple[str, int]], bias: bool, conv_bias: bool) -> Mamba2Config:
    """The mixer of a config.json.

    Args: sizes: of Mamba2Config, and "expand", inner_size / hidden_size: their names in config.json, and their
        defaults. The default of "head_dim" is what the others leave.
    """
    names = {size: name for size, (name, _) in sizes.items()}
    values: dict[str, Any] = {size: fields.size(*sizes[size]) for size in sizes if size != "head_dim"}
    num_heads, inner_size = values["num_heads"], values.pop("expand") * fields.size("hidden_size")
    head_dim = inner_size // num_heads
    if fields.values.get(names["head_dim"]) not in (None, "auto"):
        head_dim = fields.size(names["head_dim"])
    if num_heads * head_dim != inner_size:
        problem = f"{num_heads} of {head_dim} dimensions are not {names['expand']} * hidden_size = {inner_size}"
        raise fields.error(names["num_heads"], problem)
    if num_heads % (num_groups := values["num_groups"]):
        raise fields.error(names["num_groups"], f"{num_groups} does not divide {names['num_heads']}={num_heads}")
    biases = {"bias": bias, "conv_bias": conv_bias}
    return Mamba2Config(head_dim=head_dim, **values, **biases, time_step_limit=_time_step_limit(fields))


def _time_step_limit(fields: Fields) -> tuple[float, float | None]:
    limit: Any = fields.values.get("time_step_limit")
    if limit is None:
        return 0.0, None
    ends = [inf if end == INFINITY else end for end in limit] if isinstance(limit, list) else []
    numbers = all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends)
    if len(ends) != 2 or not numbers or not 0 <= ends[0] <= ends[1] or ends[0] == inf:
        raise fields.error("time_step_limit", f"must be two numbers from 0 up, in order, got {shown(limit)}")
    return ends[0], None if ends[1] == inf else ends[1]


class Mamba2Mixer(nn.Module):
    """Shape: [T, hidden_size] -> same. Args: index: of the layer."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        sizes = Mamba2Config(**config.mixer)
        self.index, self.sizes, self.shapes = index, sizes, sizes.state
        self.activation = ACTIVATIONS[config.activation]
        parts = sizes.inner_size, sizes.channels, sizes.num_heads
        self.in_proj = Linear(config.hidden_size, sum(parts), sizes.bias)
        self.conv1d = nn.Conv1d(parts[1], parts[1], sizes.width, groups=parts[1], bias=sizes.conv_bias)
        self.dt_bias, self.A_log, self.D = (nn.Parameter(torch.empty(sizes.num_heads)) for _ in range(3))
        self.norm = GatedNorm(sizes.inner_size, sizes.num_groups, config.rms_norm_eps)
        self.out_proj = Linear(sizes.inner_size, config.hidden_size, sizes.bias)

    def forward(self, x: Tensor, states: States) -> Tensor:
        sizes, dtype, prompts = self.sizes, states.cache.dtype, states.sequences.prompts
        gate, x, t = self.in_proj(x).split([sizes.inner_size, sizes.channels, sizes.num_heads], dim=-1)
        x, t = x.to(dtype), t.to(dtype)  # until the norm
        x, after = causal_conv(x, states.read(0), self.conv1d.weight[:, 0], prompts)
        states.write(0, after)
        x = self.activation(x if self.conv1d.bias is None else x + self.conv1d.bias)
        y, state = self.ssd(x, t, states.read(1), prompts)
        states.write(1, state)
        return self.out_proj(self.norm(y, gate))

    def ssd(self, x: Tensor, t: Tensor, state: Tensor, prompts: Prompts | None) -> tuple[Tensor, Tensor]:
        """y [T, inner_size] and the states after the step, of x|b|c [T, channels] and t [T, num_heads]."""
        sizes, groups = self.sizes, self.sizes.num_groups
        by_group = (groups, -1)
        both = groups * sizes.state_size
        x, b, c = x.split([sizes.inner_size, both, both], dim=-1)
        x, b, c = x.unflatten(-1, (groups, -1, sizes.head_dim)), b.unflatten(-1, by_group), c.unflatten(-1, by_group)
        t = F.softplus(t + self.dt_bias).clamp(*sizes.time_step_limit)
        decay = (-t * self.A_log.to(t.dtype).exp()).unflatten(-1, by_group)
        t = t.unflatten(-1, by_group)[..., None]
        y, state = scan(x * t, decay, b, c, state.unflatten(1, by_group), prompts)
        y = torch.addcmul(y, x, self.D.to(t.dtype).view(groups, -1, 1))
        return y.flatten(1), state.flatten(1, 2)


class GatedNorm(nn.Module):
    """The RMS norm of x * silu(gate), of each group of dimensions by itself: x [T, size] in float32 or float64, and the
    gate [T, size] -> [T, size] in the dtype of the gate."""

    def __init__(self, size: int, num_groups: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.num_groups, self.eps = num_groups, eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = (x * F.silu(gate.to(x.dtype))).unflatten(-1, (self.num_groups, -1))
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y.flatten(-2) * self.weight).to(gate.dtype)
