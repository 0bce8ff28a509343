"""Connection: uvicorn's HTTP protocol with limits on what a client sends and on slow readers, without pipelining.

httptools keeps headers and trailers, and uvicorn does not limit them. With pipelined requests, uvicorn would not notice
that the client of the first one has gone. Gate, which reads the bodies, limits their size.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 64 << 10  # bytes of the request line and the headers
HEAD_SECONDS = 30.0  # for a head to arrive, once a connection is open or a request has begun
MAX_FRAMING = 2 * MAX_HEAD  # bytes of chunk headers and trailers that a request may have, plus an eighth of its body
LINGER_SECONDS = 5.0  # for the rest of a request to arrive that has been answered already
READ_SECONDS = 120.0  # for a full send buffer to drain


class Connection(HttpToolsProtocol):
    """Closes the connection if the request's head is too large or too slow, if there is too much around its body, if it
    does not end once it has been answered, if it is pipelined, or if the client does not read its reply."""

    _parsed = 0  # bytes of the URL and of the headers that are complete
    _received = 0  # bytes of all reads that ended within the head
    _in_head = True
    _is_whole = False  # the request has arrived
    _num_body = 0  # bytes of its body so far
    _num_other = 0  # bytes other than body in the reads that had any
    _timer: asyncio.TimerHandle | None = None  # for the head, or for the rest of a request that has been answered
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
        num_body = 0 if self._is_whole else self._num_body  # of the request that the bytes belong to
        super().data_received(data)
        if self._in_head:
            self._received += len(data)
            if self._received > MAX_HEAD:
                self.transport.close()
        elif not self._is_whole:
            self._num_other += len(data) - max(0, self._num_body - num_body)
            if self._num_other > MAX_FRAMING + self._num_body // 8:
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
        if not self._in_head:
            return  # a trailer
        super().on_header(name, value)
        self._parsed += len(name) + len(value)

    def on_headers_complete(self) -> None:
        self._end_head()
        if self._parsed > MAX_HEAD:
            self.transport.close()
        if not self.transport.is_closing():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_body += len(body)
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_whole = True
        self._end_timer()
        if not self.transport.is_closing():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_whole or self.transport.is_closing():
            return
        if self.expect_100_continue and not self._num_body:  # the client may no longer send the body
            self.transport.close()
        elif self._timer is None:  # closing at once could lose the reply to a client that still sends
            self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _begin_head(self) -> None:
        self._end_head()
        self._parsed, self._received, self._in_head = 0, 0, True
        self._is_whole, self._num_body, self._num_other = False, 0, 0
        self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _end_head(self) -> None:
        self._in_head = False
        self._end_timer()

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_stall(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
