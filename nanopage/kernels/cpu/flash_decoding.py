"""Paged decode attention as loops for Inductor: no page is copied, no sequence padded to the longest.

Flash-decoding (Dao et al. 2023): each sequence's blocks are cut into splits of about SPLIT_TOKENS tokens. Every split
attends on its own and leaves an output, the largest score and the sum of its weights; the splits of a sequence are
merged by these. Splits of all sequences stand in one flat list, so that a long sequence is many rows and a short one
few. Written as tensor expressions that Inductor turns into vectorized loops which read the pages where they lie;
run eagerly they would gather every page as float32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanopage.kernels.pages import views, write

# Short: little of a sequence's last split is empty. Long: little is left to merge.
SPLIT_TOKENS = 64
# Of a row that sees nothing: exp(score - LOWEST) is 0 for its masked scores, and so is its weight in the merge.
LOWEST = -1e30


@dataclass(slots=True)
class Splits:
    """The splits of a step in which every one of B sequences has one query.

    blocks    int64 [S, blocks per split]  physical blocks, padded with a block of the same sequence
    owner     int64 [S]                    which sequence
    start     int64 [S]                    position of the first slot
    end       int64 [S]                    tokens of the sequence
    of        int64 [B, most splits]       the splits of each sequence, padded with its first
    merged    bool  [B, most splits]       which entries of `of` are not padding
    """

    blocks: Tensor
    owner: Tensor
    start: Tensor
    end: Tensor
    of: Tensor
    merged: Tensor


@dataclass(slots=True)
class FlashDecoding:
    """Attention of a step in which every sequence has one token (see layers/attention.py). Run it compiled."""

    slot_mapping: Tensor  # int64 [B]: block * block_size + offset of each token
    splits: Splits

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, window: int | None = None) -> Tensor:
        write(k, v, kv_cache, self.slot_mapping)
        return flash_decode(q, kv_cache, self.splits, window).to(q.dtype)


def split(block_tables: Tensor, seq_lens: Tensor, block_size: int) -> Splits:
    """Cut the sequences of block_tables [B, max_blocks] and seq_lens [B] into splits."""
    per_split = max(1, SPLIT_TOKENS // block_size)
    num_seqs, width = block_tables.shape
    most = -(-width // per_split)
    padding = block_tables[:, :1].expand(-1, most * per_split - width)
    tables = torch.cat((block_tables, padding), dim=1).view(num_seqs, most, per_split)
    starts = (torch.arange(most) * per_split * block_size).expand(num_seqs, -1)
    merged = starts < seq_lens[:, None]
    owner, number = merged.nonzero().unbind(1)
    counts = merged.sum(1)
    first = counts.cumsum(0) - counts
    of = torch.where(merged, first[:, None] + torch.arange(most), first[:, None])
    return Splits(tables[merged], owner, starts[0, number], seq_lens[owner], of, merged)


def flash_decode(q: Tensor, kv_cache: Tensor, splits: Splits, window: int | None = None) -> Tensor:
    """Attention of one query a sequence, q [B, heads, head_dim], over kv_cache [2, num_blocks, kv_heads, head_dim *
    block_size]. Slots of the last block beyond a sequence's end must hold finite values. Returns [B, heads, head_dim].
    """
    head_dim = q.shape[2]
    # K [S, blocks, kv_heads, head_dim, block_size] and V [S, blocks, kv_heads, block_size, head_dim]: in the order of
    # memory, so that the processor fetches pages ahead.
    k, v = (pages[splits.blocks].float() for pages in views(kv_cache, head_dim))
    kv_heads, block_size = k.shape[2], k.shape[4]
    # A concatenation is a tensor of its own: otherwise every key would convert and scale its query again.
    q = torch.cat([half.float() * head_dim**-0.5 for half in q.chunk(2, dim=-1)], dim=-1)
    q = q.unflatten(1, (kv_heads, -1))  # [B, kv_heads, group, dim]
    positions = splits.start[:, None] + torch.arange(k.shape[1] * block_size)
    visible = positions < splits.end[:, None]  # [S, tokens]
    if window is not None:
        visible &= positions >= splits.end[:, None] - window
    visible = visible.unflatten(1, (-1, 1, 1, block_size))

    # Unrolled over the heads that share a KV head: one loop then reads each K, or V, once for all of them.
    queries = [query[splits.owner][:, None, :, :, None] for query in q.unbind(2)]
    scores = torch.stack([(query * k).sum(3) for query in queries], 3)
    scores = torch.where(visible, scores, -torch.inf)  # [S, blocks, kv_heads, group, block_size]
    largest = scores.amax((1, 4)).clamp(min=LOWEST)
    weights = (scores - largest[:, None, ..., None]).exp()
    total = weights.sum((1, 4))
    output = torch.stack([(weight[..., None] * v).sum(3) for weight in weights.unbind(3)], 3)
    output = output.sum(1)  # [S, kv_heads, group, dim]

    largest = torch.where(splits.merged[..., None, None], largest[splits.of], LOWEST)  # [B, splits, kv_heads, group]
    scale = (largest - largest.amax(1, keepdim=True)).exp()
    numerator = (scale[..., None] * output[splits.of]).sum(1)
    denominator = (scale * total[splits.of]).sum(1)
    return (numerator / denominator[..., None]).flatten(1, 2)
