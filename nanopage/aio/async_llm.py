"""AsyncLLM: the engine for asyncio, with the names of vLLM's class.

    llm = AsyncLLM.from_engine_args(EngineArgs())
    async for output in llm.generate("Once upon a time", SamplingParams(), "request 1"):
        print(output.outputs[0].delta, end="")

One thread steps the engine (aio/engine_thread.py). Two other threads turn prompts into token ids, so the event loop
never waits for a tokenizer. One more thread compiles grammars, and four load images, so prompts never wait for grammars
or downloads. An AsyncLLM that nobody uses, and whose outputs nobody reads, ends as after `shutdown`.
"""

import asyncio
import concurrent.futures
import hashlib
import weakref
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from nanopage import __version__
from nanopage.aio.engine_thread import EngineDeadError, EngineThread, Inbox
from nanopage.engine.engine import LLMEngine
from nanopage.inputs import LoRARequest, Prompt
from nanopage.items.soft_prompts import PromptAdapterRequest, with_prompt_adapters
from nanopage.outputs import RequestOutput
from nanopage.params import BeamSearchParams, PoolingParams, SamplingParams
from nanopage.standby import engine as standby
from nanopage.vllm.metrics import Metric, Metrics

if TYPE_CHECKING:
    from nanopage.standby.given import Weights
    from nanopage.text.tokenizer import Tokenizer

T = TypeVar("T")


class RequestStream:
    """The outputs of one request: an async iterator over RequestOutputs. The last one is `finished`. A reader that
    falls behind gets only the latest output, with everything that is new in its `delta`.

    Only the event loop that made the stream may use it. `aclose` aborts the request, if it has not finished.

    Raises: EngineDeadError from `__anext__`, if the engine died or was shut down before the request finished.
    """

    def __init__(self, llm: "AsyncLLM", inbox: Inbox):
        self._llm, self._inbox = llm, inbox  # the AsyncLLM does not end while somebody reads
        self._finished = False

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        if self._finished:
            raise StopAsyncIteration
        try:
            output = await self._inbox.take()
        except EngineDeadError:
            self._finished = True
            raise
        self._finished = output.finished
        return output

    async def aclose(self) -> None:
        """Stop reading. Aborts the request if it has not finished."""
        if not self._finished:
            self._finished = True
            self._llm.engine_thread.post(self._inbox)


class AsyncLLM:
    """Runs requests of any number of coroutines on one engine, batched together.

    Args:
        engine: a new engine, built for "AsyncLLM". AsyncLLM is its only user from now on.
    """

    def __init__(self, engine: LLMEngine):
        self.engine = engine
        # For clients that compare seeded answers: another version, or other options, may give other answers.
        options = hashlib.sha256(repr(engine.config).encode()).hexdigest()
        self.system_fingerprint = f"nanopage-{__version__}-{options[:8]}"
        self.metrics = Metrics(engine)
        self.engine_thread = EngineThread(engine, self.metrics.count)
        self._tokenizing = ThreadPoolExecutor(2, "nanopage-tokenizer")
        self._compiling = ThreadPoolExecutor(1, "nanopage-grammars")
        self._loading = ThreadPoolExecutor(4, "nanopage-images")
        weakref.finalize(self, self.engine_thread.stop).atexit = False  # the thread itself sees to the exit

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> "AsyncLLM":
        """Load the model of an `EngineArgs` and start. Raises: as `nanopage.build.build_engine`."""
        return cls(engine_args.create_engine("AsyncLLM"))

    # Requests

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | BeamSearchParams | None,
        request_id: str,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Run one request. Yields its outputs as they come, at most one a step. Each output has all the text so far,
        and the new part as `delta`. Cancelling, or leaving the loop and closing the iterator, aborts the request.

        Args:
            prompt: text, token ids, or a dict (see `Prompt` in inputs.py).
            sampling_params: None uses `LLMEngine.default_sampling_params`.
            request_id: any non-empty string that no unfinished request has.
            priority: lower goes first, with scheduling_policy="priority".
            lora_request: an adapter, with enable_lora.
            prompt_adapter_request: a soft prompt, with enable_prompt_adapter.

        Raises:
            ValueError, TypeError: as `LLMEngine.add_request`.
            EngineDeadError: the engine has died or has been shut down.
        """
        (prompt,) = with_prompt_adapters([prompt], prompt_adapter_request)
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
        """Check a request and queue it. Returns the stream of its outputs. Arguments and errors: as `generate`."""
        if not isinstance(request_id, str) or not request_id:
            raise TypeError(f"request_id must be a non-empty string, not {request_id!r}")
        inbox = self.engine_thread.open(request_id)
        try:
            params = self.engine.default_sampling_params if params is None else params
            processor = self.engine.input_processor
            structured, in_thread = getattr(params, "structured_outputs", None), self.in_thread
            if structured is not None and await self.in_thread(processor.has_to_compile, structured):
                in_thread = self.in_compiler
            arguments = request_id, prompt, params, priority, lora_request
            inbox.request = await in_thread(processor.make_request, *arguments)
        except BaseException:
            self.engine_thread.close(inbox)
            raise
        self.engine_thread.post(inbox.request)
        if inbox.aborted:
            self.engine_thread.post(inbox)
        return RequestStream(self, inbox)

    async def in_thread(self, function: Callable, *args: Any) -> Any:
        """The result of a function that would take too long for the event loop, such as encoding a text."""
        return await self._in_pool(self._tokenizing, function, *args)

    async def in_compiler(self, function: Callable, *args: Any) -> Any:
        """The result of a function that compiles grammars."""
        return await self._in_pool(self._compiling, function, *args)

    async def in_loader(self, function: Callable, *args: Any) -> Any:
        """The result of a function that loads an image."""
        return await self._in_pool(self._loading, function, *args)

    async def _in_pool(self, pool: ThreadPoolExecutor, function: Callable, *args: Any) -> Any:
        self.engine_thread.check_alive()
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, function, *args)
        except asyncio.CancelledError:
            if self.engine_thread.stopping:  # the thread pool has dropped it
                raise EngineDeadError("the engine has been shut down") from None
            raise

    async def abort(self, request_id: str) -> None:
        """End a request, if it is still running. Its reader gets a last output, with the finish_reason "abort"."""
        if (inbox := self.engine_thread.inboxes.get(request_id)) is None:
            return
        if inbox.request is None:
            inbox.aborted = True
        else:
            self.engine_thread.post(inbox)

    async def between_steps(self, function: Callable[[], T]) -> T:
        """The result of a function that needs the engine between two steps. The engine's thread calls the function, and
        no step runs meanwhile. Raises: EngineDeadError, and what the function raises."""
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

        self.engine_thread.post(call)
        return await asyncio.wrap_future(done)

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Running requests go on. Returns True. Raises: EngineDeadError."""
        await self.between_steps(self.engine.reset_prefix_cache)
        return True

    async def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up`. Arguments and errors: as `standby.engine.sleep`; EngineDeadError."""
        await self.between_steps(partial(standby.sleep, self.engine, level))

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take memory back. Arguments and errors: as `standby.engine.wake_up`; EngineDeadError."""
        await self.between_steps(partial(standby.wake_up, self.engine, tags))

    async def is_sleeping(self) -> bool:
        """Whether anything sleeps."""
        return bool(self.engine.asleep)

    async def update_weights(self, weights: "Weights") -> None:
        """Replace all weights. Arguments and errors: as `standby.engine.update_weights`; EngineDeadError. The engine's
        thread reads the tensors."""
        await self.between_steps(partial(standby.update_weights, self.engine, weights))

    # State

    async def get_tokenizer(self) -> "Tokenizer | None":
        """The model's tokenizer; None if it has none, which only load_format="dummy" allows."""
        return self.engine.tokenizer

    async def check_health(self) -> None:
        """Raises: EngineDeadError if the engine has died or has been shut down."""
        self.engine_thread.check_alive()

    @property
    def errored(self) -> bool:
        return self.dead_error is not None

    @property
    def is_running(self) -> bool:
        return self.dead_error is None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the engine cannot go on; None while it can."""
        return self.engine_thread.error

    def get_metrics(self) -> list[Metric]:
        """The metrics so far, under vLLM's names (see vllm/metrics.py)."""
        return self.metrics.snapshot()

    def shutdown(self, timeout: float | None = None) -> bool:
        """End all requests, the thread and the workers. Readers of unfinished requests get an EngineDeadError.

        Args: timeout: the most seconds to wait for the running step. None: wait as long as it takes.
        Returns: whether the engine's thread has ended.
        """
        ended = self.engine_thread.shutdown(timeout)
        for pool in (self._tokenizing, self._compiling, self._loading):
            pool.shutdown(wait=False, cancel_futures=True)
        return ended
