"""Server-sent events, and what happens when a client goes away."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanopage.async_llm import EngineDeadError
from nanopage.server.errors import ApiError

KEEP_ALIVE_SECONDS = 15.0  # of silence, before a comment keeps proxies from closing the connection
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client has closed its connection."""


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client closes its connection first.

    Raises: ClientGoneError, and what the work raises.
    """
    task, gone = asyncio.ensure_future(work), asyncio.create_task(_until_gone(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return await task
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.wait((task, gone))


class EventStream(Response):
    """Sends each object of an iterator as an event, and then `[DONE]`. An error is the last event before that.

    Args:
        events: ends by itself when it is closed early, because the client has gone.
        on_gone: called if the client has gone before the end.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[dict], headers: dict[str, str], on_gone: Callable[[], None]):
        super().__init__(headers=HEADERS | headers)
        del self.headers["content-length"]
        self.events, self.on_gone = events, on_gone
        self._last_sent = math.inf  # no comments before the head has been sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Every event through all layers of the framework would take most of the event loop's time.
        direct = scope["nanopage.send"]
        work = asyncio.create_task(self._send_all(send, direct))
        gone, comments = asyncio.create_task(_until_gone(receive)), asyncio.create_task(self._keep_alive(direct))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.on_gone()
            else:
                work.result()
        except OSError:  # the connection broke while it was written to
            self.on_gone()
        finally:
            for task in (work, gone, comments):
                task.cancel()
            await asyncio.wait((work, gone, comments))

    async def _send_all(self, start: Send, send: Send) -> None:
        await start({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._last_sent = time.monotonic()
        try:
            async for event in self.events:
                await self._send(send, event)
        except ApiError as error:
            await self._send(send, error.body())
        except EngineDeadError as error:
            await self._send(send, ApiError(503, str(error), code="engine_dead").body())
        finally:
            await self.events.aclose()  # type: ignore[attr-defined]
        self._last_sent = math.inf  # no comments from here on
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _send(self, send: Send, event: dict) -> None:
        name = f"event: {event['type']}\n" if "type" in event else ""  # of /v1/responses
        body = name.encode() + b"data: " + msgspec.json.encode(event) + b"\n\n"
        await send({"type": "http.response.body", "body": body, "more_body": True})
        self._last_sent = time.monotonic()

    async def _keep_alive(self, send: Send) -> None:
        """Send a comment whenever nothing has been sent for a while."""
        while True:
            silence = max(0.0, time.monotonic() - self._last_sent)
            if silence < KEEP_ALIVE_SECONDS:
                await asyncio.sleep(KEEP_ALIVE_SECONDS - silence)
            else:
                self._last_sent = time.monotonic()
                await send({"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
