"""Cache writes and paged attention in plain torch: clear first, and the attention that runs on a CPU.

One step holds sequences with a single query (decodes) and chunks of prompts. Decodes go in padded groups: gather the
pages of a group at once, then one batched attention. Chunks go one after the other, or, in bfloat16, in tiles of so
many queries, tiles of like sizes together: two batched products and a softmax between them, twice as fast on a CPU as
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
GROUP_SCORES = 2**22  # of the tiles that go together
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
        chunks = slice(num_decodes, None)
        for tiles in tiles_of(tuple(queries[chunks]), tuple(lengths[chunks]), q.shape[1], window, q.dtype):
            attend(tiles, q[chunks], kv_cache, block_tables[chunks], out[chunks])
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


class Tiles(NamedTuple):
    """A group of tiles, all padded to as many queries and keys as the largest has.

    sequences  which each is of
    rows       of their queries in q: a slice, or int64 [tiles * queries]
    num_keys   of each sequence, from its first token
    first      the keys before this one are seen by every query
    mask       0 or -inf for the other keys, [tiles, 1, queries, num_keys - first]
    """

    sequences: list[int]
    rows: slice | Tensor
    num_keys: int
    first: int
    mask: Tensor


@lru_cache(maxsize=4)  # every layer of a step asks for the same
def tiles_of(
    query_lens: tuple[int, ...], seq_lens: tuple[int, ...], num_heads: int, window: int | None, dtype: torch.dtype
) -> list[Tiles]:
    """The chunks of a step, whose queries stand one after the other, cut into tiles and these put into groups.

    Padding makes a group a quarter larger at most.
    """
    tiles: list[tuple[int, int, int, int]] = []  # keys up to the last query's, queries, first row, sequence
    row = 0
    for sequence, (num_queries, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for begin in range(0, num_queries, TILE_QUERIES):
            end = min(begin + TILE_QUERIES, num_queries)
            tiles.append((seq_len - num_queries + end, end - begin, row + begin, sequence))
        row += num_queries
    groups: list[list[tuple[int, int, int, int]]] = []
    for tile in sorted(tiles):
        grown = [*groups[-1], tile] if groups else [tile]
        padded = len(grown) * tile[0] * max(queries for _, queries, _, _ in grown)
        if (
            len(grown) > 1
            and padded * num_heads <= GROUP_SCORES
            and (padded <= 1.25 * sum(keys * queries for keys, queries, _, _ in grown))
        ):
            groups[-1] = grown
        else:
            groups.append([tile])
    return [_group(tiles, window, dtype) for tiles in groups]


def _group(tiles: list[tuple[int, int, int, int]], window: int | None, dtype: torch.dtype) -> Tiles:
    num_keys, num_queries, row, sequences = (list(column) for column in zip(*tiles, strict=True))
    last = torch.tensor(num_queries)[:, None] - 1
    offsets = torch.arange(max(num_queries)).minimum(last)  # a tile with fewer queries repeats its last one
    positions = offsets + torch.tensor(num_keys)[:, None] - 1 - last
    first = 0 if window is not None else int(positions.min())
    keys = torch.arange(first, num_keys[-1])
    hidden = keys > positions[..., None]
    if window is not None:
        hidden |= keys <= positions[..., None] - window
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)[:, None]
    rows = (offsets + torch.tensor(row)[:, None]).flatten()
    one = slice(row[0], row[0] + num_queries[0]) if len(tiles) == 1 else rows
    return Tiles(sequences, one, num_keys[-1], first, mask)


def attend(tiles: Tiles, q: Tensor, kv_cache: Tensor, block_tables: Tensor, out: Tensor) -> None:
    """Causal attention of the tiles' queries; fills their rows of `out` [T, heads, head_dim]."""
    block_size, kv_heads, head_dim = kv_cache.shape[2:]
    count, num_keys = len(tiles.sequences), tiles.num_keys
    k, v = gather(kv_cache, block_tables[tiles.sequences, : -(-num_keys // block_size)])
    k, v = (x[:, :, :num_keys].reshape(-1, num_keys, head_dim) for x in (k, v))  # [tiles * kv_heads, keys, head_dim]
    queries = (q[tiles.rows] * head_dim**-0.5).view(count, -1, kv_heads, q.shape[1] // kv_heads, head_dim)
    queries = queries.permute(0, 2, 3, 1, 4)  # [tiles, kv_heads, group, queries, head_dim]
    *heads, num_queries, _ = queries.shape
    queries = queries.reshape(count * kv_heads, -1, head_dim)  # the heads of a KV head side by side
    if queries.norm(dim=-1).amax() * k.norm(dim=-1).amax() > LARGEST_ROUNDED_SCORE:
        exact = torch.promote_types(k.dtype, torch.float32)
        queries, k = queries.to(exact), k.to(exact)
    scores = (queries @ k.transpose(1, 2)).view(count, -1, num_queries, num_keys)
    scores[..., tiles.first :] += tiles.mask
    weights = scores.softmax(dim=-1).to(v.dtype).view(count * kv_heads, -1, num_keys)
    output = (weights @ v).view(*heads, num_queries, head_dim).permute(0, 3, 1, 2, 4)
    out[tiles.rows] = output.reshape(-1, *q.shape[1:])


def gather(kv_cache: Tensor, block_tables: Tensor) -> tuple[Tensor, Tensor]:
    """The pages of block_tables [B, blocks] in order: K and V, each [B, kv_heads, blocks * block_size, head_dim]."""
    pages, (batch, blocks) = block_tables.flatten(), block_tables.shape
    block_size, kv_heads, head_dim = kv_cache.shape[2:]
    shape = (batch, blocks * block_size, kv_heads, head_dim)
    k, v = (x.index_select(0, pages).view(shape).transpose(1, 2) for x in kv_cache.unbind(0))
    return k, v
