"""CUDAGraphs: runs steps that have only decodes, each by replaying a CUDA graph.

For a small model, launching the kernels of a decode step one by one takes longer than running them. So the whole step,
from input ids to sampled ids, is captured for each of a few batch sizes and then replayed (vLLM and gpt-fast do
the same). The input of a graph is the rows of the sequence table that the step computes, and their lengths:

    rows, seq_lens   int64 [2, size]  ──▶ ┌─ one graph of `size` ─────────────────────────────────────┐
    sequence table                    ──▶ │ input ids ─▶ layers ─▶ head ─▶ logits ─▶ sampled ─▶ table │ ──▶ the host
                                          └───────────────────────────────────────────────────────────┘

The graph looks up everything else in the sequence table on the device. A batch is padded to the size of a graph with
the table's last row and length 0. Padding writes no K and V and attends to nothing.

A graph fixes the grid of the attention kernel, so the number of splits of the contexts cannot depend on a step's
lengths. Each size is therefore captured several times: with one split, with GROWTH, and so on, up to the number that
the longest context can use. A step takes the graph whose number is close to what its lengths need, because empty splits
take time, too.

Without `capture`, the same code runs on the same buffers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from nanopage.device import to_device
from nanopage.layers.attention import StepContext
from nanopage.models.decoder import Decoder
from nanopage.sampling.sampler import sample_rows
from nanopage.state.kv_cache import KVCache
from nanopage.state.layer_kinds import STATE
from nanopage.state.sequence_table import SequenceTable
from nanopage.step import Batch
from nanopage.worker.eager import Output
from nanopage.worker.state_pages import StatePages

GROWTH = 4  # from one captured number of splits to the next
LARGEST_SIZE = 1024  # with more sequences, a step takes a GPU longer than its launches take the host


def batch_sizes(most: int) -> list[int]:
    """The batch sizes to capture: 1, 2, 4, 8, then every 16 up to 64, every 32 up to 512 and every 64 up to `most` or
    LARGEST_SIZE, and that number itself."""
    most = min(most, LARGEST_SIZE)
    sizes = [1, 2, 4, 8, *range(16, 64, 16), *range(64, 512, 32), *range(512, most, 64)]
    return [size for size in sizes if size < most] + [most]


def no_wrap(function: Callable) -> Callable:
    return function


@contextmanager
def naming_what_helps(what: str, options: str) -> Iterator[None]:
    """Capture graphs in this context. Raises: MemoryError if the GPU's memory runs out. The message names what was
    captured, and the options to lower."""
    try:
        yield
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        raise MemoryError(
            f"the GPU's memory ran out while {what} captured: lower {options}, or set enforce_eager"
        ) from None


class CUDAGraphs:
    """Runs decode steps on static buffers. Captures them as graphs and replays these.

    Args:
        model: its layers may be compiled.
        kv_cache: the pages of K and V.
        table: the state of each running sequence. Its last row is for padding.
        sample_all: samples all rows after the model (see `make_sample_all`).
        wrap: compiles the function that runs before the model.
    """

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        table: SequenceTable,
        sample_all: Callable[..., Tensor],
        wrap: Callable[[Callable], Callable] = no_wrap,
    ):
        self.model, self.kv_cache, self.table = model, kv_cache, table
        self.look_up, self.sample_all = wrap(look_up), sample_all
        self.device, self.max_model_len = table.device, table.tokens.shape[1] - 1
        self.sizes = batch_sizes(len(table.tokens) - 1)
        most, dtype = self.sizes[-1], model.norm.weight.dtype
        self.ints = torch.zeros(2 * most, dtype=torch.int64, device=self.device)
        self.query_start = torch.arange(most + 1, dtype=torch.int32, device=self.device)
        self.logits = torch.empty(most, model.lm_head.out_features, dtype=dtype, device=self.device)
        self.sampled = torch.zeros(most, dtype=torch.int64, device=self.device)
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}  # key: size, number of splits
        self.taps: dict[tuple[int, int], dict[int, Any]] = {}  # of each graph, as in StepContext
        self.pool: Any = None  # the memory pool that all graphs share

    def fits(self, batch: Batch) -> bool:
        """Whether a batch has only decodes, samples each of them once, and is no larger than the largest size."""
        return (
            len(batch.rows) <= self.sizes[-1]
            and batch.sampled_rows == batch.rows
            and batch.num_tokens == len(batch.rows)
            and not (self.table.items is not None and self.table.items.reaches(batch))
        )

    @torch.inference_mode()
    def run(self, batch: Batch) -> Output:
        """Run a batch that fits. The next call overwrites the logits and tokens that this one returns."""
        num_rows = len(batch.rows)
        size = next(size for size in self.sizes if size >= num_rows)
        padding, seq_lens = size - num_rows, [start + 1 for start in batch.starts]
        rows = batch.rows + [len(self.table.tokens) - 1] * padding
        self.ints[: 2 * size] = to_device([*rows, *seq_lens, *[0] * padding], self.device, torch.int64)
        num_splits = self._choose_splits(seq_lens)
        if self.graphs:
            self.graphs[size, num_splits].replay()
        else:
            self._step(size, num_splits)
        self.table.taps.update(self.taps.get((size, num_splits), {}))
        return Output(self.logits[:num_rows], tokens=self.sampled[:num_rows])

    def _step(self, size: int, num_splits: int) -> None:
        """Run a step on the static buffers. This is what a graph captures."""
        rows, seq_lens = self.ints[: 2 * size].view(2, size).unbind()
        table, sampling = self.table, self.table.sampling
        input_ids, positions, pages = self.look_up(
            rows, seq_lens, table.tokens, table.blocks, table.block_size, table.windows
        )
        attentions = [self._make_attention(slots, tables, lens, num_splits) for slots, tables, lens in pages]
        layers = self.kv_cache.kinds.of_layers, self.kv_cache.layers
        places = positions if table.items is None else table.items.positions_after(rows, positions)
        self.taps[size, num_splits] = taps = dict.fromkeys(table.taps)
        step = StepContext(places, attentions, *layers, adapters=table.adapters_of(rows), taps=taps)
        logits = self.model.logits(self.model(input_ids, step))
        # A sequence's length is the position of the token to be sampled.
        tokens = self.sample_all(logits, rows, seq_lens, sampling.temperature, sampling.seed, sampling.limits)
        self.logits[:size] = logits
        self.sampled[:size] = tokens
        table.record(rows, positions + 1, tokens)

    def _make_attention(self, slots: Tensor, block_tables: Tensor, seq_lens: Tensor | None, num_splits: int) -> Any:
        """The attention of the layers of one kind, or where their states are. Padding writes to the last block."""
        if seq_lens is None:
            ones = np.ones(len(slots), dtype=np.int64)
            return StatePages(slots, block_tables % self.kv_cache.tensor.shape[2], 0 * ones, ones, ones)
        from nanopage.kernels.paged_attention import TritonAttention  # imports Triton

        size = len(slots)
        return TritonAttention(slots, block_tables, self.query_start[: size + 1], seq_lens.int(), size, 1, num_splits)

    @cached_property
    def splits(self) -> list[int]:
        """The numbers of splits that each size is captured with."""
        splits, most = [1], self._best_splits([self.max_model_len])
        while splits[-1] < most:
            splits.append(min(GROWTH * splits[-1], most))
        return splits

    def _choose_splits(self, seq_lens: list[int]) -> int:
        """The smallest captured number of splits that is more than half of what is best for these lengths."""
        if len(self.splits) == 1:
            return 1
        wanted = self._best_splits(seq_lens)
        return next((splits for splits in self.splits if 2 * splits > wanted), self.splits[-1])

    def _best_splits(self, seq_lens: list[int]) -> int:
        from nanopage.kernels.paged_attention import choose_splits, num_processors  # imports Triton

        return choose_splits(seq_lens, self.kv_cache.tensor.shape[3], num_processors(self.device))

    @torch.inference_mode()
    def capture(self, sizes: list[int]) -> None:
        """Capture graphs of these sizes. The largest is captured first, and the others reuse its memory.

        Raises: MemoryError if the GPU's memory runs out. The message names the size and the options that help.
        """
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        cases = [(size, splits) for size in reversed(sizes) for splits in self.splits]
        console = Console(stderr=True)
        for size, splits in track(cases, "Capturing CUDA graphs", console=console, transient=True):
            with naming_what_helps(f"the graph of batch size {size} was", "max_num_seqs or gpu_memory_utilization"):
                self._step(size, splits)  # a first call allocates and compiles, which capturing does not allow
                graph = torch.cuda.CUDAGraph()
                # Meanwhile, a thread of NCCL's may query events, which the default mode forbids to all threads.
                with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                    self._step(size, splits)
            self.graphs[size, splits] = graph
        torch.cuda.synchronize(self.device)


def look_up(
    rows: Tensor,
    seq_lens: Tensor,
    tokens: Tensor,
    blocks: Tensor,
    block_size: int,
    windows: tuple[int | None, ...] = (None,),
) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor, Tensor | None]]]:
    """Look up the inputs of a step in the sequence table.

    Args:
        blocks: [rows, max_blocks, kinds].
        windows: of each kind of layers.

    Returns: input_ids and positions, int64 [size] each; for each kind slot_mapping, int64 [size], block_tables [size,
        blocks], and seq_lens [size], the last two from the first block on that the window reaches (see
        GroupedAttention). Of states: sources and targets, int64 [size] each (see StatePages), and None; both are -1 for
        padding.
    """
    positions = (seq_lens - 1).clamp(min=0)
    pages: list[tuple[Tensor, Tensor, Tensor | None]] = []
    last, offsets, max_blocks = positions // block_size, positions % block_size, blocks.shape[1]
    for kind, window in enumerate(windows):
        tables, lens = blocks[:, :, kind], seq_lens
        if window == STATE:
            source = tables[rows, (positions - 1).clamp(min=0) // block_size].masked_fill(positions == 0, -1)
            pages.append((source.long(), tables[rows, last].masked_fill(seq_lens == 0, -1).long(), None))
            continue
        if window is None:
            tables, place = tables.index_select(0, rows), last
        else:
            first = (seq_lens - window).clamp(min=0) // block_size
            width = min(-(-(window - 1) // block_size) + 1, max_blocks)
            columns = first[:, None] + torch.arange(width, device=rows.device)
            tables = tables[rows[:, None], columns.clamp(max=max_blocks - 1)]
            place, lens = last - first, seq_lens - first * block_size
        own = tables.gather(1, place[:, None]).squeeze(1).long()
        pages.append((torch.where(seq_lens > 0, own * block_size + offsets, -1), tables, lens))
    return tokens[rows, positions].long(), positions, pages


def make_sample_all(wrap: Callable[[Callable], Callable] = no_wrap) -> Callable[..., Tensor]:
    """`sample_rows` with its first argument given, for CUDA graphs and for the `Sampler` of other steps.

    Args: wrap: compiles `sample_rows`.
    """
    from nanopage.kernels.floors import find_floors  # imports Triton

    return partial(wrap(sample_rows), find_floors)
