"""Connection: uvicorn's HTTP protocol with limits on the head of a request and on slow readers, without pipelining.

uvicorn does not limit headers when httptools parses them. Of pipelined requests, it would not notice that the client
of the first has gone.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 64 << 10  # bytes of the request line and the headers
HEAD_SECONDS = 30.0  # for a head to arrive, once a connection is open or a request has begun
READ_SECONDS = 120.0  # for the buffer of what is sent to drain, once it is full


class Connection(HttpToolsProtocol):
    """Closes the connection of a client whose request has a head that is too large or too slow, or is pipelined, and of
    a client that does not read its reply."""

    _parsed = 0  # bytes of the URL and of the headers that are complete
    _received = 0  # bytes of reads that ended within the head
    _in_head = True
    _timer: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None  # runs while the client does not read

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._end_stall()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._end_stall()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._received += len(data)
            if self._received > MAX_HEAD:
                self.transport.close()

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:  # pipelined
            self.transport.close()
        super().on_message_begin()
        self._begin_head()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._parsed += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._parsed += len(name) + len(value)

    def on_headers_complete(self) -> None:
        self._end_head()
        if self._parsed > MAX_HEAD:
            self.transport.close()
        if not self.transport.is_closing():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.transport.is_closing():
            super().on_message_complete()

    def _begin_head(self) -> None:
        self._end_head()
        self._parsed, self._received, self._in_head = 0, 0, True
        self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _end_head(self) -> None:
        self._in_head = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_stall(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
