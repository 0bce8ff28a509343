"""The vision tower of Qwen2-VL and Qwen2.5-VL (Wang et al. 2024; Bai et al. 2025), for images of any size.

pixels ─▶ patches ─▶ layers ─▶ merger: norm, joins the patches of a token, feed-forward ─▶ rows of tokens

a layer:   x = x + attention(norm(x))
           x = x + mlp(norm(x))

In attention, half of a head is rotated by the row of a patch, the other half by its column. In most layers of
Qwen2.5-VL, patches attend within windows of 8 x 8. The matrices of the tower stay floats, whatever `quantization` says.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopage.device import to_device
from nanopage.layers.mlp import ACTIVATIONS
from nanopage.layers.norm import RMSNorm
from nanopage.layers.rotary import rotate
from nanopage.vision.qwen2_vl import QwenConfig

EPS = 1e-6  # of the norms


class QwenTower(nn.Module):
    """Makes the rows of images. Its parts have the names of checkpoints."""

    def __init__(self, config: QwenConfig, hidden_size: int):
        super().__init__()
        self.config, size, patch = config, config.hidden_size, config.patch_size
        proj = nn.Conv3d(3, size, (config.frames, patch, patch), bias=False)  # of patches that do not overlap
        self.patch_embed = nn.ModuleDict({"proj": proj})
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        joined = size * config.merge_size**2
        mlp = nn.Sequential(nn.Linear(joined, joined), nn.GELU(), nn.Linear(joined, hidden_size))
        self.merger = nn.ModuleDict({"ln_q": make_norm(config), "mlp": mlp})

    def forward(self, payload: dict[str, Tensor]) -> Tensor:
        """Compute the rows of the tokens of N images of one size, line by line.

        Args: payload: "pixels" uint8 [N, 3, height, width]; "scale" and "offset", float32 [N, 3], which prepare them.
        Returns: [N, length, hidden_size]
        """
        config = self.config
        weight: Any = self.patch_embed["proj"].weight
        pixels, scale, offset = (payload[name] for name in ("pixels", "scale", "offset"))
        prepared = (pixels * scale[..., None, None] + offset[..., None, None]).to(weight.dtype)
        x = F.linear(self._patches(prepared), weight.flatten(1))
        rows, columns = places_of([side // config.patch_size for side in pixels.shape[2:]], config.merge_size)
        image = torch.arange(len(pixels)).repeat_interleave(len(rows))
        rows, columns = rows.repeat(len(pixels)), columns.repeat(len(pixels))
        rotation = self._rotation(rows, columns, x.device)
        side = config.window // config.unit * config.merge_size  # of a window, in patches
        whole = Groups.of(image, x.device)
        windows = whole if not side else Groups.of((image * len(x) + rows // side) * len(x) + columns // side, x.device)
        for index, block in enumerate(self.blocks):
            x = block(x, rotation, whole if index in config.whole_layers else windows)
        norm, mlp = self.merger.values()
        return mlp(norm(x).view(len(pixels), -1, x.shape[1] * config.merge_size**2))

    def _patches(self, pixels: Tensor) -> Tensor:
        """pixels [N, 3, height, width] -> the P patches of all images, those of a token one after the other: [P, 3 *
        frames * patch_size ** 2]"""
        (*_, height, width), patch, merge = pixels.shape, self.config.patch_size, self.config.merge_size
        x = pixels.view(-1, 3, height // (merge * patch), merge, patch, width // (merge * patch), merge, patch)
        x = x.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, 3, 1, patch, patch)
        return x.expand(-1, -1, self.config.frames, -1, -1).flatten(1)

    def _rotation(self, rows: Tensor, columns: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin for `rotate`: float32 [P, 1, head_dim / 2]"""
        size = self.config.hidden_size // self.config.num_heads // 2
        frequencies = 1.0 / self.config.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        angles = torch.cat([rows[:, None] * frequencies, columns[:, None] * frequencies], dim=1)
        angles = to_device(angles[:, None], device)
        return angles.cos(), angles.sin()


def places_of(sides: list[int], merge: int) -> tuple[Tensor, Tensor]:
    """The row and the column of each patch, int64 [P] on the CPU. Args: sides: the height and the width in patches."""
    height, width = sides
    shape = height // merge, width // merge, merge, merge
    rows = torch.arange(height).view(-1, 1, merge, 1).expand(shape)
    return rows.flatten(), torch.arange(width).view(1, -1, 1, merge).expand(shape).flatten()


class Groups(NamedTuple):
    """Groups of patches that attend to each other: G groups of up to L patches.

    members  int64 [G, L], patches; 0 where a group is smaller
    real     [G, 1, 1, L], where it is not. None: all groups have L patches
    back     int64 [P], the place of each patch in `members`
    """

    members: Tensor
    real: Tensor | None
    back: Tensor

    @classmethod
    def of(cls, labels: Tensor, device: torch.device) -> "Groups":
        """Args: labels: of the group of each patch, int64 [P] on the CPU."""
        _, group, counts = labels.unique(return_inverse=True, return_counts=True)
        most = int(counts.max())
        order, starts = group.argsort(stable=True), counts.cumsum(0) - counts
        back = torch.empty_like(group)
        back[order] = torch.arange(len(group)) + (torch.arange(len(counts)) * most - starts)[group[order]]
        members, real = torch.zeros(2, len(counts) * most, dtype=torch.int64)
        members[back], real[back] = torch.arange(len(group)), 1
        mask = None if real.all() else to_device(real.view(-1, 1, 1, most).bool(), device)
        return cls(to_device(members.view(-1, most), device), mask, to_device(back, device))


def make_norm(config: QwenConfig) -> nn.Module:
    return RMSNorm(config.hidden_size, EPS) if config.gated else nn.LayerNorm(config.hidden_size, EPS)


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm."""

    def __init__(self, config: QwenConfig):
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.num_heads = config.num_heads
        self.activation = quick_gelu if config.activation == "quick_gelu" else ACTIVATIONS[config.activation]
        self.norm1, self.norm2 = make_norm(config), make_norm(config)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(size, 3 * size), "proj": nn.Linear(size, size)})
        into, out = (("gate_proj", "up_proj"), "down_proj") if config.gated else (("fc1",), "fc2")
        self.mlp = nn.ModuleDict({name: nn.Linear(size, inner) for name in into} | {out: nn.Linear(inner, size)})

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], groups: Groups) -> Tensor:
        """x [P, hidden_size] -> same"""
        x = x + self._attention(self.norm1(x), rotation, groups)
        gate, *up, down = self.mlp.values()
        y = self.norm2(x)
        inner = self.activation(gate(y))
        return x + down(inner * up[0](y) if up else inner)

    def _attention(self, x: Tensor, rotation: tuple[Tensor, Tensor], groups: Groups) -> Tensor:
        q, k, v = self.attn["qkv"](x).unflatten(1, (3, self.num_heads, -1)).unbind(1)
        q, k = (rotate(heads.float(), *rotation).to(x.dtype) for heads in (q, k))  # in float32, as in transformers
        q, k, v = (heads[groups.members].transpose(1, 2) for heads in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, groups.real).transpose(1, 2)
        return self.attn["proj"](attended.flatten(2).flatten(0, 1)[groups.back])
