"""Server-sent events, and what happens when a client goes away."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanopage.aio.async_llm import EngineDeadError
from nanopage.server.errors import ApiError, ClientGoneError, internal_error

logger = logging.getLogger("nanopage")

KEEP_ALIVE_SECONDS = 15.0  # of silence, after which a comment keeps proxies from closing the connection
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
PING = b'event: ping\ndata: {"type":"ping"}\n\n'  # what /v1/messages has instead of both
GONE = "cut off"  # how a stream ends if its client goes away

T = TypeVar("T")


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`. If the client closes its connection first, the work is cancelled. Raises: ClientGoneError,
    and what the work raises."""
    task, gone = asyncio.ensure_future(work), asyncio.create_task(until_gone(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return await task
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.wait((task, gone))


async def whole_reply(request: Request, work: Awaitable[Response], end: Callable[[str], Awaitable[None]]) -> Response:
    """The reply that `work` makes, unless the client goes away.

    Args: end: awaited exactly once, with how the call has ended.
    Raises: as `unless_gone`.
    """
    how = "complete"
    try:
        return await unless_gone(request, work)
    except BaseException as error:
        how = GONE if isinstance(error, ClientGoneError) else f"ended by {type(error).__name__}"
        raise
    finally:
        await end(how)


class EventStream(Response):
    """Sends each object of an iterator as an event, and then `[DONE]`. If the iterator fails, an event before `[DONE]`
    says so.

    Args:
        failed: makes this event from the error.
        silence: sent whenever nothing has been sent for a while.
        done: the last bytes.
        end: awaited exactly once, with how the stream has ended, even if the client has gone before it began.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[dict],
        failed: Callable[[ApiError], dict],
        headers: dict[str, str],
        end: Callable[[str], Awaitable[None]],
        silence: bytes = KEEP_ALIVE,
        done: bytes = DONE,
    ):
        super().__init__(headers=HEADERS | headers)
        del self.headers["content-length"]
        self.events, self.failed, self.end, self.silence, self.done = events, failed, end, silence, done
        self._how = "complete"
        self._last_sent = math.inf  # no comments before the head has been sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Events bypass the framework's layers, which would take most of the event loop's time. `direct` still waits
        # for a client that reads slowly.
        direct, how = scope["nanopage.send"], GONE
        work = asyncio.create_task(self._send_all(send, direct))
        gone, comments = asyncio.create_task(until_gone(receive)), asyncio.create_task(self._keep_alive(direct))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone, comments):
                task.cancel()
            await asyncio.wait((work, gone, comments))
            if not work.cancelled():
                error = work.exception()
                # A connection that has broken raises OSError, or uvloop's RuntimeError.
                how = work.result() if error is None else GONE
                if error is not None and not isinstance(error, OSError | RuntimeError):
                    logger.error("a stream failed", exc_info=error)
            await self.end(how)

    async def _send_all(self, start: Send, send: Send) -> str:
        """Returns how the stream has ended."""
        await start({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._last_sent = time.monotonic()
        async for event in self._encoded():
            await send({"type": "http.response.body", "body": event, "more_body": True})
            self._last_sent = time.monotonic()
        self._last_sent = math.inf  # no comments from here on
        await send({"type": "http.response.body", "body": self.done, "more_body": False})
        return self._how

    async def _encoded(self) -> AsyncIterator[bytes]:
        """The events as bytes."""
        try:
            async for event in self.events:
                yield encode_event(event)
        except Exception as error:  # from the call, not from the connection
            self._how = f"ended by {type(error).__name__}"
            if isinstance(error, EngineDeadError):
                error = ApiError(503, str(error), code="engine_dead")
            elif not isinstance(error, ApiError):
                logger.exception("a stream failed")
                error = internal_error()
            yield encode_event(self.failed(error))

    async def _keep_alive(self, send: Send) -> None:
        """Send `silence` whenever nothing has been sent for a while."""
        while True:
            silence = max(0.0, time.monotonic() - self._last_sent)
            if silence < KEEP_ALIVE_SECONDS:
                await asyncio.sleep(KEEP_ALIVE_SECONDS - silence)
            else:
                self._last_sent = time.monotonic()
                await send({"type": "http.response.body", "body": self.silence, "more_body": True})


def encode_event(event: dict) -> bytes:
    name = f"event: {event['type']}\n" if "type" in event else ""  # of /v1/responses, /v1/messages
    return name.encode() + b"data: " + msgspec.json.encode(event) + b"\n\n"


async def until_gone(receive: Receive) -> None:
    """Returns when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
