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
from torch._dynamo.decorators import mark_unbacked

from nanopage.kv_cache import KVCache
from nanopage.layers.attention import AttentionMetadata
from nanopage.layers.linear import Linear
from nanopage.request import SampledToken, Sequence
from nanopage.sampler import Sampler, at_least_float32, top_logprobs
from nanopage.scheduler import Batch

logger = logging.getLogger("nanopage")

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
        if device.type == "cpu" and dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
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

        Two graphs are made now, for one token and for any number, so that no request waits for the compiler.
        """
        started = time.perf_counter()
        layers = self.model.model.layers
        # Packed weights have no strides to assert on.
        options: dict[str, Any] = {"size_asserts": False, "alignment_asserts": False}
        forward = torch.compile(type(layers[0]).forward, dynamic=True, fullgraph=True, options=options)
        for layer in layers:
            layer.forward = MethodType(forward, layer)
        for num_tokens in (1, 2):
            self.model(*self._blank_inputs(num_tokens))
        self.kv_cache.clear([0])
        logger.info(f"compiled the decoder layer in {time.perf_counter() - started:.1f} s")

    def _blank_inputs(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata]:
        """Inputs of the model for one sequence of that many tokens in block 0."""
        positions = torch.arange(num_tokens)
        table = torch.zeros(1, 1, dtype=torch.int64)
        metadata = self._metadata(positions, table, torch.tensor([num_tokens]), torch.tensor([num_tokens]))
        return torch.zeros_like(positions).to(self.device), positions.to(self.device), self.kv_cache.tensor, metadata

    @torch.inference_mode()
    def execute(self, batch: Batch) -> list[SampledToken]:
        """Run the batch. Returns one token for each of its sequences that samples, in order.

        Prompt log-probabilities go straight to their sequences.
        """
        if not batch.sequences:
            return []
        self.kv_cache.clear(batch.new_blocks)
        hidden = self.model(*self.prepare(batch))
        last_rows, samplers, row = [], [], 0
        for scheduled in batch.sequences:
            if scheduled.seq.params.prompt_logprobs is not None:
                self._prompt_logprobs(scheduled.seq, scheduled.start, hidden[row : row + scheduled.num_tokens])
            row += scheduled.num_tokens
            if scheduled.samples:
                last_rows.append(row - 1)
                samplers.append(scheduled.seq)
        if not samplers:
            return []
        if len(last_rows) < len(hidden):
            hidden = hidden[last_rows]
        return self.sampler(self.model.lm_head(hidden), samplers)

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
        tables = tables.to(self.device)
        if self.compiled:
            # Only the attention operator reads these: no graph of its own for a batch or a table of size one.
            for tensor, dims in ((tables, 2), (query_lens, 1), (seq_lens, 1)):
                for dim in range(dims):
                    mark_unbacked(tensor, dim)
        return AttentionMetadata(slots.to(self.device), tables, query_lens, seq_lens)

    def _prompt_logprobs(self, seq: Sequence, start: int, hidden: Tensor) -> None:
        """Append to `prompt_logprobs` what `hidden` (positions from `start` on) says of the next tokens."""
        # Position i predicts token i + 1. After a preemption positions come again: skip what is already there.
        first = len(seq.prompt_logprobs)
        end = min(start + len(hidden), seq.num_prompt_tokens - 1)
        for begin in range(max(start, first), end, PROMPT_LOGPROB_ROWS):
            stop = min(begin + PROMPT_LOGPROB_ROWS, end)
            logits = at_least_float32(self.model.lm_head(hidden[begin - start : stop - start]))
            targets = seq.token_ids[begin + 1 : stop + 1]
            seq.prompt_logprobs += top_logprobs(logits, targets, [seq.params.prompt_logprobs or 0] * len(targets))
