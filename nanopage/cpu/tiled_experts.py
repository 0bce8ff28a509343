"""Mixtures of experts for a CPU, computed by one operator (see cpu/tile_experts.py).

`join_experts` replaces the experts of a model with TiledExperts, after their weights have been loaded (and tiled, if
they are to be integers or 16 bits).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopage.cpu.tile_experts import addresses_of
from nanopage.cpu.tiled import tile
from nanopage.experts.moe import Experts, MixtureOfExperts, Router
from nanopage.layers.mlp import MLP


class TiledExperts(nn.Module):
    """Experts whose weights are in tiles, all of the same kind.

    product: computes the mixture when a step runs eagerly, as the operator nanopage::tile_experts does.
    """

    addresses: Tensor

    def __init__(self, experts: Experts):
        super().__init__()
        members: list[Any] = list(experts)
        self.experts = [experts]  # in a list: compiled code gets only the first expert's tensors as arguments
        self.first = members[0]
        weights = [(expert.gate_up_proj.weight, expert.down_proj.weight) for expert in members]
        tensors = [[up.tiles, up.scales, down.tiles, down.scales] for up, down in weights]
        kinds = {tuple((tensor.dtype, tensor.shape) for tensor in of_expert) for of_expert in tensors}
        if len(kinds) > 1:
            raise ValueError("the experts of a layer are stored in different ways: enforce_eager=True computes them")
        self.register_buffer("addresses", addresses_of(tensors), persistent=False)
        self.product: Callable[..., Tensor] = torch.ops.nanopage.tile_experts

    def forward(self, x: Tensor, router: Router) -> Tensor:
        """As `Experts.forward`."""
        up, down = self.first.gate_up_proj.weight, self.first.down_proj.weight
        numbers = down.in_features, router.num_chosen, router.normalize
        tensors = up.tiles, up.scales, down.tiles, down.scales
        return self.product(x, router.weight, self.addresses, *tensors, *numbers)


def can_join(module: nn.Module) -> bool:
    """Whether the operator knows all experts in a module: plain feed-forward layers with SiLU and no biases, and a
    router that does no more than to choose them."""
    mixtures = [child for child in module.modules() if isinstance(child, MixtureOfExperts)]
    experts: list[Any] = [expert for mixture in mixtures for expert in mixture.experts]  # type: ignore[attr-defined]
    return all(type(mixture.gate) is Router for mixture in mixtures) and all(
        type(expert).forward is MLP.forward
        and expert.activation is F.silu
        and expert.gate_up_proj.bias is None
        and expert.down_proj.bias is None
        for expert in experts
    )


def join_experts(module: nn.Module, dtype: torch.dtype) -> None:
    """Replace the experts of all mixtures in a module. `can_join` must be true for it.

    Args: dtype: the dtype of weights that are not tiled yet: float32 or bfloat16.
    Raises: ValueError if experts of a mixture are stored in different ways.
    """
    for mixture in [child for child in module.modules() if isinstance(child, MixtureOfExperts)]:
        assert isinstance(mixture.experts, Experts)
        tile(mixture.experts, str(dtype).removeprefix("torch."))
        mixture.experts = TiledExperts(mixture.experts)
