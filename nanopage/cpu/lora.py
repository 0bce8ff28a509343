"""The products of LoRA adapters on a CPU: in plain torch, one adapter after another, and as an operator that compiled
code computes with lora.cpp."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanopage.cpu.packed_linear import library


def add_adapters(y: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor, sizes: list[int]) -> Tensor:
    """As `adapters.layers.Add`: one product for all tokens of an adapter. Changes y."""
    rank, of_tokens = a.shape[2], slots.numpy()
    for slot in np.unique(of_tokens).tolist():
        if slot < 0:
            continue
        index = torch.from_numpy(np.nonzero(of_tokens == slot)[0])
        small = F.linear(x[index], a[slot].flatten(0, 1))
        weights = b[slot].split(sizes, 1)
        added = [h @ part for h, part in zip(small.split(rank, 1), weights, strict=True)]
        y.index_add_(0, index, added[0] if len(added) == 1 else torch.cat(added, 1))
    return y


library.define("add_adapters(Tensor y, Tensor x, Tensor a, Tensor b, Tensor slots, int[] sizes) -> Tensor")
library.impl("add_adapters", lambda y, *others: add_adapters(y.clone(), *others), "CompositeExplicitAutograd")


@torch.library.register_fake("nanopage::add_adapters", lib=library)
def _(y, x, a, b, slots, sizes):
    return y.new_empty(y.shape)
