"""PiecewiseGraphs: runs mixed and prompt steps of few tokens, with the pieces between attentions as CUDA graphs.

The compiled pieces (jit.py) depend only on the number of tokens, but attention also depends on how these are divided
among sequences. So each piece is captured for a few numbers of tokens, and attention is launched between the replays,
as vLLM does:

    input_ids, positions, slots [3, size] ─▶ ┌─ graph 0 ─┐ q  attention  ┌─ graph 1 ─┐ q  attention  ...  last piece
                                             └───────────┘ K, V  ─▶      └───────────┘ K, V  ─▶
                                               attended [size, heads, head_dim]

A step is padded to the next captured size. Padding has slot -1: it writes no K and V, and attention does not see it.
Inputs, q, the output of attention and the last hidden states have static buffers, which all sizes share. The hidden
states in between stay in the graphs' memory. The last piece is launched directly, because it computes only the rows to
be sampled.

Weights differ from layer to layer, so there is a graph for each layer and size: 14 sizes of a model of 28 layers are
392 graphs. Padding to these sizes costs little time: a GPU's matrix products work on tiles of 64 rows or more, and with
up to about 256 rows they mostly wait for weights.

Without `capture`, the same code runs on the same buffers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from nanopage.kernels.grouped_attention import GroupedAttention
from nanopage.layers.attention import Attention, StepContext
from nanopage.state.kv_cache import KVCache
from nanopage.state.sequence_table import SequenceTable
from nanopage.step import Batch
from nanopage.worker.cuda_graphs import naming_what_helps
from nanopage.worker.eager import Output, prepare, run_model
from nanopage.worker.jit import Carried, CompiledDecoder

LARGEST_SIZE = 512  # with more tokens, a step takes a GPU longer than its launches take the host


def token_counts(most: int) -> list[int]:
    """The numbers of tokens to capture: 8, 16, 32, then every 32 up to 256 and every 64 up to `most` or LARGEST_SIZE,
    and that number itself."""
    most = min(most, LARGEST_SIZE)
    sizes = [8, 16, *range(32, 256, 32), *range(256, most, 64)]
    return [size for size in sizes if size < most] + [most]


class PiecewiseGraphs:
    """Runs steps of any kind on static buffers. Captures the pieces as graphs and replays these.

    Args:
        model: its pieces are captured.
        kv_cache: the pages of K and V.
        table: the state of each running sequence.
        make_attention: as in Eager.
        most: the most tokens of a step.
    """

    @torch.inference_mode()  # as steps are: torch compiles code again for tensors that were made otherwise
    def __init__(
        self,
        model: CompiledDecoder,
        kv_cache: KVCache,
        table: SequenceTable,
        make_attention: Callable[[GroupedAttention], Attention] | None,
        most: int,
    ):
        self.model, self.kv_cache, self.table, self.make_attention = model, kv_cache, table, make_attention
        self.sizes = token_counts(most)
        most = self.sizes[-1]
        # input_ids, positions and, for each kind of layers, slots
        self.ints = torch.zeros(2 + len(table.windows), most, dtype=torch.int64, device=table.device)
        self.ints[2:] = -1
        self.q, self.attended = model.new_heads(most).zero_(), model.new_heads(most).zero_()
        self.graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}  # of each layer, by size
        self.last: dict[int, Carried] = {}  # what the last graph of each size hands on
        self.pool: Any = None  # for graphs, while they are captured

    def fits(self, batch: Batch) -> bool:
        items = self.table.items
        return batch.num_tokens <= self.sizes[-1] and not (items is not None and items.reaches(batch))

    @torch.inference_mode()
    def run(self, batch: Batch) -> Output:
        input_ids, step = prepare(batch, self.table, self.kv_cache, self.make_attention)
        return run_model(self._forward, batch, input_ids, step, self.table, self.model.logits)

    def _forward(self, input_ids: Tensor, step: StepContext) -> Tensor:
        """As `Decoder.forward`."""
        num_tokens = len(input_ids)
        size = next(size for size in self.sizes if size >= num_tokens)
        slots = [attention.slot_mapping for attention in step.attentions]
        self.ints[:, :num_tokens] = torch.stack((input_ids, step.positions, *slots))
        self.ints[2:, num_tokens:size] = -1
        ids, positions, *slots = self.ints[:, :size]
        padded = StepContext(positions, [*map(NoAttention, slots)], step.kinds, step.kv_caches)
        carried = Carried(self.q, self.q[:size], self.attended[:size], padded, partial(self._run, size))
        carried = carried.run(0, partial(self.model.begin, ids, carried))
        return self.model.run_layers(carried, step)

    def _run(self, size: int, index: int, piece: Callable[[], Carried]) -> Carried:
        """Compute a piece on the static buffers, capture it, or replay it."""
        if self.pool is not None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                # `last` keeps the memory of a graph's outputs from being reused before the next graph has read them.
                self.last[size] = piece()
            self.graphs.setdefault(size, []).append(graph)
        elif self.graphs:
            self.graphs[size][index].replay()
        else:
            return piece()
        return self.last[size]

    @torch.inference_mode()
    def capture(self, sizes: list[int], pool: Any) -> None:
        """Capture graphs of these sizes. The largest is captured first, and the others reuse its memory.

        Args: pool: the memory pool of all graphs.
        Raises: MemoryError if the GPU's memory runs out. The message names the size and the options that help.
        """
        console = Console(stderr=True)
        for size in track(sizes[::-1], "Capturing CUDA graphs", console=console, transient=True):
            with naming_what_helps(f"the graphs of {size} tokens were", "gpu_memory_utilization"):
                self._capture(size, pool)
        torch.cuda.synchronize(self.table.device)

    def _capture(self, size: int, pool: Any) -> None:
        ids, slots = torch.zeros(2, size, dtype=torch.int64, device=self.table.device)
        attentions = [NoAttention(slots - 1)] * len(self.table.windows)
        graphs, self.graphs = self.graphs, {}
        for self.pool in (None, pool):  # a first call allocates and compiles, which capturing does not allow
            self._forward(ids, StepContext(ids, attentions, self.kv_cache.kinds.of_layers, self.kv_cache.layers))
        self.pool, self.graphs = None, graphs | self.graphs


@dataclass(slots=True)
class NoAttention:
    """The slots of padding, and of tokens whose attention is computed elsewhere."""

    slot_mapping: Tensor

    def attend(self, *arguments: Any) -> None: ...
