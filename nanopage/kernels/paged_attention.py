"""Paged attention on a GPU: which kernel computes what, with how many splits, and in tiles of which size.

The kernels are in attention_kernels.py. The grid of decodes depends only on the batch size and the number of splits, so
a captured graph serves any lengths.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from nanopage.device import to_device
from nanopage.kernels import cache_write
from nanopage.kernels.attention_kernels import decode_kernel, merge_kernel, prefill_kernel
from nanopage.kernels.grouped_attention import GroupedAttention
from nanopage.kernels.reference import PLAIN, Scoring

TILE_BYTES = 2**14  # of K in a tile; V has as many
# Stages of a pipeline: while a tile is computed, the next ones are loaded, and before them the numbers of their blocks.
# Timed on an H200, decodes of 64 sequences of 4,096 tokens read at 95 % of a copy's bandwidth with 4 stages. With 5
# stages, they read at 70 %: a program then takes 71 KiB of shared memory instead of 39. A cache in fp8 was not timed.
STAGES, FP8_STAGES, PROMPT_STAGES = 4, 7, 5
SPLIT_TOKENS = 256  # a smaller split of a decode costs more to merge than it gains
PROMPT_SPLIT_TOKENS = 1024  # the same for prompts, whose programs have more outputs to store and to merge
PROMPT_SPLIT_BYTES = 2**26  # at most, for the outputs of all splits of a step's prompts
MERGED = 16  # splits that `merge_kernel` reads at once


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

    def attend(self, q: Tensor, kv_cache: Tensor, scoring: Scoring = PLAIN, out: Tensor | None = None) -> Tensor:
        """Causal attention of q [T, heads, head_dim] over each sequence's pages: [T, heads, head_dim].

        Args:
            kv_cache: one layer's cache (see pages.py). block_size must be a power of two.
            the others: as in layers/attention.py.
        """
        if out is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if self.num_decodes:
            self._decode(q, kv_cache, scoring, out)
        if self.num_decodes < len(self.block_tables):
            self._prefill(q, kv_cache, scoring, out)
        return out

    def _decode(self, q: Tensor, kv_cache: Tensor, scoring: Scoring, out: Tensor) -> None:
        """Compute the first `num_decodes` rows of out, one for each sequence."""
        num_rows, num_splits, tables, split = self.num_decodes, self.num_splits, self.block_tables, self.num_splits > 1
        options = decode_options(q, kv_cache, scoring, split, architecture_of(q.device))
        partial, lse = split_results(q, num_rows, num_splits) if split else (out, out)  # placeholders
        decode_kernel[num_rows, kv_cache.shape[2], num_splits](
            q, kv_cache, tables, self.seq_lens, out, partial, lse, *q.stride()[:2], tables.stride(0),
            *kv_cache.stride()[:3], num_splits, *scoring.kv_scales, q if scoring.sinks is None else scoring.sinks,
            **options,
        )  # fmt: skip
        if split:
            merge(partial, lse, out[:num_rows])

    def _prefill(self, q: Tensor, kv_cache: Tensor, scoring: Scoring, out: Tensor) -> None:
        """Compute the other rows of out, any number for each sequence."""
        first, num_splits, split = self.num_decodes, self.prompt_splits, self.prompt_splits > 1
        tables, query_start, seq_lens = self.block_tables[first:], self.query_start[first:], self.seq_lens[first:]
        options = prefill_options(q, kv_cache, scoring, split, architecture_of(q.device))
        num_tiles = triton.cdiv(self.max_query_len, options["ROWS"] // options["GROUP"])
        partial, lse = split_results(q, len(q) - first, num_splits) if split else (out, out)  # placeholders
        prefill_kernel[num_tiles * num_splits, kv_cache.shape[2], len(tables)](
            q, kv_cache, tables, query_start, seq_lens, out, partial, lse, *q.stride()[:2], tables.stride(0),
            *kv_cache.stride()[:3], num_splits, *scoring.kv_scales, q if scoring.sinks is None else scoring.sinks,
            **options,
        )  # fmt: skip
        if split:
            merge(partial, lse, out[first:])


def make_attention(
    plain: GroupedAttention, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> TritonAttention:
    """Make the attention of a step that computes the same as `plain`. dtype: of q."""
    slots, query_lens, seq_lens = plain.slot_mapping, plain.query_lens, plain.seq_lens
    device = slots.device
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
    sequences = plain.block_tables, query_start, lens
    return TritonAttention(slots, *sequences, num_decodes, longest, num_splits, prompt_splits)


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
    """Like `choose_splits`, for prompts: a program computes several of their queries. There are at most as many splits
    as fit into PROMPT_SPLIT_BYTES. `architecture`: see architecture_of."""
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


def split_results(q: Tensor, num_tokens: int, num_splits: int) -> tuple[Tensor, Tensor]:
    """Memory for what each split computes: outputs [num_tokens, heads, num_splits, head_dim] and log-sum-exps
    [num_tokens, heads, num_splits]."""
    shape, exact = (num_tokens, q.shape[1], num_splits), torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(*shape, q.shape[2], dtype=exact), q.new_empty(*shape, dtype=exact)


def merge(partial: Tensor, lse: Tensor, out: Tensor) -> None:
    """Merge the splits of each row of out [tokens, heads, head_dim]."""
    num_tokens, num_heads, num_splits = lse.shape
    merge_kernel[num_tokens, num_heads](partial, lse, out, num_splits, **merge_options(out))


def decode_options(q: Tensor, kv_cache: Tensor, scoring: Scoring, split: bool, architecture: int) -> dict[str, Any]:
    """The constants that decode_kernel is specialized on, and its warps and stages. `architecture`: see
    architecture_of."""
    options = _options(q, kv_cache, scoring, architecture)
    row_bytes = _row_bytes(q.shape[2], q.dtype, architecture)
    tile = min(max(TILE_BYTES // row_bytes, 16), 128)
    rows = max(16, triton.next_power_of_2(options["GROUP"]))
    options |= {"ROWS": rows, "TILE": tile, "SPLIT": split, "LEAST": triton.cdiv(SPLIT_TOKENS, tile)}
    stages = STAGES if kv_cache.itemsize > 1 else FP8_STAGES
    return options | {"num_warps": 8 if row_bytes > 512 else 4, "num_stages": stages}


def prefill_options(q: Tensor, kv_cache: Tensor, scoring: Scoring, split: bool, architecture: int) -> dict[str, Any]:
    """The same for prefill_kernel."""
    options = _options(q, kv_cache, scoring, architecture)
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


def _options(q: Tensor, kv_cache: Tensor, scoring: Scoring, architecture: int) -> dict[str, Any]:
    """The constants of both kernels."""
    head_dim = q.shape[2]
    return {
        "GROUP": q.shape[1] // kv_cache.shape[2],
        "HEAD_DIM": head_dim,
        "LANES": _lanes(head_dim),
        "BLOCK_SIZE": kv_cache.shape[3] // head_dim,  # a power of two
        "WINDOW": scoring.window or 0,  # 0: none
        "SCALE": head_dim**-0.5 if scoring.scale is None else scoring.scale,
        "SOFTCAP": scoring.softcap,
        "SINKS": scoring.sinks is not None,
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
