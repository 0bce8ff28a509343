"""Calls of a server's HTTP API. Every failure of a connection raises a ServerError with a one-line message.

This is the standard library's client, since others take longer to import than a server takes to answer. Each call has a
connection of its own, which another thread can close. Proxies are not used.
"""

import contextlib
import http.client
import json
import socket
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanopage.files import local_servers

CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 600.0  # a server that sends nothing for this long counts as gone
MAX_BYTES = 16 << 20  # of a reply that is no stream, and of a line of a stream
MAX_MESSAGE = 500  # characters of a server's error


class ServerError(ConnectionError):
    """A server cannot be reached, has refused a call, or has failed. `status`: HTTP's, if it has answered."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Server:
    """A server of OpenAI's API."""

    url: str  # where the API is, such as http://localhost:8000/v1, without a slash at the end
    key: str | None = None
    socket: Path | None = None  # the Unix socket on which it listens; None: it listens at `url`

    @classmethod
    def at(cls, url: str, key: str | None) -> "Server":
        """The server at a URL, which may lack /v1. Raises: ValueError for what is not such a URL."""
        try:
            parts = urllib.parse.urlsplit(url)
            fits = parts.scheme in ("http", "https") and parts.hostname and not parts.query and not parts.fragment
            wrong = not fits or parts.port == 0 or any(not " " < each <= "~" for each in url)
            (parts.hostname or "").encode("idna")
        except ValueError:  # the port or the name
            wrong = True
        if wrong:
            raise ValueError(f"--url {url}: not a URL such as http://localhost:8000/v1")
        if "@" in parts.netloc:
            raise ValueError("--url has a user name or a password: give the key with --api-key")
        if key is not None and not (key and key.isascii() and key.isprintable()):
            raise ValueError("the API key is empty, or has characters that no key has")
        return cls(f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}", key)

    @property
    def where(self) -> str:
        """The server, for the user."""
        return self.url if self.socket is None else "the nanopage server that runs here"

    def get(self, path: str, seconds: float = CONNECT_SECONDS) -> Any:
        """The JSON of a reply. Raises: ServerError."""
        with contextlib.closing(Call(self, path, silence=seconds)) as call:
            return call.json()

    def post(self, path: str, body: dict) -> Any:
        """The JSON of the reply to a JSON body. Raises: ServerError."""
        with contextlib.closing(Call(self, path, body)) as call:
            return call.json()

    def answers(self, path: str, seconds: float) -> bool:
        """Whether a call succeeds within this time."""
        with contextlib.closing(Call(self, path, silence=seconds)) as call:
            return call.succeeds()

    def connect(self) -> http.client.HTTPConnection:
        """A new connection. Raises: OSError."""
        parts = urllib.parse.urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.netloc, timeout=CONNECT_SECONDS)
        if self.socket is None:
            connection.connect()
        else:
            connection.sock = local_servers.connect(self.socket, CONNECT_SECONDS)
        return connection


class Call:
    """One call. It begins when it is first read.

    Args:
        path: in the API, or beside it if it begins with "../".
        body: JSON to post; None makes it a GET.
        silence: seconds to wait for the next byte.
    """

    def __init__(self, server: Server, path: str, body: dict | None = None, silence: float = SILENCE_SECONDS):
        self.server, self.body, self.silence = server, body, silence
        self.url = urllib.parse.urljoin(f"{server.url}/", path)
        self.stopped = False
        self._socket: socket.socket | None = None
        self._response: http.client.HTTPResponse | None = None

    def json(self) -> Any:
        """The reply. Raises: ServerError."""
        with self._errors():
            return json.loads(self._begin().read(MAX_BYTES))

    def succeeds(self) -> bool:
        """Whether the reply begins, and is no error."""
        with contextlib.suppress(ServerError), self._errors():
            self._begin()
            return True
        return False

    def events(self) -> Iterator[bytes]:
        """The data of server-sent events, up to `[DONE]`. Raises: ServerError, also for an end without it."""
        with self._errors():
            response = self._begin()
            if (kind := response.headers.get_content_type()) != "text/event-stream":
                raise ServerError(f"{self.server.where} does not stream: it answers with {kind}")
            while line := response.readline(MAX_BYTES):
                if line.startswith(b"data:"):
                    if (data := line[5:].strip()) == b"[DONE]":
                        return
                    yield data
            raise http.client.IncompleteRead(b"")

    def stop(self) -> None:
        """End the call, from another thread, even while it is read."""
        self.stopped = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # without TLS's farewell

    def close(self) -> None:
        if self._response is not None:
            self._response.close()
        if self._socket is not None:
            self._socket.close()

    def _begin(self) -> http.client.HTTPResponse:
        """Send the call, and read the head of the reply."""
        connection = self.server.connect()
        self._socket = connection.sock
        self._socket.settimeout(self.silence)
        if self.stopped:
            raise ConnectionAbortedError
        headers = {"Content-Type": "application/json"}
        if self.server.key is not None:
            headers["Authorization"] = f"Bearer {self.server.key}"
        path = urllib.parse.urlsplit(self.url).path
        if self.body is None:
            connection.request("GET", path, headers=headers)
        else:
            connection.request("POST", path, json.dumps(self.body).encode(), headers)
        self._response = connection.getresponse()
        if self._response.status != 200:
            raise self._refusal(self._response)
        return self._response

    def _refusal(self, response: http.client.HTTPResponse) -> ServerError:
        """The error that a server answers with."""
        text = response.read(MAX_BYTES).decode(errors="replace")
        with contextlib.suppress(ValueError, RecursionError):
            text = message_of(json.loads(text))
        text = " ".join(text.split())[:MAX_MESSAGE]
        if not text or text.startswith("<"):  # HTML
            text = response.reason
        if location := response.headers.get("Location"):
            text = f"it has moved to {location}"
        if response.status == 401 and self.server.key is None:
            text += " (--api-key)"
        if (seconds := response.headers.get("Retry-After", "")).isdecimal():
            text += f"; try again in {seconds} s"
        return ServerError(f"{self.server.where} answers {response.status}: {text}", response.status)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn any failure into a ServerError."""
        where = self.server.where
        try:
            yield
        except ServerError:
            raise
        except TimeoutError:
            limit = CONNECT_SECONDS if self._socket is None else self.silence
            raise ServerError(f"{where} has sent nothing for {limit:g} s") from None
        except http.client.HTTPException:
            raise ServerError(f"{where} has broken off the connection") from None
        except OSError as error:
            reason = error.strerror or str(error) or type(error).__name__
            broke = self._response is not None
            raise ServerError(f"{where} {'broke off' if broke else 'cannot be reached'}: {reason}") from None
        except (ValueError, RecursionError):
            raise ServerError(f"{where} answers with what is not JSON") from None


def message_of(reply: Any) -> str:
    """The message of a server's error: {"error": {"message"}}, or what other servers write."""
    for name in ("error", "message", "detail"):
        if isinstance(reply, dict) and reply.get(name) is not None:
            return message_of(reply[name])
    return reply if isinstance(reply, str) else json.dumps(reply)
