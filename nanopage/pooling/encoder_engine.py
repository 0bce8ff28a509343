"""EncoderEngine: embeddings and scores of an encoder, batched by length.

An encoder needs no KV cache and no scheduler: a request is one sequence that runs once. A step takes the oldest request
that waits and those that are closest to it in length, as many as the budget of tokens allows. So no request waits
forever, and most sequences of a batch have neighbours of equal length, with which they share calls of attention.

An EncoderEngine is an Engine (engine/interface.py), as an LLMEngine is.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from nanopage.config.options import EngineConfig
from nanopage.config.pooling import is_finite
from nanopage.engine.input_processor import InputProcessor
from nanopage.engine.output_processor import Request, finish_vector
from nanopage.engine.token_budget import TokenBudget, choose_budget
from nanopage.outputs import RequestEvent, RequestOutput, StepStats
from nanopage.params import PoolingParams, SamplingParams
from nanopage.pooling.encoder_config import EncoderBatch, EncoderConfig
from nanopage.pooling.requests import PoolingRequests
from nanopage.step import Capacity
from nanopage.text.tokenizer import Tokenizer

logger = logging.getLogger("nanopage")

WINDOW = 4096  # the requests that wait among which a batch is chosen


class EncoderExecutor(Protocol):
    """Runs batches (pooling/encoder_worker.py)."""

    def encode(self, batch: EncoderBatch) -> np.ndarray:
        """The vector of each sequence: float32 [B, size]."""


@dataclass
class EncoderQueue:
    """The requests of an engine, oldest first, under the names that a Scheduler has for them."""

    token_budget: TokenBudget
    waiting: dict[str, Request] = field(default_factory=dict)  # by id
    running: list[Request] = field(default_factory=list)
    swapped: tuple = ()


class EncoderEngine:
    """Runs requests with PoolingParams on an encoder. `nanopage.build.build_engine` makes an engine from options.

    Args: capacity: what the executor computes on and in, and the most tokens of a text.
    """

    def __init__(
        self,
        config: EngineConfig,
        encoder_config: EncoderConfig,
        path: Path,
        tokenizer: Tokenizer,
        executor: EncoderExecutor,
        capacity: Capacity,
    ):
        self.config, self.model_config, self.model_path, self.tokenizer = config, encoder_config, path, tokenizer
        self.pooling, self.executor, self.capacity = encoder_config.pooling, executor, capacity
        self.max_model_len = capacity.max_model_len
        self.input_processor = InputProcessor(config, encoder_config, path, tokenizer, capacity)
        self.input_processor.pooling = PoolingRequests(self.input_processor, encoder_config.pooling)
        self.scheduler = EncoderQueue(choose_budget(config, capacity.device, "encoder"))
        self.default_sampling_params = SamplingParams()
        self.listeners: list[Callable[[StepStats], None]] = []
        self.last_step = StepStats()
        self.dead_error: Exception | None = None
        self._events: list[RequestEvent] = []

    def submit(self, request: Request) -> None:
        """Queue a request. Raises: ValueError if its id is in use."""
        request_id = request.group.request_id
        if request_id in self.scheduler.waiting:
            raise ValueError(f"request_id {request_id!r} is in use")
        request.group.metrics.arrival_time = time.perf_counter()
        self.scheduler.waiting[request_id] = request
        self._events.append(RequestEvent("added", request_id))

    def has_unfinished_requests(self) -> bool:
        return bool(self.scheduler.waiting)

    def abort(self, request_id: str, index: int | None = None) -> RequestOutput | None:
        """Take a request out of the queue. Returns: an output without a vector; None if there is no such request."""
        request = self.scheduler.waiting.pop(request_id, None)
        return None if request is None else self._output(request)

    def plan(self) -> bool:
        """A batch is chosen when it runs."""
        return self.has_unfinished_requests()

    def step(self) -> list[RequestOutput]:
        """Run one batch and return the outputs of its requests. `last_step` has the statistics.

        If the batch fails, its requests run again, one at a time. A request that fails alone ends with
        `RequestOutput.error`. An exception that is not an error, such as Ctrl-C, loses no request.
        """
        started, queue = time.perf_counter(), self.scheduler
        batch = choose_batch(queue.waiting.values(), queue.token_budget.tokens, self.config.max_num_seqs)
        stats = StepStats(prefill_tokens=sum(len(request.prompt_token_ids) for request in batch))
        queue.running = batch
        try:
            for request in batch:
                request.group.metrics.first_scheduled_time = started
            outputs = self._run(batch)
        finally:
            queue.running = []
        for request in batch:
            del queue.waiting[request.group.request_id]
        stats.waiting, stats.finished, stats.seconds = len(queue.waiting), len(batch), time.perf_counter() - started
        ids = [request.group.request_id for request in batch]
        events = [RequestEvent(kind, request_id) for request_id in ids for kind in ("started", "finished")]
        stats.events, self._events = self._events + events, []
        self.last_step = stats
        for listener in self.listeners:
            listener(stats)
        return outputs

    def _run(self, batch: list[Request]) -> list[RequestOutput]:
        try:
            vectors = self.executor.encode(make_batch(batch)) if batch else np.empty((0, 0))
        except Exception as error:
            if len(batch) > 1:
                logger.warning(
                    f"a step failed: {error}; running its {len(batch)} requests one at a time", exc_info=error
                )
                return [output for request in batch for output in self._run([request])]
            request_id, message = batch[0].group.request_id, f"{type(error).__name__}: {error}"
            logger.warning(f"request {request_id} ended by an error: {message}")
            return [self._output(batch[0], error=message)]
        return [self._output(request, vector) for request, vector in zip(batch, vectors, strict=True)]

    def _output(self, request: Request, vector: np.ndarray | None = None, error: str | None = None) -> RequestOutput:
        group = request.group
        group.metrics.finished_time = time.perf_counter()
        if vector is not None and not is_finite(vector):
            vector, error = None, "its vector is not finite: weights that are too large, or an overflow in float16"
        if vector is not None:
            assert isinstance(request.params, PoolingParams)
            vector = finish_vector(vector, request.params, self.pooling)
        ids = request.prompt_token_ids
        return RequestOutput(group.request_id, request.prompt, ids, [], True, group.metrics, error=error, pooled=vector)

    def check_workers(self) -> None:
        """The worker is this process."""

    def reset_prefix_cache(self) -> None:
        """There is no cache."""

    def shutdown(self) -> None:
        """There is nothing to shut down."""


def choose_batch(waiting: Iterable[Request], max_tokens: int, max_seqs: int) -> list[Request]:
    """The oldest request and those that are closest to it in length, in the order of their lengths.

    Args: max_tokens: of all sequences together. The oldest request runs even if it has more.
    """
    window = list(itertools.islice(waiting, WINDOW))
    if not window:
        return []
    length = len(window[0].prompt_token_ids)
    window.sort(key=lambda request: abs(len(request.prompt_token_ids) - length))  # stable: the oldest stays first
    batch, left = window[:1], max_tokens - length
    for request in window[1:max_seqs]:
        left -= len(request.prompt_token_ids)
        if left < 0:
            break
        batch.append(request)
    return sorted(batch, key=lambda request: len(request.prompt_token_ids))


def make_batch(requests: Iterable[Request]) -> EncoderBatch:
    """The message to the worker."""
    batch = EncoderBatch()
    for request in requests:
        ids = request.prompt_token_ids
        batch.token_ids += ids
        batch.token_types += request.token_types or [0] * len(ids)
        batch.seq_lens.append(len(ids))
    return batch
