"""Paged attention as the models see it: write this step's K and V to the cache, attend over each sequence's pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanopage.kernels import pages, reference
from nanopage.kernels.cpu.flash_decoding import Splits, flash_decode

if TYPE_CHECKING:
    from nanopage.kernels.paged_attention import Step


@dataclass(slots=True)
class AttentionMetadata:
    """Where the step's T tokens of B sequences live. Sequences with a single token come first.

    slot_mapping  int64 [T]              block * block_size + offset of each token; fewer than T on a CPU, or -1 on a
                                         GPU, where the last tokens are padding
    block_tables  int64 [B, max_blocks]  physical block of each logical block, padded with the sequence's first
    query_lens    int64 [B], on the CPU  how many of the step's tokens are each sequence's
    seq_lens      int64 [B], on the CPU  tokens of each sequence including this step's
    splits        on a CPU, if every sequence has a single token and the layer is compiled: what flash_decode reads
    step          where Triton's kernels are used: what they read
    """

    slot_mapping: Tensor
    block_tables: Tensor
    query_lens: Tensor
    seq_lens: Tensor
    splits: Splits | None = None
    step: Step | None = None


def uses_triton(device: torch.device) -> bool:
    """Whether attention on this device is that of Triton's kernels, and not plain torch."""
    return device.type == "cuda"


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, window: int | None = None
) -> Tensor:
    """Causal attention of each token over its own sequence, this step's tokens included.

    Args:
        q: [T, num_heads, head_dim]; k, v: [T, num_kv_heads, head_dim], rotated.
        kv_cache: one layer's [2, num_blocks, num_kv_heads, head_dim * block_size] (see kernels/pages.py); written
            in place.
        window: attend only to the last `window` tokens, itself included.

    Returns: [T, num_heads, head_dim]
    """
    if metadata.step is not None:
        # Not at the top: where there is no GPU, Triton's import would be half of the time to start.
        from nanopage.kernels import cache_write
        from nanopage.kernels.paged_attention import paged_attention as attend

        cache_write.write(k, v, kv_cache, metadata.slot_mapping)
        return attend(q, kv_cache, metadata.block_tables, metadata.step, window)
    # Compiled code, which has splits, pads nothing: comparing two of its sizes would make them constants.
    if metadata.splits is None and len(q) > len(metadata.slot_mapping):  # the rest are padding
        rows = slice(len(metadata.slot_mapping))
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        out[rows] = paged_attention(q[rows], k[rows], v[rows], kv_cache, metadata, window)
        return out
    pages.write(k, v, kv_cache, metadata.slot_mapping)
    if metadata.splits is not None:
        return flash_decode(q, kv_cache, metadata.splits, window).to(q.dtype)
    return reference.paged_attention(q, kv_cache, metadata.block_tables, metadata.query_lens, metadata.seq_lens, window)
