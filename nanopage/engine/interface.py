"""Engine: what LLM, AsyncLLM and the server need of an engine. LLMEngine has it, and so has the engine of encoders."""

from collections.abc import Callable, Sized
from pathlib import Path
from typing import Any, Protocol

from nanopage.config.options import EngineConfig
from nanopage.engine.input_processor import InputProcessor, ModelShape
from nanopage.engine.output_processor import Request
from nanopage.engine.token_budget import TokenBudget
from nanopage.outputs import RequestOutput, StepStats
from nanopage.params import SamplingParams
from nanopage.step import Capacity
from nanopage.text.tokenizer import Tokenizer


class Queues(Protocol):
    """The requests of an engine (engine/scheduler.py)."""

    token_budget: TokenBudget

    @property
    def waiting(self) -> Sized: ...
    @property
    def running(self) -> Sized: ...
    @property
    def swapped(self) -> Sized: ...


class Engine(Protocol):
    """The methods are those of LLMEngine, whose docstrings say what they do."""

    config: EngineConfig
    model_path: Path
    max_model_len: int
    capacity: Capacity
    input_processor: InputProcessor
    default_sampling_params: SamplingParams
    listeners: list[Callable[[StepStats], None]]

    @property
    def last_step(self) -> StepStats: ...
    @property
    def model_config(self) -> ModelShape: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def scheduler(self) -> Queues: ...
    @property
    def executor(self) -> Any: ...
    @property
    def dead_error(self) -> Exception | None: ...

    def submit(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> RequestOutput | None: ...
    def has_unfinished_requests(self) -> bool: ...
    def plan(self) -> bool: ...
    def step(self) -> list[RequestOutput]: ...
    def reset_prefix_cache(self) -> None: ...
    def check_workers(self) -> None: ...
    def shutdown(self) -> None: ...
