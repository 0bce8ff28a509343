"""ModelRunner: a scheduled Batch to tensors, through the model and the sampler, to sampled tokens."""

import ctypes
import logging
import sys
import time
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.decorators import mark_dynamic, mark_unbacked

from nanopage.kernels import ops
from nanopage.kernels.flash_decoding import split
from nanopage.kv_cache import KVCache
from nanopage.layers.attention import AttentionMetadata
from nanopage.layers.linear import Linear
from nanopage.request import SampledToken, Sequence, StepStats
from nanopage.sampler import Sampler, at_least_float32, top_logprobs
from nanopage.scheduler import Batch, ScheduledSequence

logger = logging.getLogger("nanopage")

COMPILE_OPTIONS: dict[str, Any] = {
    "size_asserts": False,  # packed weights have no strides to assert on
    "alignment_asserts": False,
    "assert_indirect_indexing": False,  # of pages, in the innermost loops
    "cpp.enable_floating_point_contract_flag": "fast",  # fused multiply-add
}
PROMPT_LOGPROB_ROWS = 256  # prompt positions whose logits exist at once: [256, vocab_size]


def resolve_device(name: str) -> torch.device:
    """ "auto" is CUDA if there is one. Raises ValueError for "cuda" without one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda': torch sees no CUDA device here (torch.cuda.is_available() is False)")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def resolve_dtype(name: str, checkpoint: str, device: torch.device) -> tuple[torch.dtype, str | None]:
    """The dtype to compute in, and one line saying why it is not the checkpoint's, if "auto" had to choose another."""
    if name != "auto":
        return getattr(torch, name), None
    if checkpoint == "float64" or computes_natively(checkpoint, device):
        return getattr(torch, checkpoint), None
    nearest = "float16" if device.type == "cuda" and checkpoint == "bfloat16" else "float32"
    return getattr(torch, nearest), f"this {device.type} does not compute in {checkpoint} natively: using {nearest}"


def computes_natively(dtype: str, device: torch.device) -> bool:
    if dtype == "float32":
        return True
    if device.type == "cuda":
        return dtype == "float16" or torch.cuda.get_device_capability(device) >= (8, 0)
    capabilities = torch.cpu.get_capabilities()
    if dtype == "bfloat16":
        return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return any(capabilities.get(name) for name in ("avx512_fp16", "amx_fp16", "fp16_arith"))


def _keep_freed_memory() -> None:
    """Tell glibc not to give activations back to the system after every operator: taking them again costs a page fault
    for every 4 KiB, a tenth of the time of a prefill. A process-wide setting; no effect under another allocator."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        m_trim_threshold, m_mmap_threshold = -1, -3  # malloc.h
        libc.mallopt(m_mmap_threshold, 2**30)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


class ModelRunner:
    """Runs one model on one device.

    Args:
        model: from `loader.load_model`.
        kv_cache: the pool its K and V go to.
        device: of both.
        compiled: run each decoder layer through torch.compile.
    """

    def __init__(self, model: nn.Module, kv_cache: KVCache, device: torch.device, compiled: bool):
        self.model: Any = model
        self.kv_cache = kv_cache
        self.device = device
        self.sampler = Sampler()
        dtype = kv_cache.tensor.dtype
        if device.type == "cpu" and ops.can_pack(dtype):
            for module in model.modules():
                if isinstance(module, Linear):
                    module.pack()
        if device.type == "cpu" and sys.platform == "linux":
            _keep_freed_memory()
        self.compiled = compiled
        if compiled:
            self._compile()

    @torch.inference_mode()
    def _compile(self) -> None:
        """Compile the decoder layer: one layer's code serves them all, so the time does not grow with depth.

        All graphs are made now, so that no request waits for the compiler: for one token, for several sequences of one
        token each, and for prompts. The sizes here are hints of what is worth a thread.
        """
        started = time.perf_counter()
        model, layers = self.model.model, self.model.model.layers
        forward = torch.compile(type(layers[0]).forward, dynamic=False, fullgraph=True, options=COMPILE_OPTIONS)
        for query_lens in ([1], [1] * 16, [64]):
            input_ids, positions, kv_cache, metadata = self._blank_inputs(query_lens)
            x = model.embed_tokens(input_ids)
            cos, sin = model.rotary(positions, x.dtype)
            if len(input_ids) > 1:
                for tensor in (x, cos, sin, metadata.slot_mapping):
                    mark_dynamic(tensor, 0)
            _mark_any_size(metadata)
            for layer, layer_cache in zip(layers, kv_cache.unbind(0), strict=True):
                mark_unbacked(layer_cache, 1)
                forward(layer, x, cos, sin, layer_cache, metadata)
        for layer in layers:
            layer.forward = MethodType(forward, layer)
        self.kv_cache.clear([0])
        logger.info(f"compiled the decoder layer in {time.perf_counter() - started:.1f} s")

    def _blank_inputs(self, query_lens: list[int]) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata]:
        """Inputs of the model for sequences of so many tokens, all of them in block 0."""
        block_size = self.kv_cache.block_size
        positions = torch.cat([torch.arange(n) for n in query_lens])
        lens = torch.tensor(query_lens)
        tables = torch.zeros(len(lens), -(-max(query_lens) // block_size), dtype=torch.int64)
        metadata = self._metadata(positions % block_size, tables, lens, lens.clone())
        return torch.zeros_like(positions).to(self.device), positions.to(self.device), self.kv_cache.tensor, metadata

    @torch.inference_mode()
    def execute(self, batch: Batch, stats: StepStats | None = None) -> list[SampledToken]:
        """Move the batch's blocks and run it. Returns one token for each of its samplers, in order.

        Prompt log-probabilities go straight to their groups, times to `stats`.
        """
        stats = stats or StepStats()
        started = time.perf_counter()
        self.kv_cache.swap_out(batch.swap_out)
        self.kv_cache.swap_in(batch.swap_in)
        self.kv_cache.copy(batch.copies)
        self.kv_cache.clear(batch.new_blocks)
        if not batch.sequences:
            stats.model_seconds = time.perf_counter() - started
            return []
        hidden = self.model(*self.prepare(batch))
        last_rows: list[int] = []
        row_of: list[int] = []
        samplers: list[Sequence] = []
        row = 0
        for scheduled in batch.sequences:
            if scheduled.group.params.prompt_logprobs is not None:
                self._prompt_logprobs(scheduled, hidden[row : row + scheduled.num_tokens])
            row += scheduled.num_tokens
            if scheduled.samplers:
                row_of += [len(last_rows)] * len(scheduled.samplers)
                last_rows.append(row - 1)
                samplers += scheduled.samplers
        stats.model_seconds = time.perf_counter() - started
        if not samplers:
            return []
        if len(last_rows) < len(hidden):
            hidden = hidden[last_rows]
        logits = self.model.lm_head(hidden)
        if len(samplers) > len(last_rows):  # completions that are about to fork from one prompt
            logits = logits[row_of]
        sampled = self.sampler(logits, samplers)
        stats.sample_seconds = time.perf_counter() - started - stats.model_seconds
        return sampled

    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata]:
        """(input_ids [T], positions [T], kv_cache, metadata) of a batch."""
        scheduled = batch.sequences
        query_lens = torch.tensor([s.num_tokens for s in scheduled])
        tokens = chain.from_iterable(s.seq.token_ids[s.start : s.start + s.num_tokens] for s in scheduled)
        positions = torch.tensor(list(chain.from_iterable(range(s.start, s.start + s.num_tokens) for s in scheduled)))
        width = max(len(s.block_table) for s in scheduled)
        tables = torch.tensor([s.block_table + s.block_table[:1] * (width - len(s.block_table)) for s in scheduled])
        sequence = torch.repeat_interleave(torch.arange(len(scheduled)), query_lens)  # of each token
        block_size = self.kv_cache.block_size
        slots = tables[sequence, positions // block_size] * block_size + positions % block_size
        seq_lens = torch.tensor([s.start + s.num_tokens for s in scheduled])
        metadata = self._metadata(slots, tables, query_lens, seq_lens)
        return torch.tensor(list(tokens), device=self.device), positions.to(self.device), self.kv_cache.tensor, metadata

    def _metadata(self, slots: Tensor, tables: Tensor, query_lens: Tensor, seq_lens: Tensor) -> AttentionMetadata:
        splits = None
        if self.compiled and self.device.type == "cpu" and len(slots) == len(query_lens):
            splits = split(tables, seq_lens, self.kv_cache.block_size)
        return AttentionMetadata(slots.to(self.device), tables.to(self.device), query_lens, seq_lens, splits)

    def _prompt_logprobs(self, scheduled: ScheduledSequence, hidden: Tensor) -> None:
        """Append to the group's `prompt_logprobs` what `hidden`, of the scheduled tokens, says of the next ones."""
        # Position i predicts token i + 1. After a preemption positions come again: skip what is already there.
        seq, group, start = scheduled.seq, scheduled.group, scheduled.start
        end = min(start + len(hidden), seq.num_prompt_tokens - 1)
        for begin in range(max(start, len(group.prompt_logprobs)), end, PROMPT_LOGPROB_ROWS):
            stop = min(begin + PROMPT_LOGPROB_ROWS, end)
            logits = at_least_float32(self.model.lm_head(hidden[begin - start : stop - start]))
            targets = seq.token_ids[begin + 1 : stop + 1]
            group.prompt_logprobs += top_logprobs(logits, targets, [group.params.prompt_logprobs or 0] * len(targets))


def _mark_any_size(metadata: AttentionMetadata) -> None:
    """Tell torch.compile which sizes no graph may depend on, not even on whether they are one."""
    tensors = [(metadata.block_tables, 0), (metadata.block_tables, 1), (metadata.query_lens, 0), (metadata.seq_lens, 0)]
    if (splits := metadata.splits) is not None:
        tensors += [(tensor, 0) for tensor in (splits.blocks, splits.owner, splits.start, splits.end)]
        tensors += [(splits.of, 1), (splits.merged, 1)]
        if len(splits.of) > 1:  # as many as there are tokens, and a single token has a graph of its own
            mark_dynamic(splits.of, 0)
            mark_dynamic(splits.merged, 0)
    for tensor, dim in tensors:
        mark_unbacked(tensor, dim)
