"""Operators that a compiled graph calls but does not look into.

Paged attention decides by data (how long, how many), and oneDNN's packed weights are opaque: both would break the
graph. As operators of the library "nanopage" they stay single calls inside a compiled decoder layer. Eager code calls
the same functions directly.
"""

import torch
from torch import Tensor

from nanopage.kernels import packed_linear, pages, reference

_library = torch.library.Library("nanopage", "DEF")


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    query_lens: Tensor,
    seq_lens: Tensor,
    window: int | None,
) -> Tensor:
    """Write k and v, then attend: see layers/attention.py. Returns [T, num_heads, head_dim], contiguous."""
    pages.write(k, v, kv_cache, slot_mapping)
    return reference.paged_attention(q, kv_cache, block_tables, query_lens, seq_lens, window)


_library.define(
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) kv_cache, Tensor slot_mapping, Tensor block_tables, "
    "Tensor query_lens, Tensor seq_lens, int? window) -> Tensor"
)
_library.impl("paged_attention", paged_attention, "CompositeExplicitAutograd")


@torch.library.register_fake("nanopage::paged_attention", lib=_library)
def _(q, k, v, kv_cache, slot_mapping, block_tables, query_lens, seq_lens, window):
    return torch.empty_like(q, memory_format=torch.contiguous_format)


_library.define("packed_linear(Tensor x, Tensor packed_weight, Tensor? bias) -> Tensor")
_library.impl("packed_linear", packed_linear.packed_linear, "CompositeExplicitAutograd")


@torch.library.register_fake("nanopage::packed_linear", lib=_library)
def _(x, packed_weight, bias):
    return x.new_empty(*x.shape[:-1], packed_weight.shape[0])
