"""Attention: of one token (milestone 1), of many (2), over pages (5)."""

import torch
from torch import Tensor


def attend_one(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of one token, head by head: the sum of the values of the tokens that it sees, weighted by the softmax
    of q * key / sqrt(head_dim) (Vaswani et al., 2017). Query head h reads KV head h // (num_heads / num_kv_heads)
    (grouped-query attention, Ainslie et al., 2023).

    q: [num_heads, head_dim]. keys, values: [length, num_kv_heads, head_dim], of all tokens up to itself.
    Returns: [num_heads, head_dim].
    """
    group = len(q) // keys.shape[1]
    out = torch.empty_like(q)
    for head, query in enumerate(q):
        scores = keys[:, head // group] @ query * len(query) ** -0.5  # [length]
        out[head] = scores.softmax(dim=0) @ values[:, head // group]
    return out


def attend(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None = None) -> Tensor:
    """Attention of n tokens at once. q: [n, num_heads, head_dim]. keys, values: [length, num_kv_heads, head_dim].
    seen: bool [n, length], which keys each token sees. None: the n are the last of the tokens, and each sees itself
    and all before it. Returns: [n, num_heads, head_dim]."""
    n, length, group = len(q), len(keys), q.shape[1] // keys.shape[1]
    if seen is None:
        seen = torch.arange(length) <= torch.arange(length - n, length)[:, None]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * q.shape[2] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(dim=-1), values)


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, block_tables: Tensor, rows: Tensor, positions: Tensor
) -> Tensor:
    """Attention of the tokens of a step. Each sees the tokens of its own sequence up to itself. No loop and no `if`
    depends on a number in a tensor, so that it can be recorded.

    q: [T, num_heads, head_dim]. keys, values: [num_blocks + 1, block_size, num_kv_heads, head_dim], of a layer.
    block_tables, rows, positions: see `cache.Step`. Returns: [T, num_heads, head_dim].
    """
    room = block_tables.shape[1] * keys.shape[1]
    places = torch.arange(block_tables.shape[0] * room)  # of all sequences, one after the other
    seen = (places // room == rows[:, None]) & (places % room <= positions[:, None])
    return attend(q, keys[block_tables].flatten(0, 2), values[block_tables].flatten(0, 2), seen)
