"""The attention of eager steps on a CPU: as in reference.py, but for many sequences at once.

For each group of chunks (see chunks.py) it gathers the pages of K and V, multiplies, masks, takes the softmax and
multiplies again.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nanopage.kernels.chunks import Chunks, group_chunks
from nanopage.kernels.reference import PLAIN, Scoring
from nanopage.state.pages import gather, write

# bfloat16 rounds a score by up to 2^-9 of its value. Scores that may exceed this bound are computed in float32, because
# rounding would spoil models with large key biases (Qwen2).
LARGEST_ROUNDED_SCORE = 256.0


@dataclass(slots=True)
class GroupedAttention:
    """Attention of a step's T tokens of B sequences, in the layers of one kind (see layers/attention.py). All tensors
    are on the device except the lengths. On a GPU, `make_attention` makes a TritonAttention of it.

    slot_mapping  int64 [T]              block * block_size + offset of each token
    block_tables  [B, max_blocks]        physical block of each logical block; on a CPU int64, padded by pad_tables
    query_lens    int64 [B], on the CPU  tokens of each sequence in this step
    seq_lens      int64 [B], on the CPU  tokens of each sequence, including this step's

    If the kind has a window, the table of a sequence begins with the first block that its queries attend to, and
    `seq_lens` counts tokens from the start of that block. Masks depend only on distances between tokens, so kernels
    work unchanged on the shortened table.
    """

    slot_mapping: Tensor
    block_tables: Tensor
    query_lens: Tensor
    seq_lens: Tensor

    def write(self, k: Tensor, v: Tensor, kv_cache: Tensor, scales: tuple[float, float] = (1.0, 1.0)) -> None:
        write(k, v, kv_cache, self.slot_mapping, *scales)

    def attend(self, q: Tensor, kv_cache: Tensor, scoring: Scoring = PLAIN, out: Tensor | None = None) -> Tensor:
        """Slots after a sequence's end in its last block are read and masked: they must hold finite values."""
        if out is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lengths = tuple(self.query_lens.tolist()), tuple(self.seq_lens.tolist())
        sizes = q.shape[1], kv_cache.shape[2] * q.shape[2]
        for chunks in group_chunks(*lengths, *sizes, scoring.window, q.dtype, q.device):
            attend_chunks(chunks, q, kv_cache, self.block_tables, out, scoring)
        return out


def attend_chunks(
    chunks: Chunks,
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    out: Tensor,
    scoring: Scoring,
) -> None:
    """Causal attention of the chunks' queries over the pages of their sequences. Fills their rows of `out` [T, heads,
    head_dim]."""
    scale, v_scale = scoring.for_cache(kv_cache, q.shape[2])
    kv_heads, head_dim = kv_cache.shape[2], q.shape[2]
    block_size = kv_cache.shape[3] // head_dim
    tables = block_tables[chunks.sequences, : -(-chunks.num_keys // block_size)]
    k, v = (pages.to(q.dtype) for pages in gather(kv_cache, tables, head_dim))
    count = len(k)
    k, v = k.flatten(0, 1), v.flatten(0, 1)  # [chunks * kv_heads, head_dim, keys] and [.., keys, head_dim]
    first_row = int(chunks.rows[0, 0])
    rows = chunks.rows.flatten() if count > 1 else slice(first_row, first_row + chunks.rows.shape[1])
    q = (q[rows] * scale).view(count, -1, kv_heads, q.shape[1] // kv_heads, head_dim)
    # Products are computed in bfloat16, where they are fast, or in float32 at least: float16 products could overflow.
    exact = torch.promote_types(q.dtype, torch.float32)
    if q.dtype == torch.float16:
        v = v.to(exact)
    if q.dtype != torch.bfloat16 or _largest_score(q, k) > LARGEST_ROUNDED_SCORE:
        q, k = q.to(exact), k.to(exact)
    output = torch.empty(q.shape, dtype=v.dtype, device=q.device)
    q, heads = q.permute(0, 2, 3, 1, 4), output.permute(0, 2, 3, 1, 4)  # [chunks, kv_heads, group, queries, head_dim]
    for begin, end, first, last, mask in chunks.tiles:
        queries = q[:, :, :, begin:end].reshape(count * kv_heads, -1, head_dim)  # all heads that share a KV head
        scores = (queries @ k[:, :, :last]).view(count, -1, end - begin, last)
        if scoring.softcap:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        if mask is not None:
            scores[..., first:] += mask
        if scoring.sinks is not None:
            sinks = scoring.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, sinks), -1)
        weights = scores.softmax(dim=-1)[..., :last].to(v.dtype).view(count * kv_heads, -1, last)
        heads[:, :, :, begin:end] = (weights @ v[:, :last]).view(*q.shape[:3], end - begin, head_dim)
    if v_scale != 1:
        output *= v_scale
    out[rows] = output.view(-1, *out.shape[1:]).to(out.dtype)


def _largest_score(q: Tensor, k: Tensor) -> float:
    """An upper bound on the products of q [.., head_dim] and k [.., head_dim, keys] (Cauchy-Schwarz)."""
    largest = q.square().sum(-1).amax() * k.square().sum(-2).amax()  # not norm(), which is slow along columns
    return math.sqrt(largest.item())
