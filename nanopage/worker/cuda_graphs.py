"""Steps of nothing but decodes, on static buffers padded to one of a few batch sizes: on CUDA one graph replay each.

A decode step of a small model takes a GPU less time than its kernels take to be launched one by one. So the whole step,
from input ids to sampled ids, is captured once for every batch size and replayed from then on (CUDA Graphs; vLLM and
gpt-fast do the same). A step writes its inputs to the buffers that the graphs read:

    input_ids, seq_lens, seeds   int64 [3, size]       ──▶ ┌─ one graph of `size` ──────────────────────┐
    temperatures                 float [size]          ──▶ │ placeholders ◀── sampled, of the last step │
    block_tables                 int32 [size, blocks]  ──▶ │ layers ─▶ head ─▶ logits ─▶ sampled        │ ──▶ the host
                                                           └────────────────────────────────────────────┘

Rows beyond the batch are padding, of length 0: they write no K and V and attend to nothing. Positions and slots follow
from lengths and tables on the device.

Attention's grid is captured with the rest, so the number of splits of the contexts can not follow a step's lengths.
Each size is therefore captured with the splits that fill the GPU if all contexts are equal, and with GROWTH times as
many and so on, for batches in which few sequences have most of the tokens, as far as the longest context can use them.

On a CPU the same code runs on the same buffers, without capture; it is there for the tests.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from nanopage.engine.scheduler import Batch, ScheduledSequence
from nanopage.layers.attention import AttentionMetadata, uses_triton
from nanopage.sampling.sampler import at_least_float32, gumbel_max, with_sampled
from nanopage.worker.device import to_device
from nanopage.worker.kv_cache import KVCache

GROWTH = 4
LARGEST_SIZE = 512  # a step of more sequences takes a GPU longer than its launches take the host


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, 16, then by 16 to 64 and by 32 to `most`, or to LARGEST_SIZE."""
    most = min(most, LARGEST_SIZE)
    sizes = [1, 2, 4, 8, *range(16, 64, 16), *range(64, most + 1, 32)]
    return [size for size in sizes if size < most] + [most]


class DecodeGraphs:
    """The static buffers of a model's decode steps, and on CUDA the graphs that work on them.

    Args:
        model: whose layers may be compiled.
        kv_cache: the pool its K and V are in.
        sampled: int64 [max_num_seqs], on the device: what the last step sampled, read for placeholders and written.
        max_model_len: tokens of the longest context.
        wrap: what the functions before and after the model are passed through, to be compiled.
    """

    def __init__(
        self,
        model: Any,
        kv_cache: KVCache,
        sampled: Tensor,
        max_model_len: int,
        wrap: Callable[[Callable], Callable] = lambda function: function,
    ):
        self.model, self.kv_cache, self.sampled = model, kv_cache, sampled
        self.before, self.after = wrap(inputs_of), wrap(sample)
        self.device, self.max_model_len = sampled.device, max_model_len
        self.sizes = batch_sizes(len(sampled))
        most = self.sizes[-1]
        dtype = kv_cache.tensor.dtype
        exact = torch.promote_types(dtype, torch.float32)
        self.ints = torch.zeros(3 * most, dtype=torch.int64, device=self.device)
        self.temperatures = torch.zeros(most, dtype=exact, device=self.device)
        blocks = -(-max_model_len // kv_cache.block_size)
        self.block_tables = torch.zeros(most, blocks, dtype=torch.int32, device=self.device)
        self.query_start = torch.arange(most + 1, dtype=torch.int32, device=self.device)
        self.logits = torch.empty(most, model.lm_head.out_features, dtype=dtype, device=self.device)
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}  # by size and number of splits
        self._splits: dict[int, list[int]] = {}  # splits_of each size that has been run
        self._pool: Any = None  # of the memory that they share
        self._loaded = 0, 0, 0  # size, number of splits, sequences

    def fit(self, batch: Batch) -> bool:
        """Whether a batch is of decodes alone, each sampled for itself, and not larger than the largest size."""
        sequences = batch.sequences
        return len(sequences) <= self.sizes[-1] and all(s.num_tokens == 1 and s.samplers == [s.seq] for s in sequences)

    @torch.inference_mode()
    def load(self, sequences: list[ScheduledSequence]) -> None:
        """Write the inputs of a batch that fits to the buffers."""
        num_rows = len(sequences)
        size = next(size for size in self.sizes if size >= num_rows)
        padding = [0] * (size - num_rows)
        seq_lens = [s.start + 1 for s in sequences]
        ids, seeds = [s.seq.token_ids[-1] for s in sequences], [s.seq.seed for s in sequences]
        temperatures = [0.0 if s.seq.params.greedy else s.seq.params.temperature for s in sequences]
        ints = [*ids, *padding, *seq_lens, *padding, *seeds, *padding]
        self.ints[: 3 * size] = to_device(ints, self.device, torch.int64)
        self.temperatures[:size] = to_device([*temperatures, *padding], self.device, self.temperatures.dtype)
        tables = stack_tables(sequences)
        self.block_tables[:num_rows, : tables.shape[1]] = to_device(tables.int(), self.device)
        self._loaded = size, self._choose_splits(size, seq_lens), num_rows

    @torch.inference_mode()
    def run(self) -> Tensor:
        """Run what was loaded. Returns its logits [B, vocab_size], valid until the next call, and leaves in `sampled` a
        token for each sequence: at its temperature, without constraints and truncation."""
        size, num_splits, num_rows = self._loaded
        if self.graphs:
            self.graphs[size, num_splits].replay()
        else:
            self._step(size, num_splits, num_rows)
        return self.logits[:num_rows]

    def _step(self, size: int, num_splits: int, num_rows: int) -> None:
        """What is captured. Of `num_rows` without Triton: plain torch can not skip padding."""
        ints, tables = self.ints[: 3 * size].view(3, size), self.block_tables[:size]
        input_ids, positions, slots, seq_lens = self.before(ints, tables, self.sampled, self.kv_cache.block_size)
        if uses_triton(self.device):
            from nanopage.kernels.paged_attention import Step  # imports Triton

            step = Step(self.query_start[: size + 1], seq_lens, size, 1, num_splits)
            metadata = AttentionMetadata(slots, tables, self.query_start, self.query_start, step=step)
        else:
            ones = torch.ones(num_rows, dtype=torch.int64)
            metadata = AttentionMetadata(slots[:num_rows], tables[:num_rows], ones, seq_lens[:num_rows])
        hidden = self.model(input_ids, positions, self.kv_cache.tensor, metadata)
        logits = self.model.lm_head(hidden)
        self.logits[:size] = logits
        self.sampled[:size] = self.after(logits, self.temperatures[:size], ints)

    def splits_of(self, size: int) -> list[int]:
        """The numbers of splits that a size is captured with."""
        if not uses_triton(self.device):
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


def stack_tables(sequences: list[ScheduledSequence]) -> Tensor:
    """Their block tables, each padded with its first block to the longest: int64 [B, blocks], on the CPU."""
    width = max(len(s.block_table) for s in sequences)
    # NumPy reads nested lists three times as fast as torch.
    return torch.from_numpy(
        np.array([s.block_table + s.block_table[:1] * (width - len(s.block_table)) for s in sequences])
    )


def inputs_of(ints: Tensor, tables: Tensor, sampled: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(input_ids, positions, slot_mapping: int64 [size], seq_lens: int32 [size]) of a step's `ints` [3, size]."""
    input_ids, seq_lens, _ = ints
    positions = (seq_lens - 1).clamp(min=0)
    blocks = tables.gather(1, (positions // block_size)[:, None]).squeeze(1)
    slots = torch.where(seq_lens > 0, blocks * block_size + positions % block_size, -1)
    return with_sampled(input_ids, sampled), positions, slots, seq_lens.int()


def sample(logits: Tensor, temperatures: Tensor, ints: Tensor) -> Tensor:
    """A token for each row: int64 [size]."""
    _, seq_lens, seeds = ints
    # A sequence's length is the position of the token to be sampled.
    return gumbel_max(at_least_float32(logits), temperatures, seeds, seq_lens)
