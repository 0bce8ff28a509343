"""ServerState: what the routes share."""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from nanopage.aio.async_llm import AsyncLLM
from nanopage.server.adapters import ServedAdapters
from nanopage.server.errors import ApiError
from nanopage.server.live_view import LiveView
from nanopage.server.tools import ToolOptions

if TYPE_CHECKING:
    from nanopage.server.tracing import Tracer

MAX_RETRY_AFTER = 120  # seconds: OpenAI's SDK gives up if the wait is longer


@dataclass
class ServerState:
    """What the routes share."""

    model_names: list[str]  # of the model; replies name the first if the request names none
    max_queue: int = 1024  # most requests that wait for their first step, and most requests of one call
    max_queue_tokens: int = 1_000_000  # most prompt tokens of requests that wait, unless there is only one call
    stall_seconds: float = 120.0  # after which a step counts as hung
    strict_fields: bool = False  # refuse fields that are not known
    default_max_tokens: int | None = None  # most tokens of a reply whose request has no limit; None: all that fit
    salt_per_key: bool = False  # keep the cached prefixes of clients with different API keys apart
    allow_runtime_lora_updating: bool = False  # clients may load adapters from any directory, and unload them
    allow_sleep: bool = False  # clients may put the engine to sleep, and wake it
    tool_options: ToolOptions = field(default_factory=ToolOptions)
    tracer: "Tracer | None" = None  # gets every request whose last output has been read
    view: LiveView | None = None  # the live view, if it is served
    no_view: str = "it is off"  # why it is not
    llm: AsyncLLM | None = None  # None while the model loads
    takes_images: bool = False  # whether bodies may have images, for a server whose engines are in other processes
    adapters: ServedAdapters = field(default_factory=ServedAdapters)  # which clients may name as models
    error: str | None = None  # why the model could not be loaded
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    replies: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    num_active: int = 0  # running calls that make text
    num_entering: int = 0  # requests on their way into the engine
    num_entering_tokens: int = 0  # estimated tokens of their prompts
    num_disconnects: int = 0
    transcribed_seconds: float = 0.0  # of sound

    def check_open(self, loaded: bool) -> None:
        """Raises: ApiError while no request can run: at shutdown, and before the model is loaded."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=30)
        if self.error is not None:
            raise ApiError(503, f"the model could not be loaded: {self.error}", code="load_failed")
        if not loaded:
            raise ApiError(503, "the model is loading", code="loading", retry_after=5)

    def require(self) -> AsyncLLM:
        """The engine, for a request that is to run now. Raises: ApiError while it cannot."""
        self.check_open(self.llm is not None)
        assert self.llm is not None
        if self.llm.dead_error is not None:
            raise ApiError(503, str(self.llm.dead_error), code="engine_dead", retry_after=30)
        return self.llm

    def sees_images(self) -> bool:
        """Whether the model has been loaded and sees images."""
        return self.takes_images or (self.llm is not None and "image" in self.llm.engine.model_config.encoders)

    def check_health(self) -> None:
        """Raises: ApiError if the server cannot answer requests."""
        llm = self.require()
        if llm.engine_thread.seconds_without_progress > self.stall_seconds:
            raise ApiError(503, f"no step has ended for {self.stall_seconds:g} s", code="stalled", retry_after=30)

    def model_name(self, name: str | None) -> str:
        """The name for a reply. Raises: ApiError for the name of another model."""
        if name is not None and name not in self.model_names and name not in self.adapters.requests:
            known = ", ".join([*self.model_names, *self.adapters.requests][:100])
            message = f"The model {name[:200]!r} does not exist. This server has {known}."
            raise ApiError(404, message, param="model", code="model_not_found")
        return name or self.model_names[0]

    def enter(self, llm: AsyncLLM, sizes: list[int]) -> None:
        """Reserve places in the queue, before any prompt is encoded.

        Args: sizes: the estimated tokens of each prompt.
        Raises: ApiError if there are not that many places.
        """
        if len(sizes) > self.max_queue:
            raise ApiError(400, f"{len(sizes)} prompts are more than --max-queue {self.max_queue}", param="prompt")
        waiting = llm.engine_thread.num_waiting + self.num_entering
        tokens = llm.engine_thread.num_waiting_tokens + self.num_entering_tokens
        if waiting + len(sizes) > self.max_queue or (waiting and tokens + sum(sizes) > self.max_queue_tokens):
            seconds = max(1, min(MAX_RETRY_AFTER, round(llm.metrics.seconds_per_request * waiting)))
            raise ApiError(429, f"{waiting} requests are waiting already", code="queue_full", retry_after=seconds)
        self.num_entering += len(sizes)
        self.num_entering_tokens += sum(sizes)

    def leave(self, sizes: list[int]) -> None:
        """Give back the place of the first of these prompts, and drop its size."""
        self.num_entering -= 1
        self.num_entering_tokens -= sizes.pop(0)

    def metrics(self) -> list[Metric]:
        """The engine's metrics, in the form of prometheus_client."""
        return [] if self.llm is None else list(self.llm.metrics.collect())
