"""EngineThread: the thread that steps an engine for the coroutines of any number of event loops.

The thread sleeps while there is nothing to do. Coroutines post requests and aborts to it. It takes them before every
step, and wakes the coroutines whose requests have new output.
"""

import asyncio
import atexit
import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable

from nanopage.engine.engine import LLMEngine
from nanopage.engine.output_processor import Request
from nanopage.outputs import RequestOutput

logger = logging.getLogger("nanopage")

CHECK_SECONDS = 1.0  # between checks of the workers while there is no request
MAX_FAILURES = 3  # calls of `LLMEngine.step` in a row that raise before the engine counts as dead


class EngineDeadError(RuntimeError):
    """The engine cannot go on, or has been shut down."""


class Inbox:
    """The latest output of one request, for its reader. Only the event loop that made the inbox may use it.

    Every output has all that its request has produced so far. So a new output replaces one that has not been read, and
    the reader loses nothing.
    """

    def __init__(self, request_id: str):
        self.request_id = request_id
        self.request: Request | None = None  # set once its prompt has been read
        self.aborted = False  # aborted while its prompt was being read
        self.started = False
        self.loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._output: RequestOutput | None = None  # not read yet
        self._error: EngineDeadError | None = None

    async def take(self) -> RequestOutput:
        """Wait for an output. Raises: EngineDeadError if there will be none."""
        await self._news.wait()
        output, self._output = self._output, None
        if output is None:
            assert self._error is not None
            raise self._error
        if self._error is None:
            self._news.clear()
        return output

    def put(self, output: RequestOutput) -> None:
        if self._output is not None:
            output.supersede(self._output)
        self._output = output
        self._news.set()

    def fail(self, error: EngineDeadError) -> None:
        self._error = error
        self._news.set()


Message = Request | Inbox | Callable[[EngineDeadError | None], None]
"""A request to submit, the inbox of a request to abort, or a function to call with None or the reason why the engine
ends."""


class EngineThread:
    """Runs requests until `shutdown`, or until it fails. Its methods are for any thread.

    Args:
        engine: a new engine. EngineThread is its only user from now on.
        listener: called with each request that has been queued, and with its last output. It must not raise.
    """

    def __init__(self, engine: LLMEngine, listener: Callable[[Request | RequestOutput], None]):
        self.engine, self.listener = engine, listener
        self.idle = True
        self._last_progress = time.monotonic()  # when a step ended, or work arrived at an idle engine
        self.num_waiting = 0  # requests that have not begun to run
        self.num_waiting_tokens = 0  # tokens of their prompts
        self._changed = threading.Condition()  # guards the numbers of waiting requests, and the attributes below
        self.mail: list[Message] = []
        self.inboxes: dict[str, Inbox] = {}  # of all requests that have not ended
        self.error: EngineDeadError | None = None  # why the engine cannot go on
        self.stopping = False
        self._announce: Callable[[], None] | None = None  # while the engine is paused (see `pause`)
        self._steps = 0  # steps that may run during the pause
        self._is_planned = False  # in a pause: whether the next step has been decided
        self._has_changed = False  # whether requests have come or have been aborted since the last step
        self._num_failures = 0  # calls of `LLMEngine.step` in a row that have raised
        self.thread = threading.Thread(target=self._run, name="nanopage-engine", daemon=True)
        atexit.register(self.shutdown)  # a daemon thread must not run torch while the interpreter ends
        self.thread.start()

    def open(self, request_id: str) -> Inbox:
        """The inbox of a new request. Raises: EngineDeadError; ValueError for an id that is in use."""
        inbox = Inbox(request_id)
        with self._changed:
            self.check_alive()
            if request_id in self.inboxes:
                raise ValueError(f"request_id {request_id!r} is in use")
            self.inboxes[request_id] = inbox
        return inbox

    def close(self, inbox: Inbox) -> None:
        """Forget an inbox whose request is never posted."""
        with self._changed:
            self.inboxes.pop(inbox.request_id, None)

    def post(self, message: Message) -> None:
        """Raises: EngineDeadError, but not for an abort."""
        with self._changed:
            if self.error is None:
                self.mail.append(message)
                self._changed.notify()
                if isinstance(message, Request):
                    self.num_waiting += 1
                    self.num_waiting_tokens += len(message.prompt_token_ids)
            elif not isinstance(message, Inbox):
                raise self.error

    def check_alive(self) -> None:
        """Raises: EngineDeadError."""
        if self.error is not None:
            raise self.error

    @property
    def seconds_without_progress(self) -> float:
        """Seconds since the last step ended or work arrived; 0 while there is no work."""
        return 0.0 if self.idle else time.monotonic() - self._last_progress

    def stop(self) -> None:
        """End all requests and the thread, after the step that is running."""
        with self._changed:
            self.stopping = True
            self._changed.notify()

    def shutdown(self, timeout: float | None = None) -> bool:
        """As `AsyncLLM.shutdown`."""
        self.stop()
        if threading.current_thread() is not self.thread:
            self.thread.join(timeout)
        return not self.thread.is_alive()

    # Step by step

    def pause(self, announce: Callable[[], None]) -> None:
        """Run only the steps that `allow_steps` allows. The engine decides on its next step, and waits before it runs
        the step; view/explain.py describes that step. New requests wait, and aborted requests end at once. A pause does
        not count as a hang. `shutdown` works.

        Args: announce: called by the engine's thread when a step has been decided, and again when requests have come or
            gone since then. It must not block.
        Raises: EngineDeadError.
        """
        with self._changed:
            self.check_alive()
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

    # The thread

    def _run(self) -> None:
        try:
            while self._turn():
                with self._changed:
                    if self._rests():
                        self._changed.wait(CHECK_SECONDS)
        finally:
            self.engine.shutdown()
            atexit.unregister(self.shutdown)

    def _turn(self) -> bool:
        """Do what has been posted, and make a step. Returns False when it is time to end and readers have been told."""
        try:
            if self.idle:
                self.engine.check_workers()
            with self._changed:
                if self._rests():
                    return True
                stopping, mail = self.stopping, self.mail
                self.mail = mail if stopping else []
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
        rests = not (self.stopping or self.mail or self._has_work())
        if rests != self.idle:
            self._last_progress = time.monotonic()
            self.idle = rests
        return rests

    def _read(self, mail: list[Message]) -> None:
        for message in mail:
            self._has_changed |= not callable(message)
            if isinstance(message, Request):
                self._submit(message)
            elif not isinstance(message, Inbox):
                message(None)
            elif self.inboxes.get(message.request_id) is message:  # otherwise another request has its id by now
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
        for event in self.engine.last_step.events:
            if event.kind == "started":
                self._count_started(self.inboxes.get(event.request_id))
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
        self.listener(request)

    def _abort(self, request_id: str, error: str | None = None) -> None:
        """End a request, because of an error or because nobody reads it."""
        output = None
        try:
            output = self.engine.abort(request_id)
        except Exception:
            if self.engine.dead_error is not None:
                raise
            # The next step recovers: it goes on with the request, or ends the request with an error.
            logger.exception(f"request {request_id} could not be aborted")
        if error is not None:
            request = self.inboxes[request_id].request
            assert request is not None
            ids, times = request.prompt_token_ids, request.group.metrics
            output = RequestOutput(request_id, request.prompt, ids, [], True, times, error=error)
        self._deliver([] if output is None else [output])

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
        self.idle = True
        announce()
        return False

    def _count_started(self, inbox: Inbox | None) -> None:
        """A request no longer waits, because it has begun or ended."""
        if inbox is not None and not inbox.started and inbox.request is not None:
            inbox.started = True
            with self._changed:
                self.num_waiting -= 1
                self.num_waiting_tokens -= len(inbox.request.prompt_token_ids)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Hand outputs to their readers, with one message to each event loop."""
        ready: dict[asyncio.AbstractEventLoop, list[tuple[Inbox, RequestOutput]]] = defaultdict(list)
        for output in outputs:
            if (inbox := self.inboxes.get(output.request_id)) is None:
                continue  # it could not be queued or aborted as it should
            ready[inbox.loop].append((inbox, output))
            if output.finished:
                self.listener(output)
                self._count_started(inbox)
                with self._changed:
                    del self.inboxes[output.request_id]
        for loop, pairs in ready.items():
            try:
                loop.call_soon_threadsafe(_put_all, pairs)
            except RuntimeError:  # the loop is closed, and its readers are gone
                for inbox, output in pairs:
                    if not output.finished:
                        self.post(inbox)

    def _end(self, error: EngineDeadError) -> None:
        """Tell all readers that there will be no more outputs."""
        with self._changed:
            self.error = error
            inboxes, self.inboxes = list(self.inboxes.values()), {}
            mail, self.mail = self.mail, []
        for message in mail:
            if callable(message):
                message(error)
        for inbox in inboxes:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                inbox.loop.call_soon_threadsafe(inbox.fail, error)


def _put_all(pairs: list[tuple[Inbox, RequestOutput]]) -> None:
    for inbox, output in pairs:
        inbox.put(output)
