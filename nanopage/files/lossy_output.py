"""Output that never stops a program: what stdout and stderr do not take at once is lost.

A server and its workers write to a pipe that nobody reads, a full disk or a terminal that is gone as to any other file.
"""

import contextlib
import io
import os
import select
import stat
import sys


class _Lossy(io.RawIOBase):
    """A descriptor that takes everything: what would block or fail is dropped."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        view = memoryview(data).cast("B")
        with contextlib.suppress(OSError):  # a pipe that takes a byte takes a whole piece
            for start in range(0, len(view), select.PIPE_BUF):
                if not self._poll.poll(0):
                    break
                os.write(self._descriptor, view[start : start + select.PIPE_BUF])
        return len(view)


def lose_output() -> None:
    """From now on, neither this process nor those that it starts wait for stdout or stderr, or fail because of them."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        with contextlib.suppress(OSError):  # it is closed
            _unblock(descriptor)
            file = io.TextIOWrapper(_Lossy(descriptor), "utf-8", "backslashreplace", line_buffering=True)  # type: ignore[type-var]
            setattr(sys, name, file)


def _unblock(descriptor: int) -> None:
    """Open a pipe or a terminal again without blocking, for C code. Other programs share the old open file."""
    if not (stat.S_ISFIFO(os.fstat(descriptor).st_mode) or os.isatty(descriptor)):
        return
    with contextlib.suppress(OSError):  # no /proc, another user's terminal, a pipe that nobody can read any more
        again = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        os.dup2(again, descriptor)
        os.close(again)
