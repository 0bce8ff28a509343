"""Paged attention spelled out. No step runs this: it says what the other implementations compute, and tests compare
them with it.

Eager steps on a CPU compute attention for many sequences at once (grouped_attention.py), compiled layers in C++
(cpu/flash_attention.cpp), a GPU in Triton (attention_kernels.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanopage.state.pages import FP8, gather


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer's attention differs from other layers'.

    window     attend only to the last `window` tokens, including the token itself; None: to all
    scale      of the products of q and K, above 0; None: head_dim ** -0.5
    softcap    scores become softcap * tanh(scores / softcap) (Gemma 2); 0: they stay
    kv_scales  of K and V in a cache in fp8 (see state/pages.py); of no effect with another dtype
    sinks      [num_heads]: of each head, a score that is part of every token's softmax but has no value (GPT-OSS)
    """

    window: int | None = None
    scale: float | None = None
    softcap: float = 0.0
    kv_scales: tuple[float, float] = (1.0, 1.0)
    sinks: Tensor | None = None

    def for_cache(self, kv_cache: Tensor, head_dim: int) -> tuple[float, float]:
        """(the scale of the scores, which includes the scale of K; the scale of V)"""
        scale = head_dim**-0.5 if self.scale is None else self.scale
        k_scale, v_scale = self.kv_scales if kv_cache.dtype == FP8 else (1.0, 1.0)
        return scale * k_scale, v_scale


PLAIN = Scoring()


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_lens: Tensor,
    seq_lens: Tensor,
    scoring: Scoring = PLAIN,
    ahead: Tensor | None = None,
) -> Tensor:
    """Causal attention of the tokens of a step over the pages of their sequences, one sequence after the other.

    Args:
        block_tables: int64 [B, max_blocks], physical block of each logical block.
        query_lens: int64 [B], tokens of each sequence in this step: its last tokens. Their rows in q follow each
            other.
        seq_lens: int64 [B], tokens of each sequence, including this step's.
        ahead: int64 [T], how many later tokens of its sequence each token sees as well. None: none.
        the others: as in layers/attention.py.

    Returns: [T, heads, head_dim]
    """
    (_, num_heads, head_dim), num_kv_heads = q.shape, kv_cache.shape[2]
    block_size = kv_cache.shape[3] // head_dim
    scale, v_scale = scoring.for_cache(kv_cache, head_dim)
    outputs = []
    ahead = query_lens.new_zeros(len(q)) if ahead is None else ahead
    each = q.split(query_lens.tolist()), ahead.split(query_lens.tolist()), block_tables, seq_lens.tolist()
    for queries_of_one, ahead_of_one, table, length in zip(*each, strict=True):
        # The sequence's pages: k [1, kv_heads, head_dim, tokens], for K is transposed, and v [1, kv_heads, tokens, ..].
        k, v = gather(kv_cache, table[None, : -(-length // block_size)], head_dim)
        k, v = k[0, :, :, :length].to(q.dtype), v[0, :, :length].to(q.dtype)
        keys = torch.arange(length, device=q.device)
        positions = keys[length - len(queries_of_one) :, None]
        hidden = keys > positions + ahead_of_one.to(q.device)[:, None]  # [queries, keys]
        if scoring.window is not None:
            hidden |= keys <= positions - scoring.window
        # Several query heads share a KV head.
        heads = queries_of_one.view(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        scores = scale * torch.einsum("qhgd,hdk->hgqk", heads, k)
        if scoring.softcap:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        scores = scores.masked_fill(hidden, -torch.inf)
        if scoring.sinks is not None:
            sinks = scoring.sinks.to(q.dtype).view(num_kv_heads, -1, 1, 1)
            scores = torch.cat((scores, sinks.expand(*scores.shape[:3], 1)), -1)
        weights = scores.softmax(-1)[..., :length]
        outputs.append(v_scale * torch.einsum("hgqk,hkd->qhgd", weights, v).flatten(1, 2))
    return torch.cat(outputs)
