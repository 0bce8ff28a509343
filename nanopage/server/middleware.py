"""Gate: what every HTTP call passes through before FastAPI sees it.

Gate checks the key (if the server has one, all but a few paths need it) and the Host header. It reads the whole body
within limits of size and time, and bounds the sum of all bodies. It echoes X-Request-Id, and counts and logs replies.
"""

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanopage.files.json_log import REQUEST_ID
from nanopage.server.errors import ApiError

access = logging.getLogger("nanopage.access")
access.setLevel(logging.WARNING)  # --log-format json has a line for each reply

MAX_BODY = 4 << 20  # bytes. FastAPI parses a body on the event loop
AUDIO_PATHS = {"transcribe": "/v1/audio/transcriptions", "translate": "/v1/audio/translations"}  # by their tasks
MAX_AUDIO = (25 << 20) + (64 << 10)  # bytes of a body there: OpenAI's limit for a file, and the form around it
MAX_BODY_WITH_IMAGES = 32 << 20  # a long string takes the parser little time
MAX_ARRIVING = 64 << 20  # bytes of all bodies that have not arrived whole
MAX_BODIES = 256 << 20  # bytes of all bodies whose calls have not ended
SMALL_BODY = 64 << 10  # bytes: accepted whatever these sums are, so that large bodies do not keep small ones out
BODY_SECONDS = 60.0  # for the whole body to arrive
PROBES = ("/health", "/ping", "/metrics")  # have no line in the log if all is well
MAX_PATH = 200  # characters of a path in the log
OPEN_PATHS = ("/", "/health", "/ping")  # need no key: the chat page has no data of its own
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
# As browsers write it: in lower case, without the port that the scheme implies.
ORIGIN = re.compile(r"\*|(?!http://.*:80$)(?!https://.*:443$)[a-z][a-z0-9+.-]*://[^\sA-Z/?#@*,]+")
# Headers of replies that pages of other origins may read.
READABLE_HEADERS = ("retry-after", "x-ignored-fields", "x-request-id", "x-should-retry")


@dataclass(eq=False)
class Gate:
    """ASGI middleware."""

    app: ASGIApp
    api_keys: Sequence[str]  # any of these is accepted; empty: no key is needed
    # Host headers that are answered, without ports. A web page can make a browser send requests to a local server under
    # the page's own host name (DNS rebinding). Empty: any host, which is safe where a key is needed.
    hosts: Sequence[str]
    replies: Counter[tuple[str, str, str]]  # counts (method, path, status) of replies
    paths: Sequence[str]  # which `replies` tells apart; all others are counted as "other"
    open_paths: Sequence[str] = OPEN_PATHS  # need no key
    root_path: str = ""  # a prefix, such as /llm, that paths may have; a reverse proxy may remove or keep it
    images: Callable[[], bool] = lambda: False  # whether bodies may have images, which are large
    num_arriving: int = 0  # bytes
    num_held: int = 0  # bytes

    def __post_init__(self) -> None:
        self.digests = [hashlib.sha256(key.encode()).digest() for key in self.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # a WebSocket
            await send({"type": "websocket.close", "code": 1008})
            return
        root = self.root_path
        path = scope["path"][len(root) :] if f"{scope['path']}/".startswith(f"{root}/") else scope["path"]
        path = path or "/"
        scope["root_path"], scope["path"] = root, root + path
        headers = dict(scope["headers"])
        request_id, started = headers.get(b"x-request-id", b""), time.perf_counter()
        is_echoed = re.fullmatch(rb"[\w.:/+=-]{1,128}", request_id) is not None
        REQUEST_ID.set(request_id.decode() if is_echoed else uuid.uuid4().hex)
        status = "none"

        async def reply(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
                if is_echoed:
                    message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            self._check_host(headers)
            scope["nanopage.key"] = self._check_key(path, headers)
            # Open paths take no body: a body that is sent nevertheless is not read.
            body = b"" if path in self.open_paths else await self._read_body(path, headers, receive)
            if body is not None:
                num_bytes = len(body)
                _check_room(num_bytes, self.num_held + num_bytes, MAX_BODIES)
                self.num_held += num_bytes
                try:
                    scope["nanopage.send"] = send
                    receive, body = _replay(body, receive), None
                    await self.app(scope, receive, reply)
                finally:
                    self.num_held -= num_bytes
        except ApiError as error:
            await error.response(path)(scope, receive, reply)
        finally:
            method = scope["method"] if scope["method"] in ("GET", "POST") else "other"
            self.replies[method, path if path in self.paths else "other", status] += 1
            if access.isEnabledFor(logging.INFO) and not (path in PROBES and status == "200"):
                _log(scope, path, status, time.perf_counter() - started)

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        host = re.sub(r":\d+$", "", headers.get(b"host", b"").decode("latin-1")).lower()
        if self.hosts and not self.digests and host not in self.hosts:
            message = "the Host header names another host: start the server with --allowed-host"
            raise ApiError(403, message, code="host_not_allowed")

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> str:
        """A name for the client's key; empty if no key is needed. Raises: ApiError."""
        if not self.digests or path in self.open_paths:
            return ""
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        given = [key] if scheme.lower() == b"bearer" else []
        given += [headers[b"x-api-key"]] if b"x-api-key" in headers else []  # Anthropic's clients send it
        digests = [hashlib.sha256(key.strip()).digest() for key in given]
        # Compare all keys, so that the time reveals nothing.
        matches = [digest for digest in digests for known in self.digests if hmac.compare_digest(digest, known)]
        if not matches:
            message = "the API key is missing or wrong (Authorization: Bearer KEY, or x-api-key: KEY)"
            raise ApiError(401, message, code="invalid_api_key")
        return matches[0].hex()[:16]

    async def _read_body(self, path: str, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """The whole body; None if the client has gone. Raises: ApiError if it is too large or too slow, or if too much
        is arriving."""
        length = headers.get(b"content-length", b"0")
        most = MAX_AUDIO if path in AUDIO_PATHS.values() else MAX_BODY_WITH_IMAGES if self.images() else MAX_BODY
        if not length.isdigit() or len(length) > 20 or int(length) > most:
            raise _too_large(most)
        _check_room(int(length), self.num_arriving + int(length), MAX_ARRIVING)
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    body += part
                    self.num_arriving += len(part)
                    if len(body) > most:
                        raise _too_large(most)
                    if not message.get("more_body", False):
                        return bytes(body)
                    _check_room(len(body), self.num_arriving, MAX_ARRIVING)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s", code="timeout") from None
        finally:
            self.num_arriving -= len(body)


def _log(scope: Scope, path: str, status: str, seconds: float) -> None:
    """Log a reply. If its call was queued, the route has said how it has ended."""
    method, path = scope["method"], path[:MAX_PATH]
    fields = {"method": method, "path": path, "status": int(status) if status.isdigit() else None}
    fields |= {"duration": round(seconds, 6)} | scope.get("nanopage.call", {})
    access.info(f"{method} {path} {status}", extra={"fields": fields})


def share_with(origins: Sequence[str], app: ASGIApp) -> ASGIApp:
    """An application that pages of these origins may call from a browser (CORS), with a key where it needs one. It
    answers their preflights, which have no key, itself.

    Args: origins: as ORIGIN describes. "*": all. Empty: no other origin may.
    """
    if not origins:
        return app
    return CORSMiddleware(app, origins, ("GET", "POST"), ("*",), expose_headers=READABLE_HEADERS)


def _check_room(size: int, total: int, most: int) -> None:
    """Raises: ApiError if there is no room for another body of this size."""
    if size > SMALL_BODY and total > most:
        message = f"the bodies of other calls take {most >> 20} MiB: try again, or send at most {SMALL_BODY >> 10} KiB"
        raise ApiError(503, message, code="too_many_bodies", retry_after=1)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most >> 20} MiB", code="body_too_large")


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that first returns a body that has already been read, and then whatever else arrives."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
