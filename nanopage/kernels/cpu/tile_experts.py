"""Mixtures of experts with weights in tiles (see tile_linear.py), of all experts in one tensor.

One operator computes a whole mixture: it chooses the experts of each token, sorts the tokens by expert, and multiplies
the tokens of each expert at once. tile_experts.cpp does that without reading the weights of experts that nobody chose.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopage.kernels.cpu import tile_linear
from nanopage.kernels.cpu.packed_linear import library
from nanopage.kernels.routing import route


def experts(
    x: Tensor,
    gate: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    intermediate_size: int,
    num_chosen: int,
    normalize: bool,
) -> Tensor:
    """Compute a mixture of experts with SiLU: the weighted sum of the outputs of each token's experts.

    Args:
        x: [T, hidden_size].
        gate: the router, [experts, hidden_size], of x's dtype.
        gate_up, gate_up_scales: for each expert, tiles and scales of a weight [2 * intermediate_size, hidden_size],
            whose first half is the gate of the feed-forward layer. All kinds of tile_linear.py, stacked.
        down, down_scales: the same of a weight [hidden_size, intermediate_size].
        num_chosen, normalize: as in `route`.

    Returns: [T, hidden_size].
    """
    chosen, weights = route(F.linear(x, gate), num_chosen, normalize)
    y = x.new_zeros(x.shape, dtype=weights.dtype)
    for expert in range(len(gate)):
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        both = tile_linear.product(x[tokens], gate_up[expert], gate_up_scales[expert])
        gates, ups = both[:, : 2 * intermediate_size].chunk(2, dim=1)
        out = tile_linear.product(F.silu(gates) * ups, down[expert], down_scales[expert])[:, : x.shape[1]]
        y[tokens] += out * weights[tokens, places, None]
    return y.to(x.dtype)


library.define(
    "tile_experts(Tensor x, Tensor gate, Tensor gate_up, Tensor gate_up_scales, Tensor down, Tensor down_scales, "
    "int intermediate_size, int num_chosen, bool normalize) -> Tensor"
)
library.impl("tile_experts", experts, "CompositeExplicitAutograd")


@torch.library.register_fake("nanopage::tile_experts", lib=library)
def _(x, *_):
    return torch.empty_like(x)
