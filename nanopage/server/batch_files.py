"""The files of `nanopage run-batch`, in the form of OpenAI's Batch API.

A line of the input is a request; a line of the output is what has become of it, with the number of the input's line in
its `id`. So a run that was stopped goes on where it was, whatever the order of the output.
"""

import contextlib
import itertools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from nanopage.server.middleware import MAX_BODY_WITH_IMAGES

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/score", "/v1/rerank")
MAX_LINE = MAX_BODY_WITH_IMAGES + (64 << 10)  # bytes: the largest body, and what is around it
START = b'{"id":"batch_req_'  # of each line of the output
PIECE = 1 << 20  # bytes that are read at once of a line that is too long


class LineError(Exception):
    """A line that is no request. Args: code: what a program can test."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """A line of the input. `body` is the JSON of the request."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw

    def check(self) -> None:
        """Raises: LineError for what the server would not take, and for a stream."""
        if self.method != "POST":
            raise LineError("invalid_method", f"method must be POST, got {self.method[:20]!r}")
        if self.url not in URLS:
            raise LineError("invalid_url", f"url must be one of {', '.join(URLS)}, got {self.url[:100]!r}")
        with contextlib.suppress(msgspec.DecodeError):  # the server says what is wrong with the body
            if msgspec.json.decode(self.body, type=_Streamed).stream is True:
                raise LineError("invalid_body", "stream=true is not supported: each line has one reply")


class _Streamed(msgspec.Struct):
    stream: Any = None


class _Named(msgspec.Struct):
    custom_id: str | None = None


class _Response(msgspec.Struct):
    status_code: int


class Answered(msgspec.Struct):
    """A line of the output, without the reply itself."""

    id: str
    custom_id: str | None
    response: _Response | None

    @property
    def failed(self) -> bool:
        return self.response is None or self.response.status_code != 200


def read_line(text: bytes) -> Line:
    """A line of the input. Raises: LineError."""
    if len(text) > MAX_LINE:
        raise LineError("line_too_long", f"the line is longer than {MAX_LINE >> 20} MiB")
    try:
        line = msgspec.json.decode(text, type=Line)
        line.check()
        return line
    except (ValueError, RecursionError) as error:  # msgspec's, and for what is not UTF-8
        raise LineError("invalid_line", f"the line is not a request: {str(error)[:300]}") from None


def name_of(text: bytes) -> str | None:
    """The custom_id of a line that is no request, if it can be read."""
    try:
        return msgspec.json.decode(text, type=_Named).custom_id
    except (ValueError, RecursionError):
        return None


def read_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Each line with its number, from 1. Empty lines are left out, and the end of a line that is too long is cut."""
    for number in itertools.count(1):
        if not (line := file.readline(MAX_LINE + 1)):
            return
        piece = line
        while len(line) > MAX_LINE and piece and not piece.endswith(b"\n"):
            piece = file.readline(PIECE)
        if line.strip():
            yield number, line


def open_input(name: str) -> BinaryIO:
    """The input; "-" is stdin. Raises: OSError."""
    # Not sys.stdin.buffer: Python's exit would wait for a thread that still reads it.
    return open(0, "rb", closefd=False) if name == "-" else open(Path(name).expanduser(), "rb")


class OutputFile:
    """The output, which only one process writes.

    Args: name: a file; "-" is stdout. What an earlier run has left there stays, except a last line that is not whole.

    done: the lines of the input that an earlier run has answered, with their custom_ids.
    num_failed: how many of them have an error.

    Raises: ValueError for a file that is not the output of a batch; OSError.
    """

    def __init__(self, name: str):
        self.name, self.num_failed = name, 0
        self.done: dict[int, str | None] = {}
        if name == "-":
            self.file: BinaryIO = sys.stdout.buffer
            return
        path = Path(name).expanduser()
        is_device = path.exists() and not path.is_file()  # or a pipe
        flags = os.O_WRONLY if is_device else os.O_RDWR | os.O_CREAT
        self.file = os.fdopen(os.open(path, flags, 0o666), "wb" if is_device else "r+b")
        if is_device:
            return
        try:
            self._lock()
            self._read_earlier()
        except BaseException:
            self.file.close()
            raise

    def _lock(self) -> None:
        with contextlib.suppress(ImportError):  # Windows
            import fcntl

            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"another process writes to {self.name}") from None

    def _read_earlier(self) -> None:
        end = 0
        for number, text in enumerate(self.file, 1):
            if not text.endswith(b"\n") and text.startswith(START[: len(text)]):
                break
            end += len(text)
            try:
                answered = msgspec.json.decode(text, type=Answered)
                match = re.fullmatch(r"batch_req_(\d{1,18})", answered.id)
            except ValueError:
                match = None
            if match is None:
                raise ValueError(f"{self.name}: line {number} was not written by run-batch: give another --output-file")
            self.done[int(match[1])] = answered.custom_id
            self.num_failed += answered.failed
        self.file.seek(end)
        self.file.truncate()

    def write(self, number: int, custom_id: str | None, response: dict | None, error: dict | None) -> None:
        """Add what has become of a line. Raises: OSError."""
        line = {"id": f"batch_req_{number}", "custom_id": custom_id, "response": response, "error": error}
        self.file.write(msgspec.json.encode(line) + b"\n")
        self.file.flush()

    def close(self) -> None:
        if self.name != "-":
            self.file.close()
