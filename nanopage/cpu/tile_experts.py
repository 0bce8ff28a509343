"""Mixtures of experts with weights in tiles (see tile_linear.py).

One operator computes a whole mixture: it chooses the experts of each token, sorts the tokens by expert, and multiplies
the tokens of each expert at once. tile_experts.cpp does not read the weights of experts that no token has.

The operator takes the addresses of weights, not tensors. A call with the tensors of a hundred experts would take longer
than computing a token, and weights stay where they are, in a mapped file for example.
"""

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopage.cpu import tile_linear
from nanopage.cpu.packed_linear import library
from nanopage.experts.routing import route


def addresses_of(experts: Sequence[Sequence[Tensor]]) -> Tensor:
    """The addresses of gate_up, gate_up_scales, down and down_scales of each expert: int64 [experts, 4]. The tensors
    must be contiguous, and live as long as the addresses are used."""
    return torch.tensor([[tensor.data_ptr() for tensor in tensors] for tensors in experts], dtype=torch.int64)


def experts(
    x: Tensor,
    gate: Tensor,
    addresses: Tensor,
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
        addresses: as `addresses_of` returns them.
        gate_up, gate_up_scales: one expert's tiles and scales of a weight [2 * intermediate_size, hidden_size], whose
            first half is the gate of the feed-forward layer. Any kind of tile_linear.py, but the same for all experts.
        down, down_scales: the same for a weight [hidden_size, intermediate_size].
        num_chosen, normalize: as in `route`.

    Returns: [T, hidden_size].
    """
    chosen, weights = route(F.linear(x, gate), num_chosen, normalize)
    y = x.new_zeros(x.shape, dtype=weights.dtype)
    likes = gate_up, gate_up_scales, down, down_scales
    for expert, of_expert in enumerate(addresses.tolist()):
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        tiles, scales, down_tiles, down_tile_scales = map(_tensor_at, of_expert, likes)
        both = tile_linear.product(x[tokens], tiles, scales)
        gates, ups = both[:, : 2 * intermediate_size].chunk(2, dim=1)
        out = tile_linear.product(F.silu(gates) * ups, down_tiles, down_tile_scales)[:, : x.shape[1]]
        y[tokens] += out * weights[tokens, places, None]
    return y.to(x.dtype)


def _tensor_at(address: int, like: Tensor) -> Tensor:
    """The tensor at an address, with the dtype and shape of `like`."""
    return torch.frombuffer((ctypes.c_char * like.nbytes).from_address(address), dtype=like.dtype).view(like.shape)


library.define(
    "tile_experts(Tensor x, Tensor gate, Tensor addresses, Tensor gate_up, Tensor gate_up_scales, Tensor down, "
    "Tensor down_scales, int intermediate_size, int num_chosen, bool normalize) -> Tensor"
)
library.impl("tile_experts", experts, "CompositeExplicitAutograd")


@torch.library.register_fake("nanopage::tile_experts", lib=library)
def _(x, *_):
    return torch.empty_like(x)
