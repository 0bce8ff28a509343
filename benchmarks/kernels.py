"""Measures the Triton kernels alone: time and bandwidth by batch, context and heads, compared with torch's kernels.

A decode must read the K and V of every token once, so bytes / time is compared with the bandwidth of a copy, measured
in the same run. SDPA and FlexAttention get contiguous K and V, which a paged cache cannot give: they are only a bound.
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from benchmarks.outputs import exit_unless, recorded
from benchmarks.report import console, figure, show_header, show_table, table_of

GIB = 2**30
HEADS = ((32, 8, 128), (9, 3, 64))  # query heads, KV heads, head_dim: Llama 3 8B's, SmolLM2 135M's
DECODES = ((1, 512), (1, 4096), (1, 32768), (8, 4096), (32, 512), (32, 4096), (64, 4096), (128, 1024), (256, 512))
PROMPTS = ((1, 512), (1, 4096), (8, 512), (8, 2048))
CHUNKS = ((1, 32768, 32), (1, 32768, 256))  # the last number: queries of a chat's turn, after cached tokens
BLOCK_SIZE = 16
DEVICE = torch.device("cuda")


def kernels(
    dtype: torch.dtype, kv_dtype: torch.dtype, num_iters: int, header: dict[str, str], json_file: Path | None
) -> None:
    """Measure everything, print the tables, write the JSON."""
    if not torch.cuda.is_available():
        console.print(
            "time and bandwidth of the Triton kernels need a GPU, and torch sees none here: not measured. The "
            "registers and shared memory they take can be printed: python -m benchmarks.kernel_resources",
            highlight=False,
        )
        raise typer.Exit(1)
    copy = copy_bandwidth()
    show_header(header | {"copy": f"{copy:.0f} GB/s, read and written"})
    work = [("decode", *heads, *shape, 1) for heads in HEADS for shape in DECODES]
    work += [("prefill", *heads, *shape, shape[1]) for heads in HEADS for shape in PROMPTS]
    work += [("chunk", *heads, *shape) for heads in HEADS for shape in CHUNKS]
    rows: list[dict[str, Any]] = []
    columns = ["", "batch", "tokens", "heads", "us", "GB/s", "of a copy", "TFLOP/s", "torch us", "SDPA us", "Flex us"]
    title = "Paged attention, medians; beside it torch's reference, SDPA and FlexAttention"
    table = table_of(title, columns)
    with recorded(json_file, lambda: {"header": header, "copy_gb_s": copy, "rows": rows}) as record:
        try:
            for case in work:
                row = measure(*case, dtype, kv_dtype, num_iters)
                rows.append(row | {"of_copy": row["gb_s"] / copy})
                table.add_row(*cells(row, copy))
        finally:
            show_table(table)
    exit_unless(record.written)


def cells(row: dict[str, Any], copy: float) -> list[str]:
    """A line of the table. Decodes are bound by memory, prompts by arithmetic, short chunks by either."""
    bound = [figure(row["gb_s"]), f"{row['gb_s'] / copy:.0%}", figure(row["tflop_s"])]
    for i in {"decode": (2,), "prefill": (0, 1), "chunk": ()}[row["kind"]]:
        bound[i] = "-"
    times = [figure(row[name]) for name in ("nanopage", "reference", "sdpa", "flex")]
    tokens = f"{row['queries']} of {row['tokens']}" if row["kind"] == "chunk" else row["tokens"]
    return [*map(str, (row["kind"], row["batch"], tokens, row["heads"])), times[0], *bound, *times[1:]]


def copy_bandwidth() -> float:
    """The bandwidth of a copy in GB/s, counting bytes read and bytes written."""
    source = torch.empty(GIB, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * GIB / (time_of(lambda: target.copy_(source), 20) / 1e6) / 1e9


def time_of(function: Callable[[], Any], num_iters: int) -> float:
    """The median time in microseconds. Before every call, a buffer that is larger than the GPU's cache is read. If it
    were written, the cache would have to write it back to memory during the call."""
    flush = torch.zeros(GIB // 16, dtype=torch.float32, device=DEVICE)
    for _ in range(3):
        function()
    times = []
    for _ in range(num_iters):
        flush.amax()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end))
    return statistics.median(times)


def measure(
    kind: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    batch: int,
    tokens: int,
    queries: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    num_iters: int,
) -> dict[str, Any]:
    """One row: `batch` sequences of `tokens` tokens, whose last `queries` tokens are queries."""
    from nanopage.kernels import paged_attention
    from nanopage.kernels.grouped_attention import GroupedAttention

    blocks = -(-tokens // BLOCK_SIZE)
    kv_cache = torch.randn(2, batch * blocks, kv_heads, head_dim * BLOCK_SIZE, device=DEVICE, dtype=dtype).to(kv_dtype)
    tables = torch.randperm(batch * blocks, device=DEVICE).view(batch, blocks).int()  # as in a sequence table on a GPU
    q = torch.randn(batch * queries, heads, head_dim, device=DEVICE, dtype=dtype)
    query_lens, seq_lens = torch.full((batch,), queries), torch.full((batch,), tokens)
    no_slots = torch.zeros(0, dtype=torch.int64, device=DEVICE)  # nothing is written
    grouped = GroupedAttention(no_slots, tables, query_lens, seq_lens)
    attention = paged_attention.make_attention(grouped, heads, kv_heads, head_dim, dtype)
    row: dict[str, Any] = {"kind": kind, "batch": batch, "tokens": tokens, "queries": queries}
    row["heads"] = f"{heads}/{kv_heads} x {head_dim}"
    # Captured as a CUDA graph, as the engine runs decodes, so that launches take no time.
    ours = captured(lambda: attention.attend(q, kv_cache))
    row["nanopage"] = time_of(ours, num_iters)
    num_bytes = 2 * batch * tokens * kv_heads * head_dim * kv_cache.itemsize
    row["gb_s"] = num_bytes / row["nanopage"] / 1e3
    pairs = queries * tokens - queries * (queries - 1) / 2
    row["tflop_s"] = 4 * batch * heads * head_dim * pairs / row["nanopage"] / 1e6
    row["reference"] = time_if_it_runs(lambda: lambda: grouped.attend(q, kv_cache), max(3, num_iters // 10))
    shapes = (heads, queries), (kv_heads, tokens), (kv_heads, tokens)
    a, k, v = (torch.randn(batch, n, length, head_dim, device=DEVICE, dtype=dtype) for n, length in shapes)
    causal = kind == "prefill"  # SDPA's mask is not for fewer queries than keys: for a chunk, it computes all pairs
    row["sdpa"] = time_if_it_runs(
        lambda: captured(lambda: F.scaled_dot_product_attention(a, k, v, is_causal=causal, enable_gqa=True)), num_iters
    )
    row["flex"] = time_if_it_runs(lambda: captured(flex(a, k, v, queries > 1)), num_iters)
    return row


def time_if_it_runs(make: Callable[[], Callable[[], Any]], num_iters: int) -> float | None:
    """The time of the function that `make` returns. If making or running it fails, prints why and returns None."""
    try:
        return time_of(make(), num_iters)
    except Exception as error:  # compilers raise many kinds of exceptions
        console.print(f"left out: {str(error).splitlines()[0]}", style="dim", highlight=False)
        return None


def captured(function: Callable[[], Any]) -> Callable[[], None]:
    """The function as a CUDA graph."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def flex(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Callable[[], Tensor]:
    """FlexAttention, compiled for these shapes."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    cached = k.shape[2] - q.shape[2]

    def before(b, h, query, key):
        return cached + query >= key

    torch._dynamo.reset()  # otherwise it would stop compiling after some shapes
    mask = create_block_mask(before, None, None, q.shape[2], k.shape[2]) if causal else None
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)
