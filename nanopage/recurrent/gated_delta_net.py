"""Gated DeltaNet (Yang et al. 2024), the linear attention of Qwen3-Next and Qwen3.5."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopage.config.model import ModelConfig
from nanopage.layers.linear import Linear
from nanopage.layers.mlp import ACTIVATIONS
from nanopage.layers.norm import RMSNorm
from nanopage.recurrent.delta_rule import delta_rule
from nanopage.recurrent.sequences import CHUNK
from nanopage.recurrent.states import States, causal_conv


class GatedDeltaNet(nn.Module):
    """q, k, v ─▶ short convolution ─▶ delta rule ─▶ norm ─▶ gate z ─▶ out_proj.

    Its state is `config.state`: the last inputs of the convolution [channels, width - 1], where the channels are those
    of q, k and v, and the matrices of the delta rule [heads, key_dim, value_dim]. Several heads may share a key head.
    """

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        (channels, past), (self.heads, self.key_dim, self.value_dim) = config.state
        self.index, self.shapes, hidden_size = index, config.state, config.hidden_size
        self.v_size, self.is_tiled = self.heads * self.value_dim, config.from_gguf
        self.qk_size = (channels - self.v_size) // 2
        self.key_heads = self.qk_size // self.key_dim
        self.in_proj = Linear(hidden_size, self.parts(channels))
        self.conv1d = nn.Conv1d(channels, channels, past + 1, groups=channels, bias=False)
        self.activation = ACTIVATIONS[config.activation]
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.norm = RMSNorm(self.value_dim, config.rms_norm_eps)
        self.out_proj = Linear(self.v_size, hidden_size)

    def parts(self, channels: int) -> dict[str, int]:
        """The parts of `in_proj`."""
        heads = self.heads
        return {"in_proj_qkv": channels, "in_proj_z": self.v_size, "in_proj_b": heads, "in_proj_a": heads}

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [T, hidden_size] -> q, k and v [T, channels], the gate z [T, v_size], and b and a [T, heads], of which beta
        and the decay are made."""
        qkv, z, b, a = self.in_proj(x).split([*self.in_proj.parts.values()], dim=-1)
        return qkv, z, b, a

    def forward(self, x: Tensor, states: States) -> Tensor:
        """x [T, hidden_size] -> same. From the convolution to the gate, numbers have the dtype of the state."""
        dtype, prompts = states.cache.dtype, states.sequences.prompts
        qkv, z, b, a = (part.to(dtype) for part in self.project(x))
        qkv, after = causal_conv(qkv, states.read(0), self.conv1d.weight[:, 0], prompts)
        states.write(0, after)
        q, k, v = self.activation(qkv).split([self.qk_size, self.qk_size, self.v_size], dim=-1)
        q, k, v = self._unit(q) * self.key_dim**-0.5, self._unit(k), v.unflatten(-1, (-1, self.value_dim))
        log_decay = -self.A_log.to(dtype).exp() * F.softplus(a + self.dt_bias)
        if x.is_cuda and (prompts is None or prompts.tokens.shape[1] < CHUNK):
            from nanopage.recurrent.delta_kernel import update  # imports Triton

            y = update(q, k, v, log_decay, b.sigmoid(), states, 1)
        else:
            y, state = delta_rule(q, k, v, log_decay, b.sigmoid(), states.read(1), prompts)
            states.write(1, state)
        return self.out_proj((self.norm(y).flatten(1) * F.silu(z)).to(x.dtype))

    def _unit(self, x: Tensor) -> Tensor:
        """The vectors of each key head, [T, qk_size], divided by their norms, for every head: [T, heads, key_dim]."""
        x = x.unflatten(-1, (-1, self.key_dim))
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
        times = self.heads // self.key_heads
        # In GGUF files, the heads that share a key head are not adjacent.
        return x.repeat(1, times, 1) if self.is_tiled else x.repeat_interleave(times, dim=1)


class InterleavedDeltaNet(GatedDeltaNet):
    """The rows of the projections are ordered by key heads: q, k, v and z of each one, and b and a of each one."""

    def parts(self, channels: int) -> dict[str, int]:
        return {"in_proj_qkvz": channels + self.v_size, "in_proj_ba": 2 * self.heads}

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        qkvz, ba = self.in_proj(x).split([*self.in_proj.parts.values()], dim=-1)
        v_size = self.v_size // self.key_heads
        parts = qkvz.unflatten(-1, (self.key_heads, -1)).split([self.key_dim, self.key_dim, v_size, v_size], dim=-1)
        q, k, v, z = (part.flatten(1) for part in parts)
        return torch.cat((q, k, v), dim=-1), z, *self.b_and_a(ba)

    def b_and_a(self, ba: Tensor) -> tuple[Tensor, Tensor]:
        b, a = (part.flatten(1) for part in ba.unflatten(-1, (self.key_heads, -1)).chunk(2, dim=-1))
        return b, a


class PartlyInterleavedDeltaNet(InterleavedDeltaNet):
    """Only b and a are ordered by key heads, as in GGUF files. The heads that share a key head are adjacent."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index)
        self.is_tiled = False

    def parts(self, channels: int) -> dict[str, int]:
        return {"in_proj_qkv": channels, "in_proj_z": self.v_size, "in_proj_ba": 2 * self.heads}

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        qkv, z, ba = self.in_proj(x).split([*self.in_proj.parts.values()], dim=-1)
        return qkv, z, *self.b_and_a(ba)
