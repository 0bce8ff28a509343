"""GET /view: the live view. It shows an engine's requests, blocks and steps as they are, and can pause them.

    engine's thread: a listener makes a frame of each step (nanopage/view/frames.py) ──▶ a queue for each watcher
    event loop: /view/events sends what is in the queue as server-sent events, 16 times a second at most

The listener is there only while somebody watches. A watcher that falls too far behind loses frames and gets the whole
state again. `POST /view/control` pauses the engine, lets it make steps, and lets it go on. A pause is a lease that the
page renews, because a frozen page does not close its connection. When no page has renewed the lease for LEASE_SECONDS,
or the last watcher has gone, the engine goes on by itself.
"""

import asyncio
import contextlib
import logging
import time
import urllib.parse
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Literal

import msgspec
from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response, StreamingResponse

from nanopage.aio.async_llm import AsyncLLM, EngineDeadError
from nanopage.outputs import StepStats
from nanopage.server.errors import ApiError, json_response
from nanopage.server.pages import page_reply
from nanopage.server.streaming import HEADERS, KEEP_ALIVE, KEEP_ALIVE_SECONDS
from nanopage.view.export import PAGE, shipped_recordings
from nanopage.view.frames import Frames
from nanopage.view.picture import Frame

logger = logging.getLogger("nanopage")

VIEW_PATHS = ("/view", "/view/events", "/view/control", "/view/runs/{name}")
MAX_WATCHERS = 8
MAX_BEHIND = 2000  # waiting frames of a watcher
PACE_SECONDS = 0.06  # between messages to a watcher
MAX_STEPS = 1000  # in one click
LEASE_SECONDS = 30.0  # a pause ends this long after a page last renewed it; a page renews it every 10 s


class Control(BaseModel):
    """The body of /view/control. `steps`: how many steps a paused engine makes."""

    model_config = ConfigDict(extra="forbid", strict=True)

    action: Literal["pause", "renew", "resume", "step"]
    steps: int = Field(1, ge=1, le=MAX_STEPS)


class Watcher:
    """A client of /view/events."""

    def __init__(self) -> None:
        self.loop, self.news = asyncio.get_running_loop(), asyncio.Event()
        self.events: deque[bytes] = deque()
        self.behind = False  # frames were lost: the watcher gets no more before the whole state
        self.gone = False
        self.asleep = False  # the watcher waits for `news`

    def put(self, event: bytes) -> None:
        """For any thread."""
        if len(self.events) >= MAX_BEHIND:
            self.behind = True
            self.events.clear()
        if self.behind:
            return
        self.events.append(event)
        if self.asleep:
            self.asleep = False
            self.loop.call_soon_threadsafe(self.news.set)

    def restart(self, event: bytes) -> None:
        """Go on with the whole state."""
        self.events.clear()
        self.behind = False
        self.put(event)

    async def wait(self, seconds: float) -> None:
        """Wait for an event, at most this many seconds."""
        self.news.clear()
        self.asleep = True
        if not self.events:  # no event came before `put` could see that this waits
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.news.wait(), seconds)

    def take(self) -> bytes:
        """All events, joined. Empty if the engine's thread drops them meanwhile."""
        events = []
        with contextlib.suppress(IndexError):
            for _ in range(len(self.events)):
                events.append(self.events.popleft())
        return b"".join(events)


class LiveView:
    """Who watches the engine of a server."""

    def __init__(self) -> None:
        self.num_watching = 0
        self._watchers: list[Watcher] = []  # only the engine's thread changes this and _frames
        self._frames: Frames | None = None
        self._lease: asyncio.TimerHandle | None = None  # ends a pause
        self._tasks: set[asyncio.Task] = set()

    async def watch(self, llm: AsyncLLM, model: str) -> AsyncIterator[bytes]:
        """Server-sent events for one more watcher. Raises: ApiError, before the first, for too many watchers."""
        if self.num_watching >= MAX_WATCHERS:
            raise ApiError(429, f"{MAX_WATCHERS} pages watch already", code="too_many_watchers", retry_after=10)
        watcher = Watcher()
        self.num_watching += 1
        try:
            await llm.between_steps(partial(self._attach, llm, model, watcher))
            sent = time.monotonic()
            while llm.dead_error is None:
                if watcher.events:
                    yield watcher.take()
                    sent = time.monotonic()
                    await asyncio.sleep(PACE_SECONDS)
                    continue
                await watcher.wait(1)
                if not watcher.events and time.monotonic() - sent > KEEP_ALIVE_SECONDS:
                    sent = time.monotonic()
                    yield KEEP_ALIVE
            yield _encode({"frame": "end", "error": str(llm.dead_error)})
        finally:
            watcher.gone = True
            self.num_watching -= 1
            if not self.num_watching:
                self._resume(llm)
            task = asyncio.ensure_future(self._leave(llm))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def control(self, llm: AsyncLLM, action: str, steps: int) -> None:
        """Raises: ApiError if nobody would see the pause."""
        if not self.num_watching:
            raise ApiError(409, "nobody watches: open /view first", code="nobody_watches")
        if action == "pause":
            llm.engine_thread.pause(partial(self._send, lambda frames: frames.plan()))
        elif action == "resume":
            self._resume(llm)
        elif action == "step":
            llm.engine_thread.allow_steps(steps)
        if llm.engine_thread.paused:
            self._renew(llm)
        if action != "renew":
            self._tell(llm)

    def _renew(self, llm: AsyncLLM) -> None:
        if self._lease is not None:
            self._lease.cancel()
        self._lease = asyncio.get_running_loop().call_later(LEASE_SECONDS, self._lapse, llm)

    def _lapse(self, llm: AsyncLLM) -> None:
        if llm.engine_thread.paused:
            logger.info(f"no page has renewed the pause for {LEASE_SECONDS:g} s: the engine goes on")
        self._resume(llm)
        self._tell(llm)

    def _resume(self, llm: AsyncLLM) -> None:
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None
        llm.engine_thread.resume()

    def _tell(self, llm: AsyncLLM) -> None:
        """Tell all watchers whether the engine is paused."""
        for watcher in self._watchers:
            watcher.put(_encode({"frame": "state", "paused": llm.engine_thread.paused}))

    async def _leave(self, llm: AsyncLLM) -> None:
        try:
            await llm.between_steps(partial(self._detach, llm))
        except EngineDeadError:
            return

    # On the engine's thread

    def _attach(self, llm: AsyncLLM, model: str, watcher: Watcher) -> None:
        if watcher.gone:
            return
        if self._frames is None:
            self._frames = Frames(llm.engine, model)
            llm.engine.listeners.append(self._after_step)
        self._watchers = [*self._watchers, watcher]
        key = _encode(self._frames.key() | {"paused": llm.engine_thread.paused})
        for each in self._watchers:  # later frames build on this one
            each.put(key)

    def _detach(self, llm: AsyncLLM) -> None:
        self._watchers = [watcher for watcher in self._watchers if not watcher.gone]
        if not self._watchers and self._frames is not None:
            self._frames = None
            llm.engine.listeners.remove(self._after_step)

    def _after_step(self, stats: StepStats) -> None:
        self._send(lambda frames: frames.step(stats))

    def _send(self, make: Callable[[Frames], Frame]) -> None:
        """Send a frame to all watchers. An error here must not end the engine's step."""
        frames = self._frames
        if frames is None:
            return
        try:
            event = _encode(make(frames))
            for watcher in self._watchers:
                watcher.put(event)
                if watcher.behind:
                    watcher.restart(_encode(frames.key() | {"behind": True, "paused": self._lease is not None}))
        except Exception:
            logger.exception("the live view has failed, and shows the whole state again")
            key = _encode(frames.key())
            for watcher in self._watchers:
                watcher.restart(key)


def add_view(app: FastAPI, view: LiveView, require: Callable[[], AsyncLLM], model_name: str) -> None:
    """Add the routes of the live view.

    Args: require: returns the engine. Raises: ApiError while there is none.
    """

    @app.get("/view", include_in_schema=False)
    async def page() -> Response:
        return page_reply(PAGE)

    @app.get("/view/events", include_in_schema=False)
    async def events(request: Request) -> Response:
        check_site(request)
        stream = view.watch(require(), model_name)
        first = await anext(stream)  # so that an error becomes an error reply
        return StreamingResponse(_after(first, stream), headers=HEADERS, media_type="text/event-stream")

    @app.post("/view/control", include_in_schema=False)
    async def control(body: Control, request: Request) -> Response:
        check_site(request)
        # In a browser that does not report the site, a page of another site cannot send this type without asking.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "the content type must be application/json", code="unsupported_media_type")
        llm = require()
        view.control(llm, body.action, body.steps)
        return json_response({"paused": llm.engine_thread.paused})

    @app.get("/view/runs/{name}", include_in_schema=False)
    async def run(name: str) -> Response:
        shipped = shipped_recordings()
        if name not in shipped:
            raise ApiError(404, f"no recording has this name: there are {', '.join(shipped)}", code="not_found")
        headers = {"content-encoding": "gzip"}
        return Response(shipped[name].read_bytes(), headers=headers, media_type="application/x-ndjson")


def check_site(request: Request) -> None:
    """Raises: ApiError for a request that a browser sends for a page of another site. Such a page could not read the
    reply, but it could use up the places for watchers, or pause the engine."""
    headers = request.headers
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    is_own = origin is None or urllib.parse.urlsplit(origin).netloc == headers.get("host")
    if site not in ("same-origin", "none") if site is not None else not is_own:
        raise ApiError(403, "a page of another site may neither watch nor pause the engine", code="foreign_site")


async def _after(first: bytes, stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        yield first
        async for event in stream:
            yield event
    finally:
        await stream.aclose()  # type: ignore[attr-defined]


def _encode(frame: Frame) -> bytes:
    return b"data: " + msgspec.json.encode(frame) + b"\n\n"
