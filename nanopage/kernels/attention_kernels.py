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

Programs without work return at once. paged_attention.py launches the kernels.
"""

import triton
import triton.language as tl

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
def nothing_seen(q, sink_ptr, head, valid, split, SINKS: tl.constexpr):
    """What `attend` begins with: acc, highest and total, in float32 at least. A sink is a term of the first split."""
    EXACT: tl.constexpr = tl.float64 if q.dtype == tl.float64 else tl.float32
    LOG2_E: tl.constexpr = 1.4426950408889634
    highest, total = tl.full((q.shape[0],), float("-inf"), EXACT), tl.zeros((q.shape[0],), EXACT)
    if SINKS:
        has_sink = tl.where(split == 0, valid, False)
        highest = tl.load(sink_ptr + head, mask=has_sink, other=float("-inf")).to(EXACT) * LOG2_E
        total = has_sink.to(EXACT)
    return tl.zeros((q.shape[0], q.shape[1]), EXACT), highest, total


@triton.jit
def split_of(begin, end, split, num_splits, LEAST: tl.constexpr, TILE: tl.constexpr):
    """Begin and end of one of the splits of the positions from `begin` to `end`. A split begins with a tile and has at
    least LEAST tiles, so the last splits of `num_splits` may be empty."""
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
    sink_ptr,  # [heads], only with SINKS
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
    SINKS: tl.constexpr,
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
    acc, highest, total = nothing_seen(q, sink_ptr, head, valid, split, SINKS)
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
    sink_ptr,  # [heads], only with SINKS
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
    SINKS: tl.constexpr,
):
    QUERIES: tl.constexpr = ROWS // GROUP
    sequence, kv_head = tl.program_id(2), tl.program_id(1)
    first_row = tl.load(query_start_ptr + sequence)
    num_queries = tl.load(query_start_ptr + sequence + 1) - first_row
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest contexts start first
    split = program % num_splits
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
    acc, highest, total = nothing_seen(q, sink_ptr, head, valid, split, SINKS)
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
