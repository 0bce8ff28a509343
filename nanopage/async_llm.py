"""AsyncLLM: the engine for asyncio. Names are those of vLLM's class.

    llm = AsyncLLM.from_engine_args(EngineArgs())
    async for output in llm.generate("Once upon a time", SamplingParams(), "request 1"):
        print(output.outputs[0].delta, end="")

One thread steps the engine. It sleeps while there is nothing to do. Coroutines post requests and aborts; the thread
takes them before every step, and wakes the coroutines whose requests have new output. Prompts become token ids in two
other threads, so the event loop never waits for a tokenizer; a third compiles grammars, so no prompt waits for them.
While it sleeps, the thread does not keep the AsyncLLM alive. One that nobody uses, and whose outputs nobody reads, ends
as after `shutdown`.

Every output has all that its request has produced so far. So for a reader that falls behind, only the latest output is
kept, and the reader loses nothing.
"""

import asyncio
import atexit
import concurrent.futures
import contextlib
import hashlib
import logging
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from nanopage import __version__
from nanopage.engine.engine import LLMEngine
from nanopage.engine.interface import Engine
from nanopage.engine.output_processor import Request
from nanopage.engine.token_budget import SECONDS, TokenBudget
from nanopage.inputs import LoRARequest, Prompt
from nanopage.outputs import RequestOutput
from nanopage.params import BeamSearchParams, PoolingParams, SamplingParams
from nanopage.vllm.metrics import Metric, Metrics

if TYPE_CHECKING:
    from nanopage.text.tokenizer import Tokenizer

logger = logging.getLogger("nanopage")

T = TypeVar("T")

CHECK_SECONDS = 1.0  # between checks of the workers while there is no request
MAX_FAILURES = 3  # after so many calls of `LLMEngine.step` in a row that raise, the engine is dead


class EngineDeadError(RuntimeError):
    """The engine cannot go on, or has been shut down."""


class RequestStream:
    """The outputs of one request: an async iterator over RequestOutputs, of which the last is `finished`.

    Only the event loop that made it may use it. `aclose` aborts the request, if it has not finished.

    Raises: EngineDeadError from `__anext__`, if the engine died or was shut down before the request finished.
    """

    def __init__(self, llm: "AsyncLLM", request_id: str):
        self.request_id = request_id
        self.request: Request | None = None  # once its prompt has been read
        self.loop = asyncio.get_running_loop()
        self._llm = llm
        self._news = asyncio.Event()
        self._output: RequestOutput | None = None  # the latest, not read yet
        self._error: EngineDeadError | None = None
        self._finished = False
        self._aborted = False
        self._started = False

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        if self._finished:
            raise StopAsyncIteration
        await self._news.wait()
        output, self._output = self._output, None
        if output is None:
            self._finished = True
            assert self._error is not None
            raise self._error
        if self._error is None:
            self._news.clear()
        self._finished = output.finished
        return output

    async def aclose(self) -> None:
        """Stop reading. Aborts the request if it has not finished."""
        if not self._finished:
            self._finished = True
            self._llm._post(self)

    def _put(self, output: RequestOutput) -> None:
        if self._output is not None:
            for completion, unread in zip(output.outputs, self._output.outputs, strict=False):
                completion.delta = unread.delta + completion.delta
        self._output = output
        self._news.set()

    def _fail(self, error: EngineDeadError) -> None:
        self._error = error
        self._news.set()


Message = Request | RequestStream | Callable[[EngineDeadError | None], None]
"""For the engine's thread: a request to submit or to abort, or a function to call, with None or why the engine ends."""


class AsyncLLM:
    """Runs requests of any number of coroutines on one engine, batched together.

    Args:
        engine: a new engine. AsyncLLM is its only user from now on.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        # For clients that compare seeded answers: another version, or other options, may give others.
        options = hashlib.sha256(repr(engine.config).encode()).hexdigest()
        self.system_fingerprint = f"nanopage-{__version__}-{options[:8]}"
        self._idle = True
        self._last_progress = time.monotonic()  # when a step ended, or work arrived at an idle engine
        self.num_waiting = 0  # requests that have not begun to run
        self.num_waiting_tokens = 0  # of their prompts
        self._metrics = Metrics(engine.model_path.name, engine.cache_config, engine.max_draft)
        if engine.config.max_num_batched_tokens is None and isinstance(engine, LLMEngine):
            engine.listeners.append(TokenBudget(engine.scheduler, SECONDS[engine.capacity.device]))
        self._tokenizing = ThreadPoolExecutor(2, "nanopage-tokenizer")
        self._compiling = ThreadPoolExecutor(1, "nanopage-grammars")
        self._changed = threading.Condition()  # guards the numbers of waiting requests, and what follows
        self._mail: list[Message] = []
        self._announce: Callable[[], None] | None = None  # while the engine is paused (see `pause`)
        self._steps = 0  # that may be made although it is paused
        self._is_planned = False  # whether the next step has been decided, in a pause
        self._has_changed = False  # whether requests have come or have been aborted since the last step
        self._streams: dict[str, RequestStream] = {}  # of all requests that have not ended
        self._error: EngineDeadError | None = None
        self._stopping = False
        self._num_failures = 0  # calls of `LLMEngine.step` in a row that have raised
        this = weakref.ref(self)

        def end() -> None:
            if (llm := this()) is not None:
                llm.shutdown()
            thread.join()

        thread = threading.Thread(
            target=_run, args=(this, engine, self._changed, end), name="nanopage-engine", daemon=True
        )
        self._thread, self._end_at_exit = thread, end
        atexit.register(end)  # a daemon thread must not run torch while the interpreter ends
        thread.start()

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> "AsyncLLM":
        """Load the model of an `EngineArgs` and start. Raises: as `nanopage.build.build_engine`."""
        return cls(engine_args.create_engine())

    # Requests

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | BeamSearchParams | None,
        request_id: str,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Run one request. Yields its outputs as they come, at most one a step; each has all the text so far, and as
        `delta` what is new in it. Cancelling, or leaving the loop and closing the iterator, aborts the request.

        Args:
            prompt: text, token ids, or a dict (see `Prompt` in input_processor.py).
            sampling_params: None uses `LLMEngine.default_sampling_params`.
            request_id: any non-empty string that no unfinished request has.
            priority: lower goes first, with scheduling_policy="priority".
            lora_request: an adapter, with enable_lora.

        Raises:
            ValueError, TypeError: as `LLMEngine.add_request`.
            EngineDeadError: the engine has died or has been shut down.
        """
        stream = await self.add_request(
            request_id, prompt, sampling_params, priority=priority, lora_request=lora_request
        )
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()

    async def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | PoolingParams | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> RequestStream:
        """Check a request and queue it. Returns its outputs to come. Arguments and errors are those of `generate`."""
        if not isinstance(request_id, str) or not request_id:
            raise TypeError(f"request_id must be a non-empty string, not {request_id!r}")
        stream = RequestStream(self, request_id)
        with self._changed:
            self._check_alive()
            if request_id in self._streams:
                raise ValueError(f"request_id {request_id!r} is in use")
            self._streams[request_id] = stream
        try:
            params = self.engine.default_sampling_params if params is None else params
            processor = self.engine.input_processor
            structured, in_thread = getattr(params, "structured_outputs", None), self.in_thread
            if structured is not None and await self.in_thread(processor.has_to_compile, structured):
                in_thread = self.in_compiler
            arguments = request_id, prompt, params, priority, lora_request
            stream.request = await in_thread(processor.make_request, *arguments)
        except BaseException:
            with self._changed:
                self._streams.pop(request_id, None)
            raise
        self._post(stream.request)
        if stream._aborted:  # while its prompt was being read
            self._post(stream)
        return stream

    async def in_thread(self, function: Callable, *args: Any) -> Any:
        """The result of a function that would take too long for the event loop, such as encoding a text."""
        return await self._in_pool(self._tokenizing, function, *args)

    async def in_compiler(self, function: Callable, *args: Any) -> Any:
        """The result of a function that compiles grammars."""
        return await self._in_pool(self._compiling, function, *args)

    async def _in_pool(self, pool: ThreadPoolExecutor, function: Callable, *args: Any) -> Any:
        self._check_alive()
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, function, *args)
        except asyncio.CancelledError:
            if self._stopping:  # the thread pool has dropped it
                raise EngineDeadError("the engine has been shut down") from None
            raise

    async def abort(self, request_id: str) -> None:
        """End a request, if it is still running. Its reader gets a last output, with the finish_reason "abort"."""
        if (stream := self._streams.get(request_id)) is None:
            return
        if stream.request is None:
            stream._aborted = True
        else:
            self._post(stream)

    async def between_steps(self, function: Callable[[], T]) -> T:
        """The result of a function that needs the engine as it is between two steps: its thread calls it, and no step
        runs meanwhile. Raises: EngineDeadError, and what the function raises."""
        done: concurrent.futures.Future[T] = concurrent.futures.Future()

        def call(error: EngineDeadError | None) -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                if error is not None:
                    raise error
                done.set_result(function())
            except Exception as failure:
                done.set_exception(failure)

        self._post(call)
        return await asyncio.wrap_future(done)

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Running requests go on. Returns True. Raises: EngineDeadError."""
        await self.between_steps(self.engine.reset_prefix_cache)
        return True

    # Step by step

    def pause(self, announce: Callable[[], None]) -> None:
        """Make no more steps but those that `allow_steps` allows. The engine decides on its next step, and waits before
        it runs it; `LLMEngine.explain` says what it is. New requests wait, aborted ones end at once, and it does not
        count as a hang. `shutdown` works.

        Args: announce: called by the engine's thread when a step has been decided, and when requests have come or gone
            since. It must not block.
        Raises: EngineDeadError.
        """
        with self._changed:
            self._check_alive()
            self._announce, self._steps = announce, 0
            self._changed.notify()

    def allow_steps(self, count: int = 1) -> None:
        """Let a paused engine make `count` steps once there is something to do."""
        with self._changed:
            self._steps += count if self.paused else 0
            self._changed.notify()

    def resume(self) -> None:
        """End a pause, if there is one."""
        with self._changed:
            self._announce, self._steps = None, 0
            self._last_progress = time.monotonic()
            self._changed.notify()

    @property
    def paused(self) -> bool:
        return self._announce is not None

    # State

    async def get_tokenizer(self) -> "Tokenizer | None":
        """The model's tokenizer; None if it has none, which only load_format="dummy" allows."""
        return self.engine.tokenizer

    async def check_health(self) -> None:
        """Raises: EngineDeadError if the engine has died or has been shut down."""
        self._check_alive()

    @property
    def errored(self) -> bool:
        return self._error is not None

    @property
    def is_running(self) -> bool:
        return self._error is None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the engine cannot go on; None while it can."""
        return self._error

    @property
    def seconds_without_progress(self) -> float:
        """How long no step has ended although there is work; 0 if there is none."""
        return 0.0 if self._idle else time.monotonic() - self._last_progress

    @property
    def seconds_per_request(self) -> float:
        """The time of all steps over the number of completions that have ended; until one has, that of all steps."""
        return self._metrics.busy_seconds / max(1, sum(self._metrics.ended.values()))

    def get_metrics(self) -> list[Metric]:
        """The metrics so far, under vLLM's names (see metrics.py)."""
        scheduler = self.engine.scheduler
        return self._metrics.snapshot(len(scheduler.running), len(scheduler.waiting) + len(scheduler.swapped))

    def shutdown(self, timeout: float | None = None) -> bool:
        """End all requests, the thread and the workers. Readers of unfinished requests get an EngineDeadError.

        Args: timeout: most seconds to wait for the step that is running; None: as long as it takes.
        Returns: whether the engine's thread has ended.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        for pool in (self._tokenizing, self._compiling):
            pool.shutdown(wait=False, cancel_futures=True)
        atexit.unregister(self._end_at_exit)
        return not self._thread.is_alive()

    def _check_alive(self) -> None:
        if self._error is not None:
            raise self._error

    # The engine's thread

    def _post(self, message: Message) -> None:
        with self._changed:
            if self._error is None:
                self._mail.append(message)
                self._changed.notify()
                if isinstance(message, Request):
                    self.num_waiting += 1
                    self.num_waiting_tokens += len(message.prompt_token_ids)
            elif not isinstance(message, RequestStream):
                raise self._error

    def _turn(self) -> bool:
        """Do what has been posted, and make a step. Returns False when it is time to end; readers know by then."""
        try:
            if self._idle:
                self.engine.check_workers()
            with self._changed:
                if self._rests():
                    return True
                stopping, mail = self._stopping, self._mail
                self._mail = mail if stopping else []
            if stopping:
                self._end(EngineDeadError("the engine has been shut down"))
                return False
            self._read(mail)
            self._step()
            return True
        except BaseException as error:
            logger.exception("the engine has died")
            self._end(EngineDeadError(f"the engine has died: {type(error).__name__}: {error}"))
            return False

    def _rests(self) -> bool:
        """Whether there is nothing to do."""
        rests = not (self._stopping or self._mail or self._has_work())
        if rests != self._idle:
            self._last_progress = time.monotonic()
            self._idle = rests
        return rests

    def _read(self, mail: list[Message]) -> None:
        for message in mail:
            self._has_changed |= not callable(message)
            if isinstance(message, Request):
                self._submit(message)
            elif not isinstance(message, RequestStream):
                message(None)
            elif self._streams.get(message.request_id) is message:  # or another request has its id by now
                self._abort(message.request_id)

    def _step(self) -> None:
        """Make a step, if there is one to make. Raises: what ends the engine."""
        try:
            if not self._may_step():
                return
            self._is_planned = self._has_changed = False
            outputs = self.engine.step()
        except Exception:
            self._num_failures += 1
            if self._num_failures == MAX_FAILURES:
                raise
            logger.exception("a step of the engine failed; trying again")
            return
        self._num_failures = 0
        self._last_progress = time.monotonic()
        self._count(self._metrics.add_step, self.engine.last_step)
        for event in self.engine.last_step.events:
            if event.kind == "started":
                self._count_started(self._streams.get(event.request_id))
        self._deliver(outputs)
        if self.engine.dead_error is not None:
            raise self.engine.dead_error

    def _submit(self, request: Request) -> None:
        """Queue a request. If that fails, the request ends with an error, and the engine goes on."""
        try:
            self.engine.submit(request)
        except Exception as error:
            if self.engine.dead_error is not None:
                raise
            group = request.group
            logger.exception(f"request {group.request_id} could not be queued")
            self._abort(group.request_id, f"it could not be queued: {type(error).__name__}: {error}")
            return
        self._count(self._metrics.add_params, request.params)

    def _abort(self, request_id: str, error: str | None = None) -> None:
        """End a request, because of an error or because nobody reads it."""
        output = None
        try:
            output = self.engine.abort(request_id)
        except Exception:
            if self.engine.dead_error is not None:
                raise
            # The next step recovers: it goes on with the request, or ends it with an error.
            logger.exception(f"request {request_id} could not be aborted")
        if error is not None:
            request = self._streams[request_id].request
            assert request is not None
            ids, times = request.prompt_token_ids, request.group.metrics
            output = RequestOutput(request_id, request.prompt, ids, [], True, times, error=error)
        self._deliver([] if output is None else [output])

    def _count(self, add: Callable[[T], None], what: T) -> None:
        """Count something for the metrics. A failure there is not one of the engine."""
        try:
            add(what)
        except Exception:
            logger.exception("the metrics have failed")

    def _has_work(self) -> bool:
        """Whether there is a step to make, or to plan."""
        waits = self._announce is not None and not self._steps and self._is_planned
        return not waits and self.engine.has_unfinished_requests()

    def _may_step(self) -> bool:
        """Whether to make a step now. If the engine is paused, plan it and announce it instead."""
        with self._changed:
            announce = self._announce
            if announce is None:  # a step tells the listeners of an abort, even if nothing is left to do
                return self._has_changed or self.engine.has_unfinished_requests()
            if self._steps and self.engine.has_unfinished_requests():
                self._steps -= 1
                return True
        if self.engine.has_unfinished_requests():
            self.engine.plan()
            self._is_planned = True
        self._idle = True
        announce()
        return False

    def _count_started(self, stream: RequestStream | None) -> None:
        """A request no longer waits, because it has begun or ended."""
        if stream is not None and not stream._started and stream.request is not None:
            stream._started = True
            with self._changed:
                self.num_waiting -= 1
                self.num_waiting_tokens -= len(stream.request.prompt_token_ids)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Hand outputs to their readers, with one message to each event loop."""
        ready: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, RequestOutput]]] = defaultdict(list)
        for output in outputs:
            if (stream := self._streams.get(output.request_id)) is None:
                continue  # it could not be queued or aborted as it should
            ready[stream.loop].append((stream, output))
            if output.finished:
                self._count(self._metrics.add_finished, output)
                self._count_started(stream)
                with self._changed:
                    del self._streams[output.request_id]
        for loop, pairs in ready.items():
            try:
                loop.call_soon_threadsafe(_put_all, pairs)
            except RuntimeError:  # the loop is closed, and its readers are gone
                for stream, output in pairs:
                    if not output.finished:
                        self._post(stream)

    def _end(self, error: EngineDeadError) -> None:
        """Tell all readers that there will be no more outputs."""
        with self._changed:
            self._error = error
            streams, self._streams = list(self._streams.values()), {}
            mail, self._mail = self._mail, []
        for message in mail:
            if callable(message):
                message(error)
        for stream in streams:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                stream.loop.call_soon_threadsafe(stream._fail, error)


def _run(
    this: weakref.ref[AsyncLLM], engine: Engine, changed: threading.Condition, end_at_exit: Callable[[], None]
) -> None:
    """What the engine's thread does, until the AsyncLLM ends or is garbage."""
    try:
        llm = this()
        while llm is not None and llm._turn():
            with changed:
                if llm._rests():
                    llm = None
                    changed.wait(CHECK_SECONDS)
                    llm = this()
    finally:
        engine.shutdown()
        atexit.unregister(end_at_exit)


def _put_all(pairs: list[tuple[RequestStream, RequestOutput]]) -> None:
    for stream, output in pairs:
        stream._put(output)
