"""Cache writes and paged attention in plain torch: clear first, and the attention that runs on a CPU.

One step holds sequences with a single query (decodes) and chunks of prompts. Decodes go in padded groups: gather the
pages of a group at once, then one batched attention. Chunks go one after the other, or, in bfloat16, those of like
sizes together, in tiles of so many queries: two batched products and a softmax between them, faster on a CPU than
PyTorch's attention, and what is behind a tile's last query is not computed.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# A group's padded K: small enough for a CPU's cache, and for the next allocation to reuse its memory. Sequences of one
# group have similar lengths if the batch is sorted, so little is padded.
GROUP_BYTES = 2**21
TILE_QUERIES = 128
GROUP_SCORES = 2**22  # that exist at once, where chunks go together
# Rounded to bfloat16 a score is off by 2^-9 of itself at most. Beyond this bound scores stay in float32: keys with
# large biases (Qwen2's) would come out wrong.
LARGEST_ROUNDED_SCORE = 256.0


def write_cache(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """k and v [T, kv_heads, head_dim] to slots [T] of kv_cache [2, num_blocks, block_size, kv_heads, head_dim]."""
    k_slots, v_slots = kv_cache.flatten(1, 2).unbind(0)  # [num_blocks * block_size, kv_heads, head_dim]
    k_slots.index_copy_(0, slot_mapping, k)
    v_slots.index_copy_(0, slot_mapping, v)


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_lens: Tensor,
    seq_lens: Tensor,
    window: int | None = None,
) -> Tensor:
    """Causal attention of q [T, heads, head_dim] over each sequence's pages.

    Slots between a sequence's end and the end of its last block are read and masked: they must hold finite values.

    Args: as in `layers.attention.AttentionMetadata`; sequences with one query come first, best sorted by length.
    Returns: [T, heads, head_dim]
    """
    queries, lengths = query_lens.tolist(), seq_lens.tolist()
    num_decodes = queries.count(1)
    token_bytes = kv_cache[0, 0, 0].numel() * kv_cache.itemsize
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if q.dtype == torch.bfloat16:
        rest = slice(num_decodes, None)
        for chunks in group_chunks(tuple(queries[rest]), tuple(lengths[rest]), q.shape[1], window, q.dtype):
            attend(chunks, q[rest], kv_cache, block_tables[rest], out[rest])
    else:
        row = num_decodes
        for i in range(num_decodes, len(queries)):
            rows = slice(row, row + queries[i])
            out[rows] = chunk(q[rows], kv_cache, block_tables[i], lengths[i], window)
            row += queries[i]
    row = 0
    while row < num_decodes:
        group = max(1, GROUP_BYTES // (lengths[row] * token_bytes))
        rows = slice(row, min(row + group, num_decodes))
        if rows.stop - row == 1:
            out[rows] = chunk(q[rows], kv_cache, block_tables[row], lengths[row], window)
        else:
            out[rows] = decode(q[rows], kv_cache, block_tables[rows], seq_lens[rows], max(lengths[rows]), window)
        row = rows.stop
    return out


def decode(
    q: Tensor, kv_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, longest: int, window: int | None
) -> Tensor:
    """One query for each of B sequences of at most `longest` tokens: q [B, heads, head_dim] -> same shape.

    The query heads that share a KV head become the queries of one attention, so K and V are read once for all of them.
    """
    block_size, kv_heads = kv_cache.shape[2:4]
    k, v = gather(kv_cache, block_tables[:, : -(-longest // block_size)])  # [B, kv_heads, tokens, head_dim]
    ends = seq_lens[:, None]
    positions = torch.arange(k.shape[2])
    visible = positions < ends  # [B, tokens]
    if window is not None:
        visible &= positions >= ends - window
    visible = visible[:, None, None].to(q.device)
    return F.scaled_dot_product_attention(q.unflatten(1, (kv_heads, -1)), k, v, visible).flatten(1, 2)


def chunk(q: Tensor, kv_cache: Tensor, block_table: Tensor, seq_len: int, window: int | None) -> Tensor:
    """The last len(q) tokens of one sequence of `seq_len` tokens: q [queries, heads, head_dim] -> same shape."""
    num_queries, num_heads, _ = q.shape
    block_size, kv_heads = kv_cache.shape[2:4]
    k, v = gather(kv_cache, block_table[None, : -(-seq_len // block_size)])
    k, v = k[:, :, :seq_len], v[:, :, :seq_len]  # [1, kv_heads, seq_len, head_dim]
    if num_queries == 1:  # sees everything within its window; the heads of a KV head are its queries, as in decode
        if window is not None:
            k, v = k[:, :, -window:], v[:, :, -window:]
        return F.scaled_dot_product_attention(q.view(1, kv_heads, -1, q.shape[-1]), k, v).flatten(1, 2)
    mask = None
    if num_queries != seq_len or window is not None:
        queries = torch.arange(seq_len - num_queries, seq_len, device=q.device)[:, None]
        keys = torch.arange(seq_len, device=q.device)
        mask = keys <= queries
        if window is not None:
            mask &= keys > queries - window
    q = q.transpose(0, 1)[None]  # [1, heads, queries, head_dim]
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=num_heads != kv_heads)
    return out[0].transpose(0, 1)


class Chunks(NamedTuple):
    """Chunks of like sizes, padded to as many queries and keys as the largest has.

    sequences  which each is of
    rows       of their queries in q: a slice, or int64 [chunks * queries]
    num_keys   of each sequence, from its first token
    tiles      (begin, end, first, last, mask) of up to TILE_QUERIES queries: they see all keys before `first`, none
               from `last` on, and those between by `mask`, 0 or -inf [chunks, 1, end - begin, last - first]
    """

    sequences: slice | list[int]
    rows: slice | Tensor
    num_keys: int
    tiles: list[tuple[int, int, int, int, Tensor]]


@lru_cache(maxsize=4)  # every layer of a step asks for the same
def group_chunks(
    query_lens: tuple[int, ...], seq_lens: tuple[int, ...], num_heads: int, window: int | None, dtype: torch.dtype
) -> list[Chunks]:
    """The chunks of a step, whose queries stand one after the other in q, in groups that padding makes a quarter larger
    at most."""
    groups: list[list[tuple[int, int, int, int]]] = []
    row = 0
    chunks = []  # (keys, queries, first row, sequence)
    for sequence, (num_queries, num_keys) in enumerate(zip(query_lens, seq_lens, strict=True)):
        chunks.append((num_keys, num_queries, row, sequence))
        row += num_queries
    for one in sorted(chunks):  # by keys: `one` has the most of its group
        grown = [*groups[-1], one] if groups else [one]
        longest = max(num_queries for _, num_queries, _, _ in grown)
        scores = len(grown) * num_heads * min(longest, TILE_QUERIES) * one[0]
        area = sum(num_keys * num_queries for num_keys, num_queries, _, _ in grown)
        if len(grown) > 1 and scores <= GROUP_SCORES and len(grown) * one[0] * longest <= 1.25 * area:
            groups[-1] = grown
        else:
            groups.append([one])
    return [_chunks(group, window, dtype) for group in groups]


def _chunks(group: list[tuple[int, int, int, int]], window: int | None, dtype: torch.dtype) -> Chunks:
    num_keys, num_queries, row, sequences = (list(column) for column in zip(*group, strict=True))
    most = torch.tensor(num_queries)[:, None] - 1
    offsets = torch.arange(max(num_queries)).minimum(most)  # a chunk with fewer queries repeats its last one
    positions = offsets + torch.tensor(num_keys)[:, None] - 1 - most
    tiles = []
    for begin in range(0, max(num_queries), TILE_QUERIES):
        end = min(begin + TILE_QUERIES, max(num_queries))
        inside = positions[:, begin:end, None]
        first, last = 0 if window is not None else int(inside.min()), int(inside.max()) + 1
        keys = torch.arange(first, last)
        hidden = keys > inside
        if window is not None:
            hidden |= keys <= inside - window
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)[:, None]
        tiles.append((begin, end, first, last, mask))
    if len(group) == 1:
        return Chunks(slice(sequences[0], sequences[0] + 1), slice(row[0], row[0] + num_queries[0]), num_keys[0], tiles)
    return Chunks(sequences, (offsets + torch.tensor(row)[:, None]).flatten(), num_keys[-1], tiles)


def attend(chunks: Chunks, q: Tensor, kv_cache: Tensor, block_tables: Tensor, out: Tensor) -> None:
    """Causal attention of the chunks' queries; fills their rows of `out` [T, heads, head_dim]."""
    block_size, kv_heads, head_dim = kv_cache.shape[2:]
    num_keys = chunks.num_keys
    k, v = gather(kv_cache, block_tables[chunks.sequences, : -(-num_keys // block_size)])
    count = len(k)
    k, v = (x[:, :, :num_keys].reshape(count * kv_heads, num_keys, head_dim) for x in (k, v))
    q = (q[chunks.rows] * head_dim**-0.5).view(count, -1, kv_heads, q.shape[1] // kv_heads, head_dim)
    if q.norm(dim=-1).amax() * k.norm(dim=-1).amax() > LARGEST_ROUNDED_SCORE:
        exact = torch.promote_types(k.dtype, torch.float32)
        q, k = q.to(exact), k.to(exact)
    output = torch.empty(q.shape, dtype=v.dtype)
    q, heads = q.permute(0, 2, 3, 1, 4), output.permute(0, 2, 3, 1, 4)  # [chunks, kv_heads, group, queries, head_dim]
    for begin, end, first, last, mask in chunks.tiles:
        queries = q[:, :, :, begin:end].reshape(count * kv_heads, -1, head_dim)  # the heads of a KV head side by side
        scores = (queries @ k[:, :last].transpose(1, 2)).view(count, -1, end - begin, last)
        scores[..., first:] += mask
        weights = scores.softmax(dim=-1).to(v.dtype).view(count * kv_heads, -1, last)
        heads[:, :, :, begin:end] = (weights @ v[:, :last]).view(*q.shape[:3], end - begin, head_dim)
    out[chunks.rows] = output.view(-1, *out.shape[1:])


def gather(kv_cache: Tensor, block_tables: Tensor) -> tuple[Tensor, Tensor]:
    """The pages of block_tables [B, blocks] in order: K and V, each [B, kv_heads, blocks * block_size, head_dim]."""
    pages, (batch, blocks) = block_tables.flatten(), block_tables.shape
    block_size, kv_heads, head_dim = kv_cache.shape[2:]
    shape = (batch, blocks * block_size, kv_heads, head_dim)
    k, v = (x.index_select(0, pages).view(shape).transpose(1, 2) for x in kv_cache.unbind(0))
    return k, v
