"""Steps of nothing but decodes, on static buffers padded to one of a few batch sizes: on CUDA one graph replay each.

A decode step of a small model takes a GPU less time than its kernels take to be launched one by one. So the whole step,
from input ids to sampled ids, is captured once for every batch size and replayed from then on (CUDA Graphs; vLLM and
gpt-fast do the same). A step writes which rows of the sequence table it is about, and their lengths:

    rows, seq_lens   int64 [2, size]  ──▶ ┌─ one graph of `size` ─────────────────────────────────────┐
    sequence table                    ──▶ │ input ids ─▶ layers ─▶ head ─▶ logits ─▶ sampled ─▶ table │ ──▶ the host
                                          └───────────────────────────────────────────────────────────┘

Everything else follows from the sequence table on the device. Beyond the batch, rows are padding: the table's last row,
with length 0. They write no K and V and attend to nothing.

Attention's grid is captured with the rest, so the number of splits of the contexts cannot follow a step's lengths.
Each size is therefore captured with the splits that fill the GPU if all contexts are equal, and with GROWTH times as
many and so on, for batches in which few sequences have most of the tokens, as far as the longest context can use them.

On a CPU the same code runs on the same buffers, without capture; it is there for the tests.
"""

from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from nanopage.device import to_device
from nanopage.kernels.pages import pad_tables
from nanopage.kernels.reference import ReferenceAttention
from nanopage.layers.attention import Attention
from nanopage.models.decoder import Decoder
from nanopage.sampling.sampler import at_least_float32, gumbel_max
from nanopage.step import Batch
from nanopage.worker.eager import Output
from nanopage.worker.kv_cache import KVCache
from nanopage.worker.sequence_table import SequenceTable

GROWTH = 4
LARGEST_SIZE = 512  # a step of more sequences takes a GPU longer than its launches take the host


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, 16, then by 16 to 64 and by 32 to `most`, or to LARGEST_SIZE."""
    most = min(most, LARGEST_SIZE)
    sizes = [1, 2, 4, 8, *range(16, 64, 16), *range(64, most + 1, 32)]
    return [size for size in sizes if size < most] + [most]


class CUDAGraphs:
    """The static buffers of a model's decode steps, and on CUDA the graphs that work on them.

    Args:
        model: whose layers may be compiled.
        kv_cache: the pool its K and V are in.
        table: of the sequences; its last row is for padding.
        max_model_len: tokens of the longest context.
        uses_triton: whether attention is that of Triton's kernels.
        wrap: what the functions before and after the model are passed through, to be compiled.
    """

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        table: SequenceTable,
        max_model_len: int,
        uses_triton: bool,
        wrap: Callable[[Callable], Callable] = lambda function: function,
    ):
        self.model, self.kv_cache, self.table, self.uses_triton = model, kv_cache, table, uses_triton
        self.before, self.after = wrap(look_up), wrap(sample)
        self.device, self.max_model_len = table.device, max_model_len
        self.sizes = batch_sizes(len(table.tokens) - 1)
        most, dtype = self.sizes[-1], kv_cache.tensor.dtype
        self.ints = torch.zeros(2 * most, dtype=torch.int64, device=self.device)
        self.query_start = torch.arange(most + 1, dtype=torch.int32, device=self.device)
        self.logits = torch.empty(most, model.lm_head.out_features, dtype=dtype, device=self.device)
        self.sampled = torch.zeros(most, dtype=torch.int64, device=self.device)
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}  # by size and number of splits
        self._splits: dict[int, list[int]] = {}  # splits_of each size that has been run
        self._pool: Any = None  # of the memory that they share

    def fits(self, batch: Batch) -> bool:
        """Whether a batch is of decodes alone, each sampled for itself, and not larger than the largest size."""
        return (
            len(batch.rows) <= self.sizes[-1]
            and batch.sampled_rows == batch.rows
            and batch.num_tokens == len(batch.rows)
        )

    @torch.inference_mode()
    def run(self, batch: Batch) -> Output:
        """The logits and tokens are valid until the next call."""
        num_rows = len(batch.rows)
        size = next(size for size in self.sizes if size >= num_rows)
        padding, seq_lens = size - num_rows, [start + 1 for start in batch.starts]
        rows = batch.rows + [len(self.table.tokens) - 1] * padding
        self.ints[: 2 * size] = to_device([*rows, *seq_lens, *[0] * padding], self.device, torch.int64)
        num_splits = self._choose_splits(size, seq_lens)
        if self.graphs:
            self.graphs[size, num_splits].replay()
        else:
            self._step(size, num_splits, num_rows)
        return Output(self.logits[:num_rows], tokens=self.sampled[:num_rows])

    def _step(self, size: int, num_splits: int, num_rows: int) -> None:
        """What is captured. Of `num_rows` without Triton: plain torch cannot skip padding."""
        rows, seq_lens = self.ints[: 2 * size].view(2, size).unbind()
        table, sampling, block_size = self.table, self.table.sampling, self.kv_cache.block_size
        input_ids, positions, slots, block_tables = self.before(
            rows, seq_lens, table.tokens, table.block_tables, block_size
        )
        attention: Attention
        if self.uses_triton:
            from nanopage.kernels.paged_attention import TritonAttention  # imports Triton

            starts = self.query_start[: size + 1]
            attention = TritonAttention(slots, block_tables, starts, seq_lens.int(), size, 1, num_splits)
        else:
            attention = PaddedAttention(slots[:num_rows], block_tables[:num_rows], seq_lens[:num_rows])
        hidden = self.model(input_ids, positions, self.kv_cache.tensor, attention)
        logits = self.model.lm_head(hidden)
        tokens = self.after(logits, rows, seq_lens, sampling.temperature, sampling.seed)
        self.logits[:size] = logits
        self.sampled[:size] = tokens
        table.record(rows, positions + 1, tokens)

    def splits_of(self, size: int) -> list[int]:
        """The numbers of splits that a size is captured with."""
        if not self.uses_triton:
            return [1]
        from nanopage.kernels.paged_attention import choose_splits, num_processors

        heads, processors = self.kv_cache.tensor.shape[3], num_processors(self.device)
        splits = [choose_splits([self.max_model_len] * size, heads, processors)]
        most = choose_splits([self.max_model_len], heads, processors)  # one sequence has nearly all the tokens
        while splits[-1] < most:
            splits.append(min(GROWTH * splits[-1], most))
        return splits

    def _choose_splits(self, size: int, seq_lens: list[int]) -> int:
        """The smallest number there is whose programs are at most twice as long as these lengths ask for."""
        if size not in self._splits:
            self._splits[size] = self.splits_of(size)
        captured = self._splits[size]
        if len(captured) == 1:
            return captured[0]
        from nanopage.kernels.paged_attention import choose_splits, num_processors

        wanted = choose_splits(seq_lens, self.kv_cache.tensor.shape[3], num_processors(self.device))
        return next((splits for splits in captured if 2 * splits >= wanted), captured[-1])

    @torch.inference_mode()
    def capture(self, sizes: list[int]) -> None:
        """Capture these sizes, the largest first, so that the others find room in its memory.

        Raises: MemoryError, naming the size at which the GPU's memory ran out and the options that help.
        """
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        cases = [(size, splits) for size in reversed(sizes) for splits in self.splits_of(size)]
        console = Console(stderr=True)
        for size, splits in track(cases, "Capturing CUDA graphs", console=console, transient=True):
            try:
                self._step(size, splits, 0)  # whatever is made at a first call can not be made while capturing
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._pool):
                    self._step(size, splits, 0)
            except RuntimeError as error:
                if "out of memory" not in str(error):
                    raise
                raise MemoryError(
                    f"the GPU's memory ran out while the graph of batch size {size} was captured: lower max_num_seqs "
                    "or gpu_memory_utilization, or set enforce_eager"
                ) from None
            self.graphs[size, splits] = graph
        torch.cuda.synchronize(self.device)


class PaddedAttention:
    """Plain attention of decodes of which only the first are sequences; the others are padding."""

    def __init__(self, slots: Tensor, block_tables: Tensor, seq_lens: Tensor):
        self.slots, self.block_tables, self.seq_lens = slots, block_tables, seq_lens

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, window: int | None = None) -> Tensor:
        size, block_size = len(self.slots), kv_cache.shape[3] // q.shape[2]
        tables = pad_tables(self.block_tables, -(-self.seq_lens // block_size))
        attention = ReferenceAttention(self.slots, tables, torch.ones_like(self.seq_lens), self.seq_lens)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        out[:size] = attention(q[:size], k[:size], v[:size], kv_cache, window)
        return out


def look_up(
    rows: Tensor, seq_lens: Tensor, tokens: Tensor, block_tables: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(input_ids, positions, slot_mapping: int64 [size], block_tables [size, blocks]) of rows of the sequence table."""
    positions = (seq_lens - 1).clamp(min=0)
    tables = block_tables.index_select(0, rows)
    blocks = tables.gather(1, (positions // block_size)[:, None]).squeeze(1).long()
    slots = torch.where(seq_lens > 0, blocks * block_size + positions % block_size, -1)
    return tokens[rows, positions].long(), positions, slots, tables


def sample(logits: Tensor, rows: Tensor, seq_lens: Tensor, temperatures: Tensor, seeds: Tensor) -> Tensor:
    """A token for each row: int64 [size]."""
    logits = at_least_float32(logits)
    # A sequence's length is the position of the token to be sampled.
    return gumbel_max(logits, temperatures[rows].to(logits.dtype), seeds[rows], seq_lens)
