"""Paged attention on a GPU: Triton kernels for decodes and for prompts, and one that merges the splits of decodes.

All query heads that share a KV head are rows of one tile of ROWS rows, so they read a page only once. A program reads
the context in tiles of TILE tokens, gathered through the block table, whatever the size of a block. Softmax is online:
it keeps a running maximum, the sum of the exponentials and the weighted sum of V, and rescales them when the maximum
grows (FlashAttention, Dao et al. 2022).

    decode   a program: one sequence, one KV head, one split of the context       merge    a program: a sequence, a head
             q [heads of it, head_dim]                                                     all its splits, each weighed
             ┌──────┬──────┬──────┬──────┬───                                              by 2^(log-sum-exp)
             │ tile │ tile │ tile │ tile │ ...    context, by the block table
             └──────┴──────┴──────┴──────┴───
             └── split 0 ──┘└── split 1 ──┘       one query is too little work for a GPU: the splits are worked on
                                                  at the same time (Flash-Decoding, Dao et al. 2023)
    prefill  a program: one sequence, one KV head, ROWS // (heads of it) queries; tiles up to its last query's position

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
STAGES = 5  # of a decode's pipeline: the next tiles are loaded while one is computed
SPLIT_TOKENS = 256  # a smaller split costs more to merge than it gains
MERGED = 16  # splits that `merge_kernel` reads at once

# Integers and addresses that change from step to step. Triton would specialize on each kind of value (1, a multiple of
# 16) and compile the kernels again.
VARYING: dict[str, list[str]] = {
    "do_not_specialize": ["num_splits", "table_stride"],
    "do_not_specialize_on_alignment": ["table_ptr", "seq_len_ptr", "query_start_ptr"],
}


@triton.jit
def attend(
    q,  # [ROWS, LANES]
    oldest,  # [ROWS] the first position that each row sees
    newest,  # [ROWS] the last position that each row sees
    begin,  # the first position to read, a multiple of TILE
    end,  # the position after the last one that counts
    table_ptr,  # the sequence's row of the block table
    k_ptr,  # of the KV head in block 0
    v_ptr,
    block_stride,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax over tiles: weighted sum of V [ROWS, LANES], maximum [ROWS] and sum of exponentials [ROWS]."""
    RUN: tl.constexpr = min(TILE, BLOCK_SIZE)  # tokens of a tile that are contiguous
    dim, lane = tl.arange(0, LANES), tl.arange(0, TILE)
    inside = dim < HEAD_DIM
    EXACT: tl.constexpr = tl.float64 if q.dtype == tl.float64 else tl.float32  # the dtype of sums
    acc = tl.zeros((q.shape[0], LANES), EXACT)
    highest = tl.full((q.shape[0],), float("-inf"), EXACT)
    total = tl.zeros((q.shape[0],), EXACT)
    for start in range(begin, end, TILE):
        position = start + lane
        written = position < end  # slots beyond may hold anything, and 0 * NaN is NaN
        block = tl.load(table_ptr + tl.minimum(position, end - 1) // BLOCK_SIZE).to(tl.int64) * block_stride
        token = position % BLOCK_SIZE
        # K [head_dim, block_size] and V [block_size, head_dim] of a page (see pages.py). The compiler does not know the
        # table, so it has to be told that the tokens of a page are contiguous.
        column = tl.max_contiguous(tl.multiple_of(block + token, RUN), RUN)
        k = tl.load(k_ptr + column[None, :] + dim[:, None] * BLOCK_SIZE, mask=inside[:, None], other=0.0).to(q.dtype)
        v_at = (block + token * HEAD_DIM)[:, None] + dim[None, :]
        v = tl.load(v_ptr + v_at, mask=written[:, None] & inside[None, :], other=0.0).to(q.dtype)
        scores = tl.dot(q, k, input_precision=PRECISION, out_dtype=EXACT) * SCALE
        if SOFTCAP > 0:
            scores = SOFTCAP * (2 * tl.sigmoid(2 * scores / SOFTCAP) - 1)  # SOFTCAP * tanh(scores / SOFTCAP)
        seen = (position[None, :] >= oldest[:, None]) & (position[None, :] <= newest[:, None])
        scores = tl.where(seen, scores * 1.4426950408889634, float("-inf"))  # log2(e): exponentials are powers of two
        higher = tl.maximum(highest, tl.max(scores, 1))
        reference = tl.where(higher == float("-inf"), 0.0, higher)  # the row has seen nothing yet
        weights = tl.exp2(scores - reference[:, None])
        faded = tl.exp2(highest - reference)
        total = total * faded + tl.sum(weights, 1)
        acc = tl.dot(weights.to(q.dtype), v, acc * faded[:, None], input_precision=PRECISION, out_dtype=EXACT)
        highest = higher
    return acc, highest, total


@triton.jit
def split_of(seq_len, split, num_splits, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Returns: begin and end of one split of the tokens that a decode sees, and how many splits are not empty."""
    oldest = tl.maximum(seq_len - WINDOW, 0) if WINDOW else 0
    first_tile = oldest // TILE
    num_tiles = tl.cdiv(seq_len, TILE) - first_tile
    share = tl.maximum(tl.cdiv(num_tiles, num_splits), 1)
    begin = (first_tile + split * share) * TILE
    return begin, tl.minimum(begin + share * TILE, seq_len), tl.cdiv(num_tiles, share)


@triton.jit(**VARYING)
def decode_kernel(
    q_ptr,
    cache_ptr,
    table_ptr,
    seq_len_ptr,
    out_ptr,
    partial_ptr,  # float32 or float64 [B, heads, splits, HEAD_DIM]: each split's output
    lse_ptr,  # of the same type [B, heads, splits]: its log-sum-exp, base 2
    q_token_stride,
    q_head_stride,
    table_stride,
    kv_stride,
    block_stride,
    head_stride,
    num_splits,
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
):
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(seq_len_ptr + sequence)
    begin, end, _ = split_of(seq_len, split, num_splits, WINDOW, TILE)
    if SPLIT:  # noqa: SIM102 (known when the kernel is compiled, unlike the condition inside)
        if begin >= end:
            return
    row, dim = tl.arange(0, ROWS), tl.arange(0, LANES)
    head = kv_head * GROUP + row
    inside = (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    q_at = sequence.to(tl.int64) * q_token_stride + head[:, None] * q_head_stride + dim[None, :]
    q = tl.load(q_ptr + q_at, mask=inside, other=0.0)
    k_ptr = cache_ptr + kv_head * head_stride
    newest = tl.zeros((ROWS,), tl.int32) + seq_len - 1
    oldest = tl.maximum(newest - WINDOW + 1, 0) if WINDOW else tl.zeros((ROWS,), tl.int32)
    acc, highest, total = attend(
        q, oldest, newest, begin, end, table_ptr + sequence.to(tl.int64) * table_stride, k_ptr, k_ptr + kv_stride,
        block_stride, HEAD_DIM, LANES, BLOCK_SIZE, TILE, SCALE, SOFTCAP, PRECISION,
    )  # fmt: skip
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]  # padding has no context: its output is 0
    at = sequence.to(tl.int64) * tl.num_programs(1) * GROUP + head
    if SPLIT:
        at = at * num_splits + split
        tl.store(partial_ptr + at[:, None] * HEAD_DIM + dim[None, :], acc, mask=inside)
        tl.store(lse_ptr + at, highest + tl.log2(total), mask=row < GROUP)
    else:
        tl.store(out_ptr + at[:, None] * HEAD_DIM + dim[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["seq_len_ptr"])
def merge_kernel(
    partial_ptr,
    lse_ptr,
    seq_len_ptr,
    out_ptr,
    num_splits,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    MERGED: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    seq_len = tl.load(seq_len_ptr + sequence)
    _, _, active = split_of(seq_len, 0, num_splits, WINDOW, TILE)
    dim, lane = tl.arange(0, LANES), tl.arange(0, MERGED)
    row = sequence.to(tl.int64) * tl.num_programs(1) + head
    EXACT: tl.constexpr = lse_ptr.dtype.element_ty
    acc = tl.zeros((LANES,), EXACT)
    highest, total = tl.full((), float("-inf"), EXACT), tl.zeros((), EXACT)
    for start in range(0, active, MERGED):
        split = start + lane
        lse = tl.load(lse_ptr + row * num_splits + split, mask=split < active, other=float("-inf"))
        higher = tl.maximum(highest, tl.max(lse, 0))
        weights, faded = tl.exp2(lse - higher), tl.exp2(highest - higher)
        at = (row * num_splits + split)[:, None] * HEAD_DIM + dim[None, :]
        partial = tl.load(partial_ptr + at, mask=(split < active)[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
        acc = acc * faded + tl.sum(partial * weights[:, None], 0)
        total = total * faded + tl.sum(weights, 0)
        highest = higher
    acc = acc / tl.where(total == 0, 1.0, total)
    tl.store(out_ptr + row * HEAD_DIM + dim, acc.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


@triton.jit(**VARYING)
def prefill_kernel(
    q_ptr,
    cache_ptr,
    table_ptr,
    query_start_ptr,
    seq_len_ptr,
    out_ptr,
    q_token_stride,
    q_head_stride,
    table_stride,
    kv_stride,
    block_stride,
    head_stride,
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
):
    QUERIES: tl.constexpr = ROWS // GROUP
    sequence, kv_head = tl.program_id(2), tl.program_id(1)
    first_row = tl.load(query_start_ptr + sequence)
    num_queries = tl.load(query_start_ptr + sequence + 1) - first_row
    first_query = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES  # the longest contexts start first
    if first_query >= num_queries:
        return
    seq_len = tl.load(seq_len_ptr + sequence)
    context = seq_len - num_queries  # tokens before the first query
    row, dim = tl.arange(0, ROWS), tl.arange(0, LANES)
    query, head = first_query + row // GROUP, kv_head * GROUP + row % GROUP
    inside = ((row < QUERIES * GROUP) & (query < num_queries))[:, None] & (dim < HEAD_DIM)[None, :]
    token = (first_row + query).to(tl.int64)
    q_at = token[:, None] * q_token_stride + head[:, None] * q_head_stride + dim[None, :]
    q = tl.load(q_ptr + q_at, mask=inside, other=0.0)
    newest = context + query
    oldest = tl.maximum(newest - WINDOW + 1, 0) if WINDOW else tl.zeros((ROWS,), tl.int32)
    begin = tl.maximum(context + first_query - WINDOW + 1, 0) // TILE * TILE if WINDOW else 0
    end = tl.minimum(context + first_query + QUERIES, seq_len)
    k_ptr = cache_ptr + kv_head * head_stride
    acc, _, total = attend(
        q, oldest, newest, begin, end, table_ptr + sequence.to(tl.int64) * table_stride, k_ptr, k_ptr + kv_stride,
        block_stride, HEAD_DIM, LANES, BLOCK_SIZE, TILE, SCALE, SOFTCAP, PRECISION,
    )  # fmt: skip
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    out_at = (token * tl.num_programs(1) * GROUP + head)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=inside)


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
    """

    slot_mapping: Tensor
    block_tables: Tensor
    query_start: Tensor
    seq_lens: Tensor
    num_decodes: int
    max_query_len: int
    num_splits: int

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, window: int | None = None) -> Tensor:
        cache_write.write(k, v, kv_cache, self.slot_mapping)
        return self.attend(q, kv_cache, window)

    def attend(
        self,
        q: Tensor,
        kv_cache: Tensor,
        window: int | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of q [T, heads, head_dim] over each sequence's pages: [T, heads, head_dim].

        Args:
            kv_cache: one layer's cache (see pages.py). block_size must be a power of two.
            window: attend only to the last `window` tokens, including the token itself. None: to all.
            scale: of the scores; default head_dim ** -0.5.
            softcap: scores become softcap * tanh(scores / softcap); 0 for none (Gemma 2).
            out: filled and returned, [T, heads, head_dim], contiguous. None: a new tensor.
        """
        scale = q.shape[2] ** -0.5 if scale is None else scale
        if out is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        options, first = (window or 0, scale, softcap), self.num_decodes
        if first:
            decode(q, kv_cache, self.block_tables, self.seq_lens, out, first, self.num_splits, *options)
        if first < len(self.block_tables):
            tables, query_start, seq_lens = self.block_tables[first:], self.query_start[first:], self.seq_lens[first:]
            prefill(q, kv_cache, tables, query_start, seq_lens, out, self.max_query_len, *options)
        return out


def make_attention(
    slot_mapping: Tensor,
    block_tables: Tensor,
    query_lens: Tensor,
    seq_lens: Tensor,
    num_kv_heads: int,
    device: torch.device,
) -> TritonAttention:
    """Make the attention of a step.

    Args: query_lens, seq_lens: int64 [B], on the CPU; the others as in TritonAttention.
    """
    query_start = torch.zeros(len(query_lens) + 1, dtype=torch.int32)
    query_start[1:] = query_lens.cumsum(0)
    num_decodes = int((query_lens == 1).sum())
    num_splits = choose_splits(seq_lens[:num_decodes].tolist(), num_kv_heads, num_processors(device))
    lens = to_device(seq_lens.int(), device)
    query_start, longest = to_device(query_start, device), int(query_lens.max())
    return TritonAttention(slot_mapping, block_tables, query_start, lens, num_decodes, longest, num_splits)


def choose_splits(seq_lens: list[int], num_kv_heads: int, num_processors: int) -> int:
    """How many splits to cut contexts into.

    A split of the longest context has at most the average work of a program, if each processor runs two programs. But
    the longest context has at most one split for every SPLIT_TOKENS tokens, rounded up.
    """
    tokens = triton.cdiv(sum(seq_lens) * num_kv_heads, 2 * num_processors)
    return max(1, triton.cdiv(max(seq_lens, default=0), max(tokens, SPLIT_TOKENS)))


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
) -> None:
    """Compute the first `num_decodes` rows of out, one for each sequence. A window of 0 means none."""
    num_heads, head_dim = q.shape[1:]
    split = num_splits > 1
    options = decode_options(q, kv_cache, window, scale, softcap, split, has_tensor_cores(q.device))
    partial, lse = out, out  # placeholders
    if split:
        exact = torch.promote_types(q.dtype, torch.float32)
        partial = q.new_empty(num_decodes, num_heads, num_splits, head_dim, dtype=exact)
        lse = q.new_empty(num_decodes, num_heads, num_splits, dtype=exact)
    decode_kernel[num_decodes, kv_cache.shape[2], num_splits](
        q, kv_cache, block_tables, seq_lens, out, partial, lse, q.stride(0), q.stride(1), block_tables.stride(0),
        *kv_cache.stride()[:3], num_splits, **options,
    )  # fmt: skip
    if split:
        merged = merge_options(options)
        merge_kernel[num_decodes, num_heads](partial, lse, seq_lens, out, num_splits, **merged)


def prefill(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    max_query_len: int,
    window: int,
    scale: float,
    softcap: float,
) -> None:
    """Compute rows query_start[0] to query_start[-1] of out, any number for each sequence. A window of 0 means none."""
    options = prefill_options(q, kv_cache, window, scale, softcap, has_tensor_cores(q.device))
    grid = triton.cdiv(max_query_len, options["ROWS"] // options["GROUP"]), kv_cache.shape[2], len(block_tables)
    prefill_kernel[grid](
        q, kv_cache, block_tables, query_start, seq_lens, out, q.stride(0), q.stride(1), block_tables.stride(0),
        *kv_cache.stride()[:3], **options,
    )  # fmt: skip


def decode_options(
    q: Tensor, kv_cache: Tensor, window: int, scale: float, softcap: float, split: bool, fast: bool
) -> dict[str, Any]:
    """The constants that decode_kernel is specialized on, and its warps and stages. `fast`: see has_tensor_cores."""
    options, row_bytes = _options(q, kv_cache, window, scale, softcap, fast)
    rows = max(16, triton.next_power_of_2(options["GROUP"]))
    return options | {"SPLIT": split, "ROWS": rows, "num_warps": 8 if row_bytes > 512 else 4, "num_stages": STAGES}


def merge_options(decode: dict[str, Any]) -> dict[str, Any]:
    """The same for merge_kernel. It must split the contexts as decode_kernel does with the options `decode`."""
    shared = {name: decode[name] for name in ("HEAD_DIM", "LANES", "TILE", "WINDOW")}
    return shared | {"MERGED": MERGED, "num_warps": 4}


def prefill_options(
    q: Tensor, kv_cache: Tensor, window: int, scale: float, softcap: float, fast: bool
) -> dict[str, Any]:
    """The same for prefill_kernel, with as many rows as its registers can hold."""
    options, row_bytes = _options(q, kv_cache, window, scale, softcap, fast)
    num_bytes = 2**14 if fast and q.itemsize == 2 else 2**13
    rows = max(min(max(num_bytes // row_bytes, 16), 128), triton.next_power_of_2(options["GROUP"]))
    return options | {"ROWS": rows, "num_warps": 8}


def _options(
    q: Tensor, kv_cache: Tensor, window: int, scale: float, softcap: float, fast: bool
) -> tuple[dict[str, Any], int]:
    """The constants of both kernels, and the bytes of a row. Raises: ValueError if block_size is not a power of two."""
    head_dim = q.shape[2]
    block_size = kv_cache.shape[3] // head_dim
    if block_size & (block_size - 1):
        raise ValueError(f"block_size={block_size} is not a power of two, as attention on a GPU requires")
    lanes = max(16, triton.next_power_of_2(head_dim))
    row_bytes = lanes * (q.itemsize if fast else max(q.itemsize, 4))  # without tensor cores products are in float32
    return {
        "GROUP": q.shape[1] // kv_cache.shape[2],
        "HEAD_DIM": head_dim,
        "LANES": lanes,
        "BLOCK_SIZE": block_size,
        "TILE": min(max(TILE_BYTES // row_bytes, 16), 128),
        "WINDOW": window,
        "SCALE": scale,
        "SOFTCAP": softcap,
        # three products of TF32 for one of float32; the relative error is about 2^-22
        "PRECISION": "tf32x3" if fast and q.dtype == torch.float32 else "ieee",
    }, row_bytes


@lru_cache
def has_tensor_cores(device: torch.device) -> bool:
    """Whether the GPU has tensor cores that Triton uses: Ampere and later. True on a CPU, for the interpreter."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
