"""An engine without a model: the tokens are made up. For tests of what the engine decides."""

import dataclasses
from collections import deque
from pathlib import Path

from nanopage import EngineConfig, LLMEngine, SamplingParams
from nanopage.beams.requests import make_request
from nanopage.reading.config import config_from_dict
from nanopage.step import Batch, BatchResult, Capacity, SamplingSettings

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class FakeExecutor:
    """Samples tokens that depend on the row and the position."""

    def __init__(self, num_blocks: int, num_host_blocks: int = 0, max_model_len: int = 128):
        self.capacity = Capacity("cpu", "float32", num_blocks, num_host_blocks, max_model_len)
        self.batches: deque[Batch] = deque()
        self.settings: dict[int, SamplingSettings] = {}  # of each row
        self.error: Exception | None = None  # of the next step

    def start(self) -> Capacity:
        return self.capacity

    def submit(self, batch: Batch) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error
        self.batches.append(batch)
        self.settings |= {new.row: new.sampling for new in batch.new}
        self.settings |= {fork.row: self.settings[fork.parent] for fork in batch.forks}

    def result(self) -> BatchResult:
        batch, result = self.batches.popleft(), BatchResult()
        for index, row in enumerate(batch.sampled_rows):
            first = 5 + (row * 7 + batch.starts[0] + index) % 200
            result.token_ids.append(first)
            if self.settings[row].logprobs is not None:
                result.logprobs[index] = {first + 13 * i % 90: (-1.0 - 0.1 * i, i + 1) for i in range(8)}
        return result

    def add_masks(self, masks: dict[int, bytes]) -> None: ...

    def discard(self) -> None:
        self.batches.clear()

    def rest(self) -> None: ...

    def check(self) -> None: ...

    def shutdown(self) -> None: ...


def fake_engine(
    num_blocks: int = 14, num_host_blocks: int = 0, windows: tuple[int | None, ...] = (None,), **options
) -> LLMEngine:
    """An engine with blocks of 8 tokens."""
    if options.get("preemption_mode") == "recompute":
        options["swap_space"] = 0
    config = EngineConfig(model="fake", block_size=8, generation_config="vllm", **options)
    executor = FakeExecutor(num_blocks, num_host_blocks)
    executor.capacity = dataclasses.replace(executor.capacity, windows=windows)
    engine = LLMEngine(config, config_from_dict(MODEL), Path("fake"), None, executor)
    engine.input_processor.make_search = make_request
    return engine


def tokens(max_tokens: int, **fields) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **{"temperature": 0} | fields)


def add(engine: LLMEngine, request_id: str, prompt: list[int], params=None, priority: int = 0) -> None:
    engine.add_request(request_id, {"prompt_token_ids": prompt}, params or tokens(20), priority)
