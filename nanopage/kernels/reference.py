"""Cache writes and paged attention in plain torch: clear first, and the attention that runs on a CPU.

One step holds sequences with a single query (decodes) and chunks of prompts. Decodes go in padded groups: gather the
pages of a group at once, then one batched attention. Chunks are few and long: one after the other.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# A group's padded K: small enough for a CPU's cache, and for the next allocation to reuse its memory. Sequences of one
# group have similar lengths if the batch is sorted, so little is padded.
GROUP_BYTES = 2**21


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
    row = 0
    for i in range(num_decodes, len(queries)):
        rows = slice(num_decodes + row, num_decodes + row + queries[i])
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


def gather(kv_cache: Tensor, block_tables: Tensor) -> tuple[Tensor, Tensor]:
    """The pages of block_tables [B, blocks] in order: K and V, each [B, kv_heads, blocks * block_size, head_dim]."""
    pages, (batch, blocks) = block_tables.flatten(), block_tables.shape
    block_size, kv_heads, head_dim = kv_cache.shape[2:]
    shape = (batch, blocks * block_size, kv_heads, head_dim)
    k, v = (x.index_select(0, pages).view(shape).transpose(1, 2) for x in kv_cache.unbind(0))
    return k, v
