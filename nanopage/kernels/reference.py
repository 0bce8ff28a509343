"""Paged attention in plain torch: clear first, and what runs on a CPU where a step has prompts or nothing is compiled.

Chunks, the queries of one sequence in a step, go together with others of like sizes, in tiles of so many queries: pages
are gathered once for a group, then two batched products and a softmax between them. What is behind a tile's last query
is not computed. A decode is a chunk of one query.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from nanopage.kernels.pages import gather, write

TILE_QUERIES = 128
# Of a group, in elements: small enough for the next allocation to reuse the memory.
GROUP_SCORES = 2**22
GROUP_KEYS = 2**20
# Rounded to bfloat16 a score is off by 2^-9 of itself at most. Beyond this bound scores stay in float32: keys with
# large biases (Qwen2's) would come out wrong.
LARGEST_ROUNDED_SCORE = 256.0


@dataclass(slots=True)
class ReferenceAttention:
    """Attention of a step's T tokens of B sequences (see layers/attention.py).

    slot_mapping  int64 [T]              block * block_size + offset of each token
    block_tables  int64 [B, max_blocks]  physical block of each logical block, padded with the sequence's first
    query_lens    int64 [B], on the CPU  how many of the step's tokens are each sequence's
    seq_lens      int64 [B], on the CPU  tokens of each sequence including this step's
    """

    slot_mapping: Tensor
    block_tables: Tensor
    query_lens: Tensor
    seq_lens: Tensor

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, window: int | None = None) -> Tensor:
        write(k, v, kv_cache, self.slot_mapping)
        return paged_attention(q, kv_cache, self.block_tables, self.query_lens, self.seq_lens, window)


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_lens: Tensor,
    seq_lens: Tensor,
    window: int | None = None,
    tile: Callable[..., bool] | None = None,
) -> Tensor:
    """Causal attention of q [T, heads, head_dim] over each sequence's pages.

    Slots between a sequence's end and the end of its last block are read and masked: they must hold finite values.

    Args: as in ReferenceAttention. `tile` takes the same as `attend_chunks`, is called for chunks of a single tile, and
        returns whether it has computed them.
    Returns: [T, heads, head_dim]
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    key_size = kv_cache.shape[2] * q.shape[2]
    block_size = kv_cache.shape[3] // q.shape[2]
    lengths = tuple(query_lens.tolist()), tuple(seq_lens.tolist())
    for chunks in group_chunks(*lengths, q.shape[1], key_size, window, q.dtype, q.device):
        tables = block_tables[chunks.sequences, : -(-chunks.num_keys // block_size)]
        if tile is None or len(chunks.tiles) > 1 or not tile(chunks, q, kv_cache, tables, out):
            attend_chunks(chunks, q, kv_cache, tables, out)
    return out


class Chunks(NamedTuple):
    """Chunks of like sizes, padded to as many queries and keys as the largest has.

    sequences  which each is of
    rows       of their queries in q: int64 [chunks, queries]
    positions  of their queries: int32 [chunks, queries]
    num_keys   of the longest sequence, from its first token
    tiles      (begin, end, first, last, mask) of up to TILE_QUERIES queries: they see all keys before `first`, none
               from `last` on, and those between by `mask`, 0 or -inf [chunks, 1, end - begin, last - first] or None
    """

    sequences: slice | list[int]
    rows: Tensor
    positions: Tensor
    num_keys: int
    tiles: list[tuple[int, int, int, int, Tensor | None]]


@lru_cache(maxsize=4)  # every layer of a step asks for the same
def group_chunks(
    query_lens: tuple[int, ...],
    seq_lens: tuple[int, ...],
    num_heads: int,
    key_size: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Chunks]:
    """The chunks of a step, whose queries stand one after the other in q, in groups that padding makes a quarter larger
    at most."""
    chunks = []  # (queries, keys, first row, sequence)
    row = 0
    for sequence, (num_queries, num_keys) in enumerate(zip(query_lens, seq_lens, strict=True)):
        chunks.append((num_queries, num_keys, row, sequence))
        row += num_queries
    groups: list[list[tuple[int, int, int, int]]] = []
    most_keys = area = 0  # of the last group; area is its scores without padding
    for one in sorted(chunks):  # by queries: `one` has the most of its group
        num_queries, num_keys, *_ = one
        most_keys, area = max(most_keys, num_keys), area + num_queries * num_keys
        keys = (len(groups[-1]) + 1 if groups else 1) * most_keys
        fits = keys * key_size <= GROUP_KEYS and keys * num_heads * min(num_queries, TILE_QUERIES) <= GROUP_SCORES
        if groups and fits and keys * num_queries <= 1.25 * area:
            groups[-1].append(one)
        else:
            groups.append([one])
            most_keys, area = num_keys, num_queries * num_keys
    return [_chunks(group, window, dtype, device) for group in groups]


def _chunks(
    group: list[tuple[int, int, int, int]], window: int | None, dtype: torch.dtype, device: torch.device
) -> Chunks:
    num_queries, num_keys, row, sequences = (list(column) for column in zip(*group, strict=True))
    most = torch.tensor(num_queries)[:, None] - 1
    offsets = torch.arange(max(num_queries)).minimum(most)  # a chunk with fewer queries repeats its last one
    positions = offsets + torch.tensor(num_keys)[:, None] - 1 - most
    tiles: list[tuple[int, int, int, int, Tensor | None]] = []
    for begin in range(0, max(num_queries), TILE_QUERIES):
        end = min(begin + TILE_QUERIES, max(num_queries))
        inside = positions[:, begin:end, None]
        first, last = 0 if window is not None else int(inside.min()), int(inside.max()) + 1
        keys = torch.arange(first, last)
        hidden = keys > inside
        if window is not None:
            hidden |= keys <= inside - window
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)[:, None].to(device)
        tiles.append((begin, end, first, last, mask if hidden.any() else None))
    rows = offsets + torch.tensor(row)[:, None]
    which = sequences if len(group) > 1 else slice(sequences[0], sequences[0] + 1)
    return Chunks(which, rows.to(device), positions.int().to(device), max(num_keys), tiles)


def _largest_score(q: Tensor, k: Tensor) -> float:
    """No product of q [.., head_dim] and k [.., head_dim, keys] is larger (Cauchy and Schwarz)."""
    largest = q.square().sum(-1).amax() * k.square().sum(-2).amax()  # not norm: along columns it is slow
    return math.sqrt(largest.item())


def attend_chunks(chunks: Chunks, q: Tensor, kv_cache: Tensor, block_tables: Tensor, out: Tensor) -> None:
    """Causal attention of the chunks' queries over block_tables [chunks, blocks]; fills their rows of `out` [T, heads,
    head_dim]."""
    kv_heads, head_dim = kv_cache.shape[2], q.shape[2]
    k, v = gather(kv_cache, block_tables, head_dim)
    count = len(k)
    k, v = k.flatten(0, 1), v.flatten(0, 1)  # [chunks * kv_heads, head_dim, keys] and [.., keys, head_dim]
    first_row = int(chunks.rows[0, 0])
    rows = chunks.rows.flatten() if count > 1 else slice(first_row, first_row + chunks.rows.shape[1])
    q = (q[rows] * head_dim**-0.5).view(count, -1, kv_heads, q.shape[1] // kv_heads, head_dim)
    # Only bfloat16's products are fast as they are; float16 could overflow, too.
    exact = torch.promote_types(q.dtype, torch.float32)
    if q.dtype == torch.float16:
        v = v.to(exact)
    if q.dtype != torch.bfloat16 or _largest_score(q, k) > LARGEST_ROUNDED_SCORE:
        q, k = q.to(exact), k.to(exact)
    output = torch.empty(q.shape, dtype=v.dtype, device=q.device)
    q, heads = q.permute(0, 2, 3, 1, 4), output.permute(0, 2, 3, 1, 4)  # [chunks, kv_heads, group, queries, head_dim]
    for begin, end, first, last, mask in chunks.tiles:
        queries = q[:, :, :, begin:end].reshape(count * kv_heads, -1, head_dim)  # the heads of a KV head side by side
        scores = (queries @ k[:, :, :last]).view(count, -1, end - begin, last)
        if mask is not None:
            scores[..., first:] += mask
        weights = scores.softmax(dim=-1).to(v.dtype).view(count * kv_heads, -1, last)
        heads[:, :, :, begin:end] = (weights @ v[:, :last]).view(*q.shape[:3], end - begin, head_dim)
    out[rows] = output.view(-1, *out.shape[1:]).to(out.dtype)
