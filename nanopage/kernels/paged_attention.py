"""Paged attention on a GPU: Triton kernels for decodes and for prompts, and one that merges the splits of a context.

All query heads that share a KV head are rows of one tile of ROWS rows, so they read a page only once. A program reads
the context in tiles of TILE tokens, gathered through the block table, whatever the size of a block. Softmax is online:
it keeps a running maximum, the sum of the exponentials and the weighted sum of V, and rescales them when the maximum
grows (FlashAttention, Dao et al. 2022).

    decode   a program: one sequence, one KV head, one split of the context       merge    a program: a token, a head
             q [heads of it, head_dim]                                                     all its splits, each weighed
             ┌──────┬──────┬──────┬──────┬───                                              by 2^(log-sum-exp)
             │ tile │ tile │ tile │ tile │ ...    context, by the block table
             └──────┴──────┴──────┴──────┴───
             └── split 0 ──┘└── split 1 ──┘       few queries are too little work for a GPU: the splits are worked on
                                                  at the same time (Flash-Decoding, Dao et al. 2023)
    prefill  a program: one sequence, one KV head, ROWS // (heads of it) queries, one split of what they see

A prompt's context is split, too, where all programs together would not fill the GPU: a short chunk over a long context.

The grid of decodes depends only on the batch size and the number of splits, so a captured graph serves any lengths.
Programs without work return at once.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanopage.device import to_device
from nanopage.kernels import cache_write

TILE_BYTES = 2**14  # of K in a tile; V has as many
# Stages of a pipeline: while a tile is computed, the next ones are loaded, and before them their blocks' numbers. Timed
# on an H200, decodes of 64 sequences of 4,096 tokens read at 95 % of a copy's bandwidth with 4 stages, and at 70 % with
# 5, whose programs take 71 KiB of shared memory instead of 39. A cache in fp8 was not timed.
STAGES, FP8_STAGES, PROMPT_STAGES = 4, 7, 5
SPLIT_TOKENS = 256  # a smaller split of a decode costs more to merge than it gains
PROMPT_SPLIT_TOKENS = 1024  # the same for prompts, whose programs have more outputs to store and to merge
PROMPT_SPLIT_BYTES = 2**26  # at most, for the outputs of all splits of a step's prompts
MERGED = 16  # splits that `merge_kernel` reads at once

# Integers and addresses that change from step to step. Triton would specialize on each kind of value (1, a multiple of
# 16) and compile the kernels again.
VARYING: dict[str, list[str]] = {
    "do_not_specialize": ["num_splits", "table_stride"],
    "do_not_specialize_on_alignment": ["table_ptr", "seq_len_ptr", "query_start_ptr"],
}


@triton.jit
def attend(
    acc,  # [ROWS, LANES] the weighted sum of V so far
    highest,  # [ROWS] the largest score so far, times log2(e)
    total,  # [ROWS] the sum of the weights so far
    q,  # [ROWS, LANES]
    oldest,  # [ROWS] the first position that each row sees
    newest,  # [ROWS] the last position that each row sees
    begin,  # the first position to read, a multiple of TILE
    end,  # the position after the last one to read; a multiple of TILE, too, if not MASKED
    table_ptr,  # the sequence's row of the block table
    k_ptr,  # of the KV head in block 0
    v_ptr,
    block_stride,
    k_scale,
    MASKED: tl.constexpr,  # whether a row may not see all positions from `begin` to `end`
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax over tiles of keys. Returns: acc, highest and total, updated."""
    RUN: tl.constexpr = min(TILE, BLOCK_SIZE)  # tokens of a tile that are contiguous
    LOG2_E: tl.constexpr = 1.4426950408889634  # exponentials are powers of two
    scale = tl.full((), SCALE, acc.dtype)  # Triton's interpreter makes float32 of a variable that is a Python number
    if k_ptr.dtype.element_ty == tl.float8e4nv:
        scale *= k_scale
    factor = tl.full((), LOG2_E, acc.dtype) if SOFTCAP > 0 else scale * LOG2_E
    dim, lane = tl.arange(0, LANES), tl.arange(0, TILE)
    inside = dim < HEAD_DIM
    for start in range(begin, end, TILE):
        position = start + lane
        written = tl.minimum(position, end - 1) if MASKED else position
        block = tl.load(table_ptr + written // BLOCK_SIZE).to(tl.int64) * block_stride
        token = position % BLOCK_SIZE
        # K [head_dim, block_size] and V [block_size, head_dim] of a page (see pages.py). The compiler does not know the
        # table, so it has to be told that the tokens of a page are contiguous.
        column = tl.max_contiguous(tl.multiple_of(block + token, RUN), RUN)
        k = tl.load(k_ptr + column[None, :] + dim[:, None] * BLOCK_SIZE, mask=inside[:, None], other=0.0).to(q.dtype)
        # Slots behind the last token may hold anything, and 0 * NaN is NaN.
        needed = (position < end)[:, None] & inside[None, :] if MASKED else inside[None, :]
        v_at = (block + token * HEAD_DIM)[:, None] + dim[None, :]
        v = tl.load(v_ptr + v_at, mask=needed, other=0.0).to(q.dtype)
        scores = tl.dot(q, k, input_precision=PRECISION, out_dtype=acc.dtype)
        if SOFTCAP > 0:
            scores = SOFTCAP * (2 * tl.sigmoid(2 * scores * scale / SOFTCAP) - 1)  # SOFTCAP * tanh(score / SOFTCAP)
        if MASKED:
            seen = (position[None, :] >= oldest[:, None]) & (position[None, :] <= newest[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1) * factor)
        reference = tl.where(higher == float("-inf"), 0.0, higher)  # the row has seen nothing yet
        weights = tl.exp2(scores * factor - reference[:, None])
        faded = tl.exp2(highest - reference)
        total = total * faded + tl.sum(weights, 1)
        acc = tl.dot(weights.to(q.dtype), v, acc * faded[:, None], input_precision=PRECISION, out_dtype=acc.dtype)
        highest = higher
    return acc, highest, total


@triton.jit
def nothing_seen(q):
    """What `attend` begins with: acc, highest and total, in float32 at least."""
    EXACT: tl.constexpr = tl.float64 if q.dtype == tl.float64 else tl.float32
    highest = tl.full((q.shape[0],), float("-inf"), EXACT)
    return tl.zeros((q.shape[0], q.shape[1]), EXACT), highest, tl.zeros((q.shape[0],), EXACT)


@triton.jit
def split_of(begin, end, split, num_splits, LEAST: tl.constexpr, TILE: tl.constexpr):
    """Begin and end of one of the splits of the positions from `begin` to `end`. A split begins with a tile and has at
    least LEAST tiles, so the last ones of `num_splits` splits may be empty."""
    first_tile = begin // TILE
    share = tl.maximum(tl.cdiv(tl.cdiv(end, TILE) - first_tile, num_splits), LEAST)
    begin = (first_tile + split * share) * TILE
    return begin, tl.minimum(begin + share * TILE, end)


@triton.jit
def store_split(
    acc,  # [ROWS, LANES]
    lse,  # [ROWS] log-sum-exp, base 2
    row,  # [ROWS] the token and head of each row, as an index into [tokens, heads]
    valid,  # [ROWS] which rows are not padding
    split,
    num_splits,
    partial_ptr,  # float32 or float64 [tokens, heads, splits, HEAD_DIM]: each split's output
    lse_ptr,  # of the same type [tokens, heads, splits]: its log-sum-exp; -inf if the row sees nothing of the split
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
):
    """Store what merge_kernel reads."""
    dim, at = tl.arange(0, LANES), row * num_splits + split
    tl.store(partial_ptr + at[:, None] * HEAD_DIM + dim[None, :], acc, mask=valid[:, None] & (dim < HEAD_DIM)[None, :])
    tl.store(lse_ptr + at, lse, mask=valid)


@triton.jit(**VARYING)
def decode_kernel(
    q_ptr,
    cache_ptr,
    table_ptr,
    seq_len_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    q_token_stride,
    q_head_stride,
    table_stride,
    kv_stride,
    block_stride,
    head_stride,
    num_splits,
    k_scale,  # only for a cache in fp8
    v_scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT: tl.constexpr,
    LEAST: tl.constexpr,
):
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, dim = tl.arange(0, ROWS), tl.arange(0, LANES)
    head, valid = kv_head * GROUP + row, row < GROUP
    seq_len = tl.load(seq_len_ptr + sequence)
    newest = tl.zeros((ROWS,), tl.int32) + seq_len - 1
    oldest = tl.maximum(newest - WINDOW + 1, 0) if WINDOW else tl.zeros((ROWS,), tl.int32)
    first = tl.maximum(seq_len - WINDOW, 0) if WINDOW else 0
    begin, end = split_of(first, seq_len, split, num_splits, LEAST, TILE)
    if SPLIT:  # noqa: SIM102 (known when the kernel is compiled, unlike the condition inside)
        if begin >= end:
            out_row = sequence.to(tl.int64) * tl.num_programs(1) * GROUP + head
            tl.store(lse_ptr + out_row * num_splits + split, tl.full((ROWS,), float("-inf"), tl.float32), mask=valid)
            return
    inside = valid[:, None] & (dim < HEAD_DIM)[None, :]
    q_at = sequence.to(tl.int64) * q_token_stride + head[:, None] * q_head_stride + dim[None, :]
    q = tl.load(q_ptr + q_at, mask=inside, other=0.0)
    k_ptr = cache_ptr + kv_head * head_stride
    acc, highest, total = nothing_seen(q)
    # All tiles are masked: reading them takes longer than the mask, and a second loop would have to fill its pipeline.
    acc, highest, total = attend(
        acc, highest, total, q, oldest, newest, begin, end, table_ptr + sequence.to(tl.int64) * table_stride, k_ptr,
        k_ptr + kv_stride, block_stride, k_scale, True, HEAD_DIM, LANES, BLOCK_SIZE, TILE, SCALE, SOFTCAP, PRECISION,
    )  # fmt: skip
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]  # padding has no context: its output is 0
    if cache_ptr.dtype.element_ty == tl.float8e4nv:
        acc *= v_scale
    out_row = sequence.to(tl.int64) * tl.num_programs(1) * GROUP + head
    if SPLIT:
        lse = highest + tl.log2(total)
        store_split(acc, lse, out_row, valid, split, num_splits, partial_ptr, lse_ptr, HEAD_DIM, LANES)
    else:
        tl.store(out_ptr + out_row[:, None] * HEAD_DIM + dim[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(**VARYING)
def prefill_kernel(
    q_ptr,
    cache_ptr,
    table_ptr,
    query_start_ptr,
    seq_len_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    q_token_stride,
    q_head_stride,
    table_stride,
    kv_stride,
    block_stride,
    head_stride,
    num_splits,
    k_scale,  # only for a cache in fp8
    v_scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT: tl.constexpr,
    LEAST: tl.constexpr,
):
    QUERIES: tl.constexpr = ROWS // GROUP
    sequence, kv_head = tl.program_id(2), tl.program_id(1)
    first_row = tl.load(query_start_ptr + sequence)
    num_queries = tl.load(query_start_ptr + sequence + 1) - first_row
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest contexts start first
    first_query = (program // num_splits if SPLIT else program) * QUERIES
    if first_query >= num_queries:
        return
    seq_len = tl.load(seq_len_ptr + sequence)
    row, dim = tl.arange(0, ROWS), tl.arange(0, LANES)
    query, head = first_query + row // GROUP, kv_head * GROUP + row % GROUP
    valid = (row < QUERIES * GROUP) & (query < num_queries)
    token, num_heads = (first_row + query).to(tl.int64), tl.num_programs(1) * GROUP
    position = seq_len - num_queries + first_query  # of the first query
    begin = tl.maximum(position - WINDOW + 1, 0) // TILE * TILE if WINDOW else 0
    end = tl.minimum(position + QUERIES, seq_len)
    if SPLIT:
        split = program % num_splits
        split_row = (token - tl.load(query_start_ptr)) * num_heads + head
        begin, end = split_of(begin, end, split, num_splits, LEAST, TILE)
        if begin >= end:
            tl.store(lse_ptr + split_row * num_splits + split, tl.full((ROWS,), float("-inf"), tl.float32), mask=valid)
            return
    inside = valid[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + token[:, None] * q_token_stride + head[:, None] * q_head_stride + dim[None, :], inside, 0.0)
    newest = seq_len - num_queries + query
    oldest = tl.maximum(newest - WINDOW + 1, 0) if WINDOW else tl.zeros((ROWS,), tl.int32)
    # The tiles from `inner` to `diagonal` need no mask: all rows see all of their positions.
    inner = tl.minimum(tl.maximum(tl.cdiv(position + QUERIES - WINDOW, TILE) * TILE, begin), end) if WINDOW else begin
    diagonal = tl.maximum(tl.minimum(position + 1, end) // TILE * TILE, inner)
    bounds = begin, inner, diagonal, end
    k_ptr = cache_ptr + kv_head * head_stride
    acc, highest, total = nothing_seen(q)
    for part in tl.static_range(0 if WINDOW else 1, 3):
        acc, highest, total = attend(
            acc, highest, total, q, oldest, newest, bounds[part], bounds[part + 1],
            table_ptr + sequence.to(tl.int64) * table_stride, k_ptr, k_ptr + kv_stride, block_stride, k_scale,
            part != 1, HEAD_DIM, LANES, BLOCK_SIZE, TILE, SCALE, SOFTCAP, PRECISION,
        )  # fmt: skip
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    if cache_ptr.dtype.element_ty == tl.float8e4nv:
        acc *= v_scale
    if SPLIT:
        lse = highest + tl.log2(total)
        store_split(acc, lse, split_row, valid, split, num_splits, partial_ptr, lse_ptr, HEAD_DIM, LANES)
    else:
        out_at = (token * num_heads + head)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    partial_ptr,
    lse_ptr,
    out_ptr,
    num_splits,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    MERGED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    dim, lane = tl.arange(0, LANES), tl.arange(0, MERGED)
    EXACT: tl.constexpr = lse_ptr.dtype.element_ty
    acc = tl.zeros((LANES,), EXACT)
    highest, total = tl.full((), float("-inf"), EXACT), tl.zeros((), EXACT)
    for start in range(0, num_splits, MERGED):
        split = start + lane
        lse = tl.load(lse_ptr + row * num_splits + split, mask=split < num_splits, other=float("-inf"))
        higher = tl.maximum(highest, tl.max(lse, 0))
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        weights, faded = tl.exp2(lse - reference), tl.exp2(highest - reference)
        at = (row * num_splits + split)[:, None] * HEAD_DIM + dim[None, :]
        stored = (lse > float("-inf"))[:, None] & (dim < HEAD_DIM)[None, :]  # nothing is stored of an empty split
        acc = acc * faded + tl.sum(tl.load(partial_ptr + at, mask=stored, other=0.0) * weights[:, None], 0)
        total = total * faded + tl.sum(weights, 0)
        highest = higher
    acc = acc / tl.where(total == 0, 1.0, total)
    tl.store(out_ptr + row * HEAD_DIM + dim, acc.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


@dataclass(slots=True)
class TritonAttention:
    """Attention of a step of T tokens of B sequences, those with one token first (see layers/attention.py).

    One kernel computes decodes, another one prompts.

    slot_mapping   int64 [T], on the device: block * block_size + offset of each token; -1 for padding
    block_tables   int32 or int64 [B, max_blocks], on the device: physical block of each logical block
    query_start    int32 [B + 1], on the device: index of each sequence's first token in the step
    seq_lens       int32 [B], on the device: tokens of each sequence, including this step's; 0 for padding
    num_decodes    how many sequences have one token in the step
    max_query_len  the most tokens of one sequence in the step
    num_splits     how many splits the context of each decode is cut into
    prompt_splits  how many splits the context of a prompt's queries is cut into
    """

    slot_mapping: Tensor
    block_tables: Tensor
    query_start: Tensor
    seq_lens: Tensor
    num_decodes: int
    max_query_len: int
    num_splits: int
    prompt_splits: int = 1

    def write(self, k: Tensor, v: Tensor, kv_cache: Tensor, scales: tuple[float, float] = (1.0, 1.0)) -> None:
        cache_write.write(k, v, kv_cache, self.slot_mapping, *scales)

    def attend(
        self,
        q: Tensor,
        kv_cache: Tensor,
        window: int | None = None,
        scales: tuple[float, float] = (1.0, 1.0),
        scale: float | None = None,
        softcap: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of q [T, heads, head_dim] over each sequence's pages: [T, heads, head_dim].

        Args:
            kv_cache: one layer's cache (see pages.py). block_size must be a power of two.
            the others: as in layers/attention.py.
        """
        scale = q.shape[2] ** -0.5 if scale is None else scale
        if out is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        options, first = (window or 0, scale, softcap, *scales), self.num_decodes
        if first:
            decode(q, kv_cache, self.block_tables, self.seq_lens, out, first, self.num_splits, *options)
        if first < len(self.block_tables):
            tables, query_start, seq_lens = self.block_tables[first:], self.query_start[first:], self.seq_lens[first:]
            inputs = q, kv_cache, tables, query_start, seq_lens, out
            prefill(*inputs, first, self.max_query_len, self.prompt_splits, *options)
        return out


def make_attention(
    slot_mapping: Tensor,
    block_tables: Tensor,
    query_lens: Tensor,
    seq_lens: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> TritonAttention:
    """Make the attention of a step.

    Args:
        query_lens, seq_lens: int64 [B], on the CPU; the other tensors as in TritonAttention.
        dtype: of q.
    """
    query_start = torch.zeros(len(query_lens) + 1, dtype=torch.int32)
    query_start[1:] = query_lens.cumsum(0)
    num_decodes = int((query_lens == 1).sum())
    processors = num_processors(device)
    num_splits = choose_splits(seq_lens[:num_decodes].tolist(), num_kv_heads, processors)
    prompt_splits = choose_prompt_splits(
        query_lens[num_decodes:].tolist(), seq_lens[num_decodes:].tolist(), num_heads, num_kv_heads, head_dim, dtype,
        architecture_of(device), processors,
    )  # fmt: skip
    lens = to_device(seq_lens.int(), device)
    query_start, longest = to_device(query_start, device), int(query_lens.max())
    return TritonAttention(
        slot_mapping, block_tables, query_start, lens, num_decodes, longest, num_splits, prompt_splits
    )


def choose_splits(contexts: list[int], num_kv_heads: int, num_processors: int, least: int | None = None) -> int:
    """How many splits to cut contexts into.

    A split of the longest context has at most the average work of a program, if each processor runs two programs. But
    the longest context has at most one split for every `least` tokens, rounded up.

    Args:
        contexts: how many tokens each program of one KV head reads, if nothing is split.
        least: None: SPLIT_TOKENS.
    """
    tokens = triton.cdiv(sum(contexts) * num_kv_heads, 2 * num_processors)
    return max(1, triton.cdiv(max(contexts, default=0), max(tokens, least or SPLIT_TOKENS)))


def choose_prompt_splits(
    query_lens: list[int],
    seq_lens: list[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    architecture: int,
    num_processors: int,
) -> int:
    """The same for prompts, of whose queries a program computes several. Their splits take at most PROMPT_SPLIT_BYTES,
    or are not made. `architecture`: see architecture_of."""
    group = num_heads // num_kv_heads
    rows, _ = prefill_tile(group, head_dim, dtype, architecture)
    queries = rows // group
    contexts = []
    for count, length in zip(query_lens, seq_lens, strict=True):
        contexts += [min(length, length - count + end) for end in range(queries, count + queries, queries)]
    splits = choose_splits(contexts, num_kv_heads, num_processors, PROMPT_SPLIT_TOKENS)
    split_bytes = sum(query_lens) * num_heads * head_dim * torch.promote_types(dtype, torch.float32).itemsize
    return max(1, min(splits, PROMPT_SPLIT_BYTES // max(split_bytes, 1)))


@lru_cache
def num_processors(device: torch.device) -> int:
    """The number of streaming multiprocessors; 1 on a CPU, where the kernels run in Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def decode(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    num_decodes: int,
    num_splits: int,
    window: int,
    scale: float,
    softcap: float,
    k_scale: float,
    v_scale: float,
) -> None:
    """Compute the first `num_decodes` rows of out, one for each sequence. A window of 0 means none."""
    split = num_splits > 1
    options = decode_options(q, kv_cache, window, scale, softcap, split, architecture_of(q.device))
    partial, lse = split_results(q, num_decodes, num_splits) if split else (out, out)  # placeholders
    decode_kernel[num_decodes, kv_cache.shape[2], num_splits](
        q, kv_cache, block_tables, seq_lens, out, partial, lse, q.stride(0), q.stride(1), block_tables.stride(0),
        *kv_cache.stride()[:3], num_splits, k_scale, v_scale, **options,
    )  # fmt: skip
    if split:
        merge(partial, lse, out[:num_decodes])


def prefill(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    num_decodes: int,
    max_query_len: int,
    num_splits: int,
    window: int,
    scale: float,
    softcap: float,
    k_scale: float,
    v_scale: float,
) -> None:
    """Compute the rows of out from `num_decodes` on, any number for each sequence: those of the first sequence from
    query_start[0] on. A window of 0 means none."""
    split = num_splits > 1
    options = prefill_options(q, kv_cache, window, scale, softcap, split, architecture_of(q.device))
    num_tiles = triton.cdiv(max_query_len, options["ROWS"] // options["GROUP"])
    partial, lse = split_results(q, len(q) - num_decodes, num_splits) if split else (out, out)  # placeholders
    prefill_kernel[num_tiles * num_splits, kv_cache.shape[2], len(block_tables)](
        q, kv_cache, block_tables, query_start, seq_lens, out, partial, lse, q.stride(0), q.stride(1),
        block_tables.stride(0), *kv_cache.stride()[:3], num_splits, k_scale, v_scale, **options,
    )  # fmt: skip
    if split:
        merge(partial, lse, out[num_decodes:])


def split_results(q: Tensor, num_tokens: int, num_splits: int) -> tuple[Tensor, Tensor]:
    """Memory for what each split computes: outputs [num_tokens, heads, num_splits, head_dim] and log-sum-exps
    [num_tokens, heads, num_splits]."""
    shape, exact = (num_tokens, q.shape[1], num_splits), torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(*shape, q.shape[2], dtype=exact), q.new_empty(*shape, dtype=exact)


def merge(partial: Tensor, lse: Tensor, out: Tensor) -> None:
    """Merge the splits of each row of out [tokens, heads, head_dim]."""
    num_tokens, num_heads, num_splits = lse.shape
    merge_kernel[num_tokens, num_heads](partial, lse, out, num_splits, **merge_options(out))


def decode_options(
    q: Tensor, kv_cache: Tensor, window: int, scale: float, softcap: float, split: bool, architecture: int
) -> dict[str, Any]:
    """The constants that decode_kernel is specialized on, and its warps and stages. `architecture`: see
    architecture_of."""
    options = _options(q, kv_cache, window, scale, softcap, architecture)
    row_bytes = _row_bytes(q.shape[2], q.dtype, architecture)
    tile = min(max(TILE_BYTES // row_bytes, 16), 128)
    rows = max(16, triton.next_power_of_2(options["GROUP"]))
    options |= {"ROWS": rows, "TILE": tile, "SPLIT": split, "LEAST": triton.cdiv(SPLIT_TOKENS, tile)}
    stages = STAGES if kv_cache.itemsize > 1 else FP8_STAGES
    return options | {"num_warps": 8 if row_bytes > 512 else 4, "num_stages": stages}


def prefill_options(
    q: Tensor, kv_cache: Tensor, window: int, scale: float, softcap: float, split: bool, architecture: int
) -> dict[str, Any]:
    """The same for prefill_kernel."""
    options = _options(q, kv_cache, window, scale, softcap, architecture)
    rows, tile = prefill_tile(options["GROUP"], q.shape[2], q.dtype, architecture)
    options |= {"ROWS": rows, "TILE": tile, "SPLIT": split, "LEAST": triton.cdiv(PROMPT_SPLIT_TOKENS, tile)}
    return options | {"num_warps": 8, "num_stages": PROMPT_STAGES if architecture >= 80 else 3}


def prefill_tile(group: int, head_dim: int, dtype: torch.dtype, architecture: int) -> tuple[int, int]:
    """The rows of a program of prefill_kernel, and the tokens of a tile: as many as fit its registers without spilling
    (see benchmarks/kernel_resources.py)."""
    row_bytes = _row_bytes(head_dim, dtype, architecture)
    num_bytes, tile_bytes = 2**13, TILE_BYTES
    if architecture >= 80 and dtype.itemsize == 2:
        num_bytes = 2**16 if 90 <= architecture < 100 else 2**15
        if not 90 <= architecture < 120:  # without wgmma and tcgen05, K and V take registers, too
            tile_bytes = TILE_BYTES // 2
    rows = max(min(max(num_bytes // row_bytes, 16), 128), triton.next_power_of_2(group))
    return rows, min(max(tile_bytes // row_bytes, 16), 128)


def merge_options(out: Tensor) -> dict[str, Any]:
    """The same for merge_kernel."""
    return {"HEAD_DIM": out.shape[2], "LANES": _lanes(out.shape[2]), "MERGED": MERGED, "num_warps": 4}


def _options(
    q: Tensor, kv_cache: Tensor, window: int, scale: float, softcap: float, architecture: int
) -> dict[str, Any]:
    """The constants of both kernels. Raises: ValueError if block_size is not a power of two."""
    head_dim = q.shape[2]
    block_size = kv_cache.shape[3] // head_dim
    if block_size & (block_size - 1):
        raise ValueError(f"block_size={block_size} is not a power of two, as attention on a GPU requires")
    return {
        "GROUP": q.shape[1] // kv_cache.shape[2],
        "HEAD_DIM": head_dim,
        "LANES": _lanes(head_dim),
        "BLOCK_SIZE": block_size,
        "WINDOW": window,
        "SCALE": scale,
        "SOFTCAP": softcap,
        # three products of TF32 for one of float32; the relative error is about 2^-22
        "PRECISION": "tf32x3" if architecture >= 80 and q.dtype == torch.float32 else "ieee",
    }


def _lanes(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _row_bytes(head_dim: int, dtype: torch.dtype, architecture: int) -> int:
    """Bytes of a row of q in a product: before Ampere, products are in float32, without tensor cores."""
    return _lanes(head_dim) * (dtype.itemsize if architecture >= 80 else max(dtype.itemsize, 4))


@lru_cache
def architecture_of(device: torch.device) -> int:
    """The GPU's architecture, such as 90 for compute capability 9.0. On a CPU 90, for the interpreter."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
