"""Residents: which of several models are in memory.

A model is loaded when a request wants it. If it does not fit beside the others, idle models are unloaded, the least
recently used first. If all are busy, it waits, and busy models that have been loaded for TURN_SECONDS take no new
requests until it fits: their new requests wait, too. Models are loaded in the order in which they were wanted.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from nanopage.server.errors import ApiError
from nanopage.server.model_process import ModelProcess

logger = logging.getLogger("nanopage")

GIB = 2**30
TURN_SECONDS = 10.0  # for which a busy model keeps its memory, if others wait for it
FAILURE_SECONDS = 10.0  # after a failure, before a model is loaded again
MEASURE_SECONDS = 10.0  # between measurements while requests run


@dataclass(eq=False)
class Resident:
    """A model, and what has become of it. Times are `time.monotonic`."""

    name: str
    path: str  # what to load
    process: ModelProcess | None = None  # loaded or not
    task: asyncio.Task | None = None  # loads it
    closing: bool = False  # it takes no new requests, so that others fit
    num_running: int = 0  # requests
    num_waiting: int = 0  # requests, until it is loaded
    num_waiting_bytes: int = 0  # of their bodies
    num_bytes: int | None = None  # what it needed when it was last loaded; None if it never was
    last_used: float = 0.0
    loaded_at: float = 0.0
    failed_at: float = 0.0
    timer: asyncio.TimerHandle | None = None  # unloads it when it has been idle
    error: ApiError | None = None  # why it could not be loaded
    card: dict = field(default_factory=dict)  # its entry in /v1/models
    load_seconds: float = 0.0
    num_loads: int = 0
    num_unloads: int = 0
    num_failures: int = 0

    @property
    def is_loaded(self) -> bool:
        return self.process is not None and self.process.ready

    @property
    def is_idle(self) -> bool:
        """Whether it may be unloaded now."""
        return self.process is not None and not self.num_running and (self.closing or not self.num_waiting)

    @property
    def num_used(self) -> int:
        """Bytes of its process."""
        return 0 if self.process is None else self.process.num_bytes

    @property
    def state(self) -> str:
        if self.is_loaded:
            return "loaded"
        return "unloaded" if self.task is None or self.task.done() else "loading"


@dataclass(eq=False)
class Residents:
    """Loads and unloads models."""

    models: list[Resident]  # all there are
    # Makes the process of a model, which knows what memory it will need, without starting it. Raises OSError or
    # ValueError for a model that cannot be loaded.
    make_process: Callable[[Resident], ModelProcess]
    budget: int  # bytes that all models may take together
    keep_alive: float  # seconds after which an idle model is unloaded; negative: never
    measures: bool = True  # whether the memory of processes is measured; if not, the first estimate stays

    def __post_init__(self) -> None:
        self.draining = False
        self.processes: dict[ModelProcess, asyncio.Task | None] = {}  # those with memory -> the task that ends it
        self._turn = asyncio.Lock()  # of the model that takes memory next
        self._changed = asyncio.Event()  # there may be more room
        self._tasks: set[asyncio.Task] = set()
        self._measured_at = 0.0

    @contextlib.asynccontextmanager
    async def use(self, model: Resident, num_bytes: int) -> AsyncIterator[ModelProcess]:
        """The process of a model, which stays loaded during the block.

        Args: num_bytes: of the request.
        Raises: ApiError if it cannot be loaded.
        """
        model.num_waiting, model.num_waiting_bytes = model.num_waiting + 1, model.num_waiting_bytes + num_bytes
        try:
            process = await self._wait_until_loaded(model)
        finally:
            model.num_waiting, model.num_waiting_bytes = model.num_waiting - 1, model.num_waiting_bytes - num_bytes
            if model.is_loaded:
                self._rest(model)  # also if the client has just gone
            elif not model.num_waiting and model.process is None and model.task is not None:
                model.task.cancel()  # no request wants it any more
        model.num_running += 1
        if model.timer is not None:
            model.timer.cancel()
        try:
            yield process
        finally:
            model.num_running -= 1
            self._rest(model)
            if time.monotonic() > self._measured_at + MEASURE_SECONDS:
                self._measured_at = time.monotonic()
                self._spawn(self._shrink())

    def drain(self) -> None:
        """Load no more. Requests that wait for a model end with an error."""
        self.draining = True
        for model in self.models:
            if model.task is not None:
                model.task.cancel()

    async def stop(self) -> None:
        """End all processes."""
        self.drain()
        for model in self.models:
            if model.process is not None:
                self._forget(model, model.process)
        if ending := [self._end(process) for process in [*self.processes]]:
            await asyncio.wait(ending)
        for task in [*self._tasks]:
            task.cancel()

    @property
    def num_used(self) -> int:
        """Bytes that all processes take, or are assumed to need."""
        return sum(process.num_bytes for process in self.processes)

    # Loading

    async def _wait_until_loaded(self, model: Resident) -> ModelProcess:
        """Raises: ApiError."""
        while not model.is_loaded or model.closing:
            if self.draining:
                raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=30)
            if model.error is not None and time.monotonic() < model.failed_at + FAILURE_SECONDS:
                raise model.error.with_traceback(None)  # a traceback keeps the bodies of the failed requests in memory
            if model.task is None or model.task.done():
                model.task = self._spawn(self._load(model))
            await asyncio.wait((model.task,))
        assert model.process is not None
        return model.process

    async def _load(self, model: Resident) -> None:
        """Load a model, or set its `error`."""
        process = None
        try:
            async with self._turn:
                if model.process is not None or not model.num_waiting:  # still loaded, or no longer wanted
                    return
                made = self.make_process(model)
                await self._make_room(model, made.num_bytes)
                process = model.process = made
                self.processes[process] = None
            started = time.monotonic()
            await process.start()
            if self.measures:
                process.num_bytes = await asyncio.to_thread(process.measure)
            model.num_bytes = process.num_bytes
            self._check_size(model, process.num_bytes)
            model.card = await process.card()
        except Exception as error:
            message = f"the model {model.name!r} could not be loaded: {error}"
            model.error = error if isinstance(error, ApiError) else ApiError(503, message, code="load_failed")
            model.failed_at, model.num_failures = time.monotonic(), model.num_failures + 1
            logger.warning(str(model.error))
        else:
            process.ready, model.error = True, None
            model.loaded_at, model.num_loads = time.monotonic(), model.num_loads + 1
            model.load_seconds = model.loaded_at - started
            logger.info(f"{model.name}: loaded in {model.load_seconds:.1f} s, {process.num_bytes / GIB:.2f} GiB")
            self._spawn(self._watch(model, process))
            self._rest(model)
            self._spawn(self._shrink())  # it may have needed more than was assumed
        finally:
            if process is not None and not process.ready:
                self._forget(model, process)

    async def _make_room(self, model: Resident, needed: int) -> None:
        """Wait until a model fits beside the others; unload some of them. Raises: ApiError if it never will."""
        self._check_size(model, needed)
        try:
            while self.num_used + needed > self.budget:
                await self._measure()
                if self.num_used + needed <= self.budget:
                    return
                if (idle := self._least_used()) is not None:
                    await self._unload(idle, f"to make room for {model.name}")
                    continue
                self._close_oldest(needed)
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), TURN_SECONDS / 10)
        finally:
            for each in self.models:
                each.closing = False

    def _close_oldest(self, needed: int) -> None:
        """Close busy models to new requests, the longest loaded first, until enough memory will be freed."""
        left = self.num_used
        for each in sorted(self.models, key=lambda each: each.loaded_at):
            if each.process is None or not each.is_loaded or time.monotonic() < each.loaded_at + TURN_SECONDS:
                continue
            if left + needed > self.budget:
                each.closing = True
                left -= each.process.num_bytes

    def _check_size(self, model: Resident, needed: int) -> None:
        """Raises: ApiError for a model that does not fit even alone."""
        if needed > self.budget:
            most = f"all models together may take {self.budget / GIB:.2f} GiB (--models-memory)"
            message = f"the model {model.name!r} needs about {needed / GIB:.2f} GiB, and {most}"
            raise ApiError(503, message, code="model_too_large")

    async def _measure(self) -> None:
        if self.measures:
            processes = [*self.processes]
            found = await asyncio.to_thread(lambda: [process.measure() for process in processes])
            for process, used in zip(processes, found, strict=True):
                process.num_bytes = used if process.ready else max(process.num_bytes, used)
        self._measured_at = time.monotonic()

    # Unloading

    def _least_used(self) -> Resident | None:
        """The idle model that was used least recently."""
        return min((model for model in self.models if model.is_idle), key=lambda model: model.last_used, default=None)

    def _rest(self, model: Resident) -> None:
        """Note that a model has been used. If it is idle, it is unloaded after a while."""
        model.last_used = time.monotonic()
        self._changed.set()
        if model.timer is not None:
            model.timer.cancel()
        if model.is_idle and self.keep_alive >= 0:
            loop = asyncio.get_running_loop()
            model.timer = loop.call_later(self.keep_alive, lambda: self._spawn(self._unload_idle(model)))

    async def _unload_idle(self, model: Resident) -> None:
        if model.is_idle:
            await self._unload(model, f"idle for {self.keep_alive:g} s")

    async def _shrink(self) -> None:
        """Unload idle models while all models take more than they may."""
        await self._measure()
        while self.num_used > self.budget and (idle := self._least_used()) is not None:
            await self._unload(idle, "the models take too much memory")

    async def _unload(self, model: Resident, why: str) -> None:
        """Unload an idle model, and wait until its memory is free."""
        process = model.process
        assert process is not None
        if process.ready:
            logger.info(f"{model.name}: unloaded ({why})")
            model.num_unloads += 1
            self._forget(model, process)
        elif model.task is not None:  # it is still loading, and no request wants it
            model.task.cancel()
            await asyncio.wait((model.task,))
        if (ending := self.processes.get(process)) is not None:
            await asyncio.wait((ending,))

    async def _watch(self, model: Resident, process: ModelProcess) -> None:
        """Unload a model whose process has ended by itself."""
        how = await process.watch(lambda: model.num_running > 0)
        if model.process is process:
            logger.warning(f"{model.name}: {how}")
            self._forget(model, process)

    def _forget(self, model: Resident, process: ModelProcess) -> None:
        """End the process of a model, which is unloaded from now on."""
        process.ready = False
        if model.process is process:
            model.process = None
        if process in self.processes:
            self._end(process)

    def _end(self, process: ModelProcess) -> asyncio.Task:
        """The task that ends a process. The process counts as long as it has memory."""

        async def end() -> None:
            try:
                await process.stop()
            finally:
                del self.processes[process]
                self._changed.set()

        task = self.processes[process]
        if task is None:
            task = self.processes[process] = self._spawn(end())
        return task

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task:
        """Run something in the background."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
