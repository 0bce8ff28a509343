"""Paged attention of decodes on a CPU, as tensor expressions that Inductor compiles to loops.

This is Flash-decoding (Dao et al. 2023). The blocks of each sequence are cut into splits of about SPLIT_TOKENS tokens.
Attention over a split yields an output, the largest score and the sum of the weights, which are used to merge the
splits of a sequence. The splits of all sequences form one flat list, so no sequence is padded to the length of the
longest.

The compiled loops are vectorized and read the pages in place. Run eagerly, the same expressions would copy every page
as float32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanopage.kernels.pages import views, write

# Short splits leave less of a sequence's last split empty. Long splits leave less to merge.
SPLIT_TOKENS = 64
# The largest score of a split that sees nothing: exp(score - LOWEST) is 0 for its masked scores, and so is the weight
# of the split in the merge.
LOWEST = -1e30


@dataclass(slots=True)
class Splits:
    """The S splits of a step of B sequences with one query each.

    blocks       int64 [S, blocks per split]  physical blocks, padded with a block of the same sequence
    owner        int64 [S]                    index of the sequence
    start        int64 [S]                    position of the split's first slot
    end          int64 [S]                    number of tokens of the sequence
    by_sequence  int64 [B, most splits]       the splits of each sequence, padded with its first
    valid        bool  [B, most splits]       which entries of `by_sequence` are not padding
    """

    blocks: Tensor
    owner: Tensor
    start: Tensor
    end: Tensor
    by_sequence: Tensor
    valid: Tensor


@dataclass(slots=True)
class FlashDecoding:
    """Attention of a step in which every sequence has one token (see layers/attention.py). Only for compiled code."""

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
    valid = starts < seq_lens[:, None]
    owner, number = valid.nonzero().unbind(1)
    counts = valid.sum(1)
    first = counts.cumsum(0) - counts
    by_sequence = torch.where(valid, first[:, None] + torch.arange(most), first[:, None])
    return Splits(tables[valid], owner, starts[0, number], seq_lens[owner], by_sequence, valid)


def flash_decode(q: Tensor, kv_cache: Tensor, splits: Splits, window: int | None = None) -> Tensor:
    """Attention of one query a sequence, q [B, heads, head_dim], over kv_cache [2, num_blocks, kv_heads, head_dim *
    block_size]. Slots of the last block beyond a sequence's end must hold finite values. Returns [B, heads, head_dim].
    """
    head_dim = q.shape[2]
    # K [S, blocks, kv_heads, head_dim, block_size] and V [S, blocks, kv_heads, block_size, head_dim]: in the order of
    # memory, so that the processor fetches pages ahead.
    k, v = (pages[splits.blocks].float() for pages in views(kv_cache, head_dim))
    kv_heads, block_size = k.shape[2], k.shape[4]
    # The concatenation makes Inductor store the scaled queries. Otherwise it would convert and scale them again for
    # every key.
    q = torch.cat([half.float() * head_dim**-0.5 for half in q.chunk(2, dim=-1)], dim=-1)
    q = q.unflatten(1, (kv_heads, -1))  # [B, kv_heads, group, dim]
    positions = splits.start[:, None] + torch.arange(k.shape[1] * block_size)
    visible = positions < splits.end[:, None]  # [S, tokens]
    if window is not None:
        visible &= positions >= splits.end[:, None] - window
    visible = visible.unflatten(1, (-1, 1, 1, block_size))

    # Unrolled over the heads that share a KV head, so that one loop reads each K, or V, once for all of them.
    queries = [query[splits.owner][:, None, :, :, None] for query in q.unbind(2)]
    scores = torch.stack([(query * k).sum(3) for query in queries], 3)
    scores = torch.where(visible, scores, -torch.inf)  # [S, blocks, kv_heads, group, block_size]
    largest = scores.amax((1, 4)).clamp(min=LOWEST)
    weights = (scores - largest[:, None, ..., None]).exp()
    total = weights.sum((1, 4))
    output = torch.stack([(weight[..., None] * v).sum(3) for weight in weights.unbind(3)], 3)
    output = output.sum(1)  # [S, kv_heads, group, dim]

    # [B, splits, kv_heads, group]
    largest = torch.where(splits.valid[..., None, None], largest[splits.by_sequence], LOWEST)
    scale = (largest - largest.amax(1, keepdim=True)).exp()
    numerator = (scale[..., None] * output[splits.by_sequence]).sum(1)
    denominator = (scale * total[splits.by_sequence]).sum(1)
    return (numerator / denominator[..., None]).flatten(1, 2)
