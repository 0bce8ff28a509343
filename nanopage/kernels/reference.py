"""Paged attention spelled out: what every other implementation computes, and what tests compare it with.

Eager steps on a CPU compute it for many sequences at once (grouped_attention.py), compiled layers in C++
(cpu/flash_attention.cpp), a GPU in Triton (attention_kernels.py).
"""

import torch
from torch import Tensor

from nanopage.state.pages import FP8, gather


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_lens: Tensor,
    seq_lens: Tensor,
    window: int | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
    scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Causal attention of the tokens of a step over the pages of their sequences, one sequence after the other.

    Args:
        block_tables: int64 [B, max_blocks], physical block of each logical block.
        query_lens: int64 [B], tokens of each sequence in this step: the last ones it has. Their rows in q follow each
            other.
        seq_lens: int64 [B], tokens of each sequence, including this step's.
        the others: as in layers/attention.py.

    Returns: [T, heads, head_dim]
    """
    (_, num_heads, head_dim), num_kv_heads = q.shape, kv_cache.shape[2]
    block_size = kv_cache.shape[3] // head_dim
    scale = head_dim**-0.5 if scale is None else scale
    k_scale, v_scale = scales if kv_cache.dtype == FP8 else (1.0, 1.0)
    outputs = []
    queries = q.split(query_lens.tolist())
    for queries_of_one, table, length in zip(queries, block_tables, seq_lens.tolist(), strict=True):
        k, v = gather(kv_cache, table[None, : -(-length // block_size)], head_dim)  # whole pages
        k, v = k_scale * k[0, :, :, :length].to(q.dtype), v_scale * v[0, :, :length].to(q.dtype)
        keys = torch.arange(length, device=q.device)
        positions = keys[length - len(queries_of_one) :, None]
        hidden = keys > positions  # [queries, keys]
        if window is not None:
            hidden |= keys <= positions - window
        # Several query heads share a KV head: k [kv_heads, head_dim, keys], v [kv_heads, keys, head_dim].
        heads = queries_of_one.view(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        scores = scale * torch.einsum("qhgd,hdk->hgqk", heads, k)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hgqk,hkd->qhgd", weights, v).flatten(1, 2))
    return torch.cat(outputs)
