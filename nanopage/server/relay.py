"""Replies of engines in other processes, on their way to clients: what front.py and models.py have in common."""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.types import Receive, Send

from nanopage.server.errors import ApiError, internal_error
from nanopage.server.middleware import AUDIO_PATHS
from nanopage.server.state import ServerState
from nanopage.server.streaming import DONE, PING, encode_event, until_gone

if TYPE_CHECKING:
    from nanopage.server.route import Route

logger = logging.getLogger("nanopage")

TEXT_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
POOLING_PATHS = ("/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank")
POSTS = (*TEXT_PATHS, *POOLING_PATHS, *AUDIO_PATHS.values(), "/tokenize", "/detokenize", "/v1/messages/count_tokens")
HEADERS = (b"content-type", b"traceparent", b"tracestate")  # the client's headers that an engine's process gets
SECONDS_TO_STOP = 5.0  # for clients to read the end of their replies
STOP, MESSAGE_ERROR = encode_event({"type": "message_stop"}), b"\nevent: error\n"  # the last events of /v1/messages
# The event that says that the engine has died. It cannot contain anything that a client has sent.
ERROR, ENGINE_DEAD = b'data: {"error":', b'"code":"engine_dead"'


@dataclass
class Call:
    """A call on its way to an engine's process."""

    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    key: str = ""  # for a replica: the name of the client's key, as Gate gives it
    route: "Route | None" = None  # chooses the replica; it stays in Front's process

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"route": None}


@dataclass
class Reply:
    """How much of a reply the client has."""

    path: str  # the call's, which decides the form of errors
    send: Send  # for the head
    direct: Send  # for the rest of the reply; bypasses the layers in between
    begun: bool = False  # whether the client has the head
    num_events: int = 0  # events of a stream that the client has
    complete: bool = False  # whether the client has all of it

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the head, unless the client has it."""
        if not self.begun:
            self.begun = True
            await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def send_whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Send a reply that is no stream."""
        await self.begin(status, headers)
        self.complete = True
        await self.direct({"type": "http.response.body", "body": body, "more_body": False})

    async def send_events(self, events: bytes) -> int:
        """Send whole events of a stream, unless the client has the last one. Returns: how many there were, apart from
        pings and comments."""
        if self.complete:
            return 0
        num_events = (b"\n" + events).count(b"\ndata: ") - events.count(PING)
        self.num_events += num_events
        self.complete = events.endswith((DONE, STOP)) or MESSAGE_ERROR in b"\n" + events
        await self.direct({"type": "http.response.body", "body": events, "more_body": not self.complete})
        return num_events

    async def fail(self, error: ApiError) -> None:
        """End a stream with an event that says what went wrong. Raises: ApiError if the client has received nothing."""
        if not self.begun:
            raise error from None
        if self.complete:
            return
        is_message = self.path == "/v1/messages"
        event = error.anthropic_body() if is_message else error.body()
        if self.path == "/v1/responses":  # its events have a type and a number
            event |= event["error"] | {"type": "error", "sequence_number": self.num_events}
        self.complete = True
        body = encode_event(event) + (b"" if is_message else DONE)
        await self.direct({"type": "http.response.body", "body": body, "more_body": False})


class Calls:
    """The running calls of a server whose engines are in other processes. Args: state: counts them."""

    def __init__(self, state: ServerState):
        self.state, self.stopping = state, False
        self._tasks: set[asyncio.Task] = set()

    async def run(self, work: Coroutine[Any, Any, None], reply: Reply, receive: Receive, counts: bool = True) -> None:
        """Run a call, unless its client goes away.

        Args:
            work: sends the reply. May raise ApiError at any time.
            counts: whether the server waits for this call before it ends.
        Raises: ApiError if the client has received nothing.
        """
        task, gone = asyncio.create_task(self._run(work, reply)), asyncio.create_task(until_gone(receive))
        self._tasks.add(task)
        self.state.num_active += counts
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if reply.complete:  # clients close the connection then
                await asyncio.wait((task,), timeout=SECONDS_TO_STOP)
            self.state.num_disconnects += not task.done()
        finally:
            self._tasks.discard(task)
            self.state.num_active -= counts
            for each in (task, gone):
                each.cancel()
            await asyncio.wait((task, gone))
        if not task.cancelled():
            await task

    async def stop(self) -> None:
        """End the calls that still run with an error."""
        self.stopping = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=SECONDS_TO_STOP)  # not for clients that do not read

    async def _run(self, work: Coroutine[Any, Any, None], reply: Reply) -> None:
        try:
            await work
        except ApiError as error:
            await reply.fail(error)
        except asyncio.CancelledError:
            if not self.stopping:
                raise
            await reply.fail(ApiError(503, "the server has been shut down", code="shutting_down", retry_after=30))
        except OSError:  # the connection has broken
            pass
        except Exception:  # the engine's process has logged its own as well
            logger.exception(f"{reply.path}: failed")
            await reply.fail(internal_error())
