"""Attention of a tile of a group of chunks, as code for Inductor: two batched products with a loop between them.

It computes a tile as `reference.attend_chunks` does, but Inductor fuses the masks, the softmax and the copies around
the products. In a prompt of a hundred tokens, launching small operators takes longer than running them.
"""

import torch
from torch import Tensor

from nanopage.kernels.pages import gather


def attend_tile(
    q: Tensor, kv_cache: Tensor, block_tables: Tensor, rows: Tensor, positions: Tensor, out: Tensor, window: int | None
) -> Tensor:
    """Causal attention of C chunks of N queries each.

    Args:
        q: [T, heads, head_dim]; `out`, of the same shape, is written at `rows`.
        kv_cache: as in kernels/pages.py. Slots of a last block beyond its sequence's end must hold finite values.
        block_tables: int64 [C, blocks] of each chunk's sequence, at least up to its last query.
        rows: index of each query in q, int64 [C, N].
        positions: position of each query in its sequence, int32 [C, N].

    Returns: the square of an upper bound on the scores, a scalar (see reference.LARGEST_ROUNDED_SCORE).
    """
    chunks, num_queries = rows.shape
    kv_heads, head_dim, dtype = kv_cache.shape[2], q.shape[2], q.dtype
    group = q.shape[1] // kv_heads
    k, v = (x.flatten(0, 1) for x in gather(kv_cache, block_tables, head_dim))
    num_keys = k.shape[2]
    queries = q[rows].unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4).reshape(chunks * kv_heads, -1, head_dim)
    # All rows are in one dimension, so that threads can share them, whatever the number of chunks.
    scores = torch.bmm(queries, k).view(-1, num_keys)
    last = positions[:, None].expand(-1, kv_heads * group, -1).flatten()[:, None]
    keys = torch.arange(num_keys, dtype=torch.int32)
    visible = keys <= last
    if window is not None:
        visible &= keys > last - window
    scores = torch.where(visible, scores.float() * head_dim**-0.5, -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp().to(dtype)
    total = weights.float().sum(-1)
    output = torch.bmm(weights.view(chunks * kv_heads, -1, num_keys), v)
    output = output.view(chunks, kv_heads, group, num_queries, head_dim).float() / total.view(
        chunks, kv_heads, group, num_queries, 1
    )
    out[rows] = output.permute(0, 3, 1, 2, 4).reshape(chunks, num_queries, -1, head_dim).to(dtype)
    return queries.float().square().sum(-1).amax() * k.float().square().sum(1).amax() / head_dim
