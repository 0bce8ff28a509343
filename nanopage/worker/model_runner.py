"""ModelRunner: a scheduled Batch to tensors, through the model and the sampler, to sampled tokens."""

import logging
import time
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from nanopage.engine.scheduler import Batch, ScheduledSequence
from nanopage.kernels.cpu.flash_decoding import split
from nanopage.kernels.cpu.packed_linear import can_pack
from nanopage.layers.attention import AttentionMetadata, uses_triton
from nanopage.layers.linear import pack
from nanopage.request import MAX_LOGPROBS, SamplingParams, Sequence, SequenceGroup, StepStats
from nanopage.sampling.sampler import (
    Sampler,
    Samples,
    at_least_float32,
    is_constrained,
    tables_of,
    top_logprobs,
    with_sampled,
)
from nanopage.worker.aot import Graphs
from nanopage.worker.cuda_graphs import DecodeGraphs, stack_tables
from nanopage.worker.device import to_device
from nanopage.worker.jit import compile_afresh
from nanopage.worker.kv_cache import GIB, KVCache

logger = logging.getLogger("nanopage")

PROMPT_LOGPROB_ROWS = 256  # prompt positions whose logits exist at once: [256, vocab_size]


class ModelRunner:
    """Runs one model on one device.

    Args:
        model: from `loader.load_model`.
        kv_cache: the pool its K and V go to.
        device: of both.
        graphs: of its decoder layers, if they are to be compiled.
        quantization: of its weights, as in EngineConfig.
        max_num_seqs: most sequences that are sampled in a step.
    """

    def __init__(
        self,
        model: nn.Module,
        kv_cache: KVCache,
        device: torch.device,
        graphs: Graphs | None = None,
        quantization: str | None = None,
        max_num_seqs: int = 256,
    ):
        self.model: Any = model
        self.kv_cache = kv_cache
        self.device = device
        self.sampler = Sampler(defer=device.type == "cuda")
        self._samples: Samples | None = None  # of the last step
        self.sampled = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)  # what the last step sampled
        dtype = kv_cache.tensor.dtype
        if quantization or (device.type == "cpu" and can_pack(dtype)):
            pack(model, quantization)
        self.decode_graphs: DecodeGraphs | None = None
        self.graphs = graphs
        self.compiled = False
        self.use_graphs()

    def make_graphs(self) -> None:
        """Begin to compile, in the background, if that has not been done."""
        if self.graphs is not None and not self.compiled:
            self.graphs.start()

    def use_graphs(self, wait: bool = False) -> None:
        """Put the compiled graphs, if they are there by now, in the modules' place.

        Raises: RuntimeError if told to wait for them and they can not be made.
        """
        if self.graphs is not None and wait:
            self.graphs.wait()
        if self.graphs is not None and not self.compiled and self.graphs.ready():
            self.compiled = self.graphs.install(self.model)

    def capture_graphs(self, max_model_len: int) -> None:
        """Capture decode steps as CUDA graphs. Raises MemoryError as DecodeGraphs.capture."""
        started, free = time.perf_counter(), torch.cuda.mem_get_info(self.device)[0]
        self.decode_graphs = self._make_decode_graphs(max_model_len)
        self.decode_graphs.capture(self.decode_graphs.sizes)
        used = (free - torch.cuda.mem_get_info(self.device)[0]) / GIB
        count, seconds = len(self.decode_graphs.graphs), time.perf_counter() - started
        logger.info(f"captured {count} CUDA graphs of decode steps in {seconds:.1f} s, {used:.2f} GiB")

    def _make_decode_graphs(self, max_model_len: int) -> DecodeGraphs:
        return DecodeGraphs(self.model, self.kv_cache, self.sampled, max_model_len, compile_afresh)

    def profile(self, num_tokens: int, max_model_len: int, capture: bool) -> int:
        """Bytes of the GPU's memory that steps take beside weights and KV cache, in a runner whose cache is one block.

        Runs the largest step there can be, of `num_tokens` tokens; and if steps are to be captured, captures the
        largest, whose memory the others will share, and the smallest, for what a graph takes beside that.
        """
        batch = largest_batch(num_tokens, len(self.sampled), max_model_len, self.kv_cache.block_size)
        self.kv_cache.clear([0])
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.launch(batch).result()
        most = torch.cuda.max_memory_allocated(self.device) - before
        torch.cuda.empty_cache()
        if not capture:
            return most
        free = [torch.cuda.mem_get_info(self.device)[0]]
        graphs = self._make_decode_graphs(max_model_len)
        for sizes in (graphs.sizes[-1:], graphs.sizes[:1]):
            graphs.capture(sizes)
            torch.cuda.empty_cache()
            free.append(torch.cuda.mem_get_info(self.device)[0])
        each = max(0, free[1] - free[2]) // len(graphs.splits_of(graphs.sizes[0]))
        others = sum(len(graphs.splits_of(size)) for size in graphs.sizes[:-1])
        del graphs
        torch.cuda.empty_cache()
        return most + free[0] - free[1] + each * others

    @torch.inference_mode()
    def launch(self, batch: Batch, stats: StepStats | None = None) -> Samples:
        """Move the batch's blocks and run it. Returns one token for each of its samplers, in order; a GPU is not waited
        for. The batch may read tokens that the one launched before it samples, by their placeholders.

        Prompt log-probabilities go straight to their groups, times to `stats`.
        """
        stats = stats or StepStats()
        if self.device.type != "cuda":
            return self._launch(batch, stats)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        samples = self._launch(batch, stats)
        end.record()
        stats.device_span = begin, end
        return samples

    def _launch(self, batch: Batch, stats: StepStats) -> Samples:
        started = time.perf_counter()
        self._move_blocks(batch)
        samplers = [sampler for scheduled in batch.sequences for sampler in scheduled.samplers]
        graphs = self.decode_graphs
        if graphs is not None and samplers and graphs.fit(batch):
            graphs.load(batch.sequences)
            self._settle()
            logits: Tensor | None = graphs.run()
        else:
            self._settle()
            graphs, logits = None, self._logits(batch) if batch.sequences else None
        stats.model_seconds = time.perf_counter() - started
        if logits is None:
            return Samples(self.sampled[:0], self.sampled[:0], [])
        if graphs is not None and not any(seq.params.truncates or is_constrained(seq) for seq in samplers):
            self._samples = Samples(self.sampled[: len(samplers)], logits, samplers)
        else:
            self._samples = self.sampler(logits, samplers)
            self.sampled[: len(samplers)] = self._samples.tokens
        stats.sample_seconds = time.perf_counter() - started - stats.model_seconds
        return self._samples

    def _settle(self) -> None:
        """Make sure of the last step's tokens, which this one may read."""
        if self._samples is not None and self._samples.settle():
            self.sampled[: len(self._samples.tokens)] = self._samples.tokens

    def _move_blocks(self, batch: Batch) -> None:
        self.kv_cache.swap_out(batch.swap_out)
        self.kv_cache.swap_in(batch.swap_in)
        self.kv_cache.copy(batch.copies)
        if uses_triton(self.device):
            return  # its kernels look at nothing beyond a sequence's end
        size = self.kv_cache.block_size  # what the step fills with its own K and V need not be cleared
        filled = {
            b for s in batch.sequences for b in s.block_table[-(-s.start // size) : (s.start + s.num_tokens) // size]
        }
        self.kv_cache.clear([block for block in batch.new_blocks if block not in filled])

    def _logits(self, batch: Batch) -> Tensor | None:
        """Run the batch. Returns the logits of its samplers, [samplers, vocab_size], or None if it has none."""
        last_rows: list[int] = []
        row_of: list[int] = []
        row = 0
        for scheduled in batch.sequences:
            row += scheduled.num_tokens
            if scheduled.samplers:
                row_of += [len(last_rows)] * len(scheduled.samplers)
                last_rows.append(row - 1)
        scored = any(scheduled.group.params.prompt_logprobs is not None for scheduled in batch.sequences)
        # None is all rows; one at least, for oneDNN has no products without rows.
        rows = None if scored or len(last_rows) == row else to_device(last_rows or [0], self.device)
        hidden = self.model(*self.prepare(batch), rows)
        if scored:
            parts = hidden.split([scheduled.num_tokens for scheduled in batch.sequences])
            for scheduled, part in zip(batch.sequences, parts, strict=True):
                if scheduled.group.params.prompt_logprobs is not None:
                    self._prompt_logprobs(scheduled, part)
            hidden = hidden[to_device(last_rows, self.device, torch.int64)]
        if not last_rows:
            return None
        logits = self.model.lm_head(hidden)
        # Completions that are about to fork from one prompt share a row.
        return logits[to_device(row_of, self.device)] if len(row_of) > len(last_rows) else logits

    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata]:
        """(input_ids [T], positions [T], kv_cache, metadata) of a batch."""
        scheduled = batch.sequences
        query_lens = torch.tensor([s.num_tokens for s in scheduled])
        tokens = list(chain.from_iterable(s.seq.token_ids[s.start : s.start + s.num_tokens] for s in scheduled))
        positions = torch.tensor(list(chain.from_iterable(range(s.start, s.start + s.num_tokens) for s in scheduled)))
        tables = stack_tables(scheduled)
        sequence = torch.repeat_interleave(torch.arange(len(scheduled)), query_lens)  # of each token
        block_size = self.kv_cache.block_size
        slots = tables[sequence, positions // block_size] * block_size + positions % block_size
        seq_lens = torch.tensor([s.start + s.num_tokens for s in scheduled])
        metadata = self._metadata(slots, tables, query_lens, seq_lens)
        input_ids = to_device(tokens, self.device)
        if any(s.seq.pending for s in scheduled):
            input_ids = with_sampled(input_ids, self.sampled)
        return input_ids, to_device(positions, self.device), self.kv_cache.tensor, metadata

    def _metadata(self, slots: Tensor, tables: Tensor, query_lens: Tensor, seq_lens: Tensor) -> AttentionMetadata:
        splits = step = None
        if uses_triton(self.device):
            from nanopage.kernels import paged_attention  # imports Triton

            step = paged_attention.make_step(query_lens, seq_lens, self.kv_cache.tensor.shape[3], self.device)
            tables = tables.int()  # as those of the graphs are, so that kernels are compiled for one type only
        elif self.compiled and len(slots) == len(query_lens):
            splits = split(tables, seq_lens, self.kv_cache.block_size)
        slots, tables = to_device(slots, self.device), to_device(tables, self.device)
        return AttentionMetadata(slots, tables, query_lens, seq_lens, splits, step)

    def _prompt_logprobs(self, scheduled: ScheduledSequence, hidden: Tensor) -> None:
        """Append to the group's `prompt_logprobs` what `hidden`, of the scheduled tokens, says of the next ones."""
        # Position i predicts token i + 1. After a preemption positions come again: skip what is already there.
        seq, group, start = scheduled.seq, scheduled.group, scheduled.start
        end = min(start + len(hidden), seq.num_prompt_tokens - 1)
        for begin in range(max(start, len(group.prompt_logprobs)), end, PROMPT_LOGPROB_ROWS):
            stop = min(begin + PROMPT_LOGPROB_ROWS, end)
            logits = at_least_float32(self.model.lm_head(hidden[begin - start : stop - start]))
            targets = seq.token_ids[begin + 1 : stop + 1]
            num = group.params.prompt_logprobs or 0
            top = [tensor.cpu() for tensor in top_logprobs(logits, to_device(targets, self.device), num)]
            group.prompt_logprobs += tables_of(targets, top, [num] * len(targets))


def largest_batch(num_tokens: int, num_seqs: int, max_model_len: int, block_size: int) -> Batch:
    """A step of `num_tokens` prompt tokens of `num_seqs` sequences, sampled in the way that takes the most memory. All
    of it goes to block 0: for measuring only."""
    params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=MAX_LOGPROBS)
    num_seqs = min(num_seqs, num_tokens)
    batch = Batch()
    for i in range(num_seqs):  # shorter ones first, as single tokens must be
        length = min((num_tokens + i) // num_seqs, max_model_len)
        seq = Sequence(i, str(i), [0] * length, params, seed=i)
        table = [0] * -(-length // block_size)
        batch.sequences.append(ScheduledSequence(SequenceGroup([seq]), seq, 0, length, table, [seq]))
    return batch
