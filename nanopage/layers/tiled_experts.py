"""Mixtures of experts for a CPU, computed by one operator (see kernels/cpu/tile_experts.py).

`stack_experts` replaces the experts of a model with these once the weights are loaded, and tiled if they are to be
integers or 16 bits.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nanopage.kernels.cpu import tile_experts  # noqa: F401 (registers the operator)
from nanopage.layers.moe import Experts, MixtureOfExperts, Router
from nanopage.layers.tiled import TiledLinear, tile


class TiledExperts(nn.Module):
    """Experts whose weights exist only in tiles, those of all experts in one tensor.

    Args: experts: all of a mixture, with tiled linear layers. They lose their weights.

    product: computes the mixture when a step runs eagerly, as the operator nanopage::tile_experts does.
    """

    gate_up: Tensor
    gate_up_scales: Tensor
    down: Tensor
    down_scales: Tensor

    def __init__(self, experts: Experts):
        super().__init__()
        members: list[Any] = list(experts)
        self.intermediate_size = members[0].down_proj.in_features
        self.product: Callable[..., Tensor] = torch.ops.nanopage.tile_experts
        for name in ("gate_up", "down"):
            linears: list[TiledLinear] = [getattr(expert, f"{name}_proj") for expert in members]
            for part in ("tiles", "scales"):
                stacked = torch.stack([getattr(linear, part) for linear in linears])
                self.register_buffer(name if part == "tiles" else f"{name}_scales", stacked, persistent=False)
                for linear in linears:
                    linear.register_buffer(part, None)

    def forward(self, x: Tensor, router: Router) -> Tensor:
        """As `Experts.forward`."""
        weights = self.gate_up, self.gate_up_scales, self.down, self.down_scales
        return self.product(x, router.weight, *weights, self.intermediate_size, router.num_chosen, router.normalize)


def stack_experts(module: nn.Module, dtype: torch.dtype) -> None:
    """Replace the experts of all mixtures in a module, one mixture after the other, so that at most one exists twice.

    Args: dtype: of weights that are not tiled yet: float32 or bfloat16.
    """
    for mixture in [child for child in module.modules() if isinstance(child, MixtureOfExperts)]:
        assert isinstance(mixture.experts, Experts)
        tile(mixture.experts, str(dtype).removeprefix("torch."))
        mixture.experts = TiledExperts(mixture.experts)
