"""Listening sockets, and Listener, which accepts connections only while file descriptors are left.

When a process has no descriptor left, uvloop closes the waiting connections, and their clients read a reset (libuv's
uv__emfile_trick). Here, waiting connections stay in the kernel's queue until others have ended. A few descriptors are
held in reserve, so that running requests can still open files and start processes.
"""

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger("nanopage")

BACKLOG = 2048  # connections in the kernel's queue; the kernel may set a lower limit (net.core.somaxconn)
RESERVE = 16  # file descriptors that connections leave to others
SECONDS_TO_WAIT = 0.05  # before a listener without descriptors looks again
WANTED = 65536  # the limit of file descriptors to ask for


def raise_limit() -> int:
    """Raise the limit of open files to the most that this process may have, up to WANTED. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if soft == resource.RLIM_INFINITY else soft


def listen(host: str, port: int, uds: str | None) -> list[socket.socket]:
    """Sockets that listen at all addresses of `host`, or at the path `uds`. Raises: ValueError."""
    try:
        return [listen_at_path(uds)] if uds else _listen_at(host, port)
    except OSError as error:
        name = f"--uds {uds}" if uds else f"--host {host} --port {port}"
        raise ValueError(f"{name}: {error.strerror or error}") from None


def listen_at_path(path: str, mode: int = 0o666) -> socket.socket:
    """A listening socket. It gets the mode of a socket that was left at the path, or else `mode`. Raises: OSError."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(found := os.stat(path).st_mode):  # left by a server that has ended
            mode = stat.S_IMODE(found)
            os.remove(path)
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(path)
    os.chmod(path, mode)
    sock.listen(BACKLOG)
    return sock


def _listen_at(host: str, port: int) -> list[socket.socket]:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets, missing = [], OSError(f"{host} has no address")
    for family, _, _, _, address in dict.fromkeys(found):
        try:
            sockets.append(socket.create_server(address, family=family, backlog=BACKLOG))
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):  # such as ::1 on a machine without IPv6
                raise
            missing = error
    if not sockets:
        raise missing
    return sockets


@dataclass(eq=False)
class Listener:
    """Accepts the connections of a socket, with the methods of `asyncio.Server` that uvicorn calls."""

    sock: socket.socket
    make_protocol: Callable[[], asyncio.Protocol]  # makes the asyncio protocol of a connection
    tls: ssl.SSLContext | None
    limit: int  # of the process's file descriptors
    check: Callable[[socket.socket], None] = lambda sock: None  # raises PermissionError for one that is not accepted

    def __post_init__(self) -> None:
        self.sockets = [self.sock]  # for uvicorn
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task] = set()
        self._has_warned = False
        self.sock.setblocking(False)
        self._watch()

    def close(self) -> None:
        self._loop.remove_reader(self.sock)
        self.sock.close()

    async def wait_closed(self) -> None:
        """Nothing is left after `close`."""

    def _watch(self) -> None:
        if self.sock.fileno() >= 0:
            self._loop.add_reader(self.sock, self._accept)

    def _accept(self) -> None:
        try:
            descriptor = os.dup(self.sock.fileno())  # the lowest number that is free
            os.close(descriptor)
            if descriptor >= self.limit - RESERVE:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            connection, _ = self.sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # this process or the system has no descriptor left
            if not self._has_warned:
                self._has_warned = True
                logger.warning(f"connections wait: {error.strerror} (the limit is {self.limit}: ulimit -n)")
            self._loop.remove_reader(self.sock)
            self._loop.call_later(SECONDS_TO_WAIT, self._watch)
            return
        task = self._loop.create_task(self._open(connection))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            self.check(connection)
            await self._loop.connect_accepted_socket(self.make_protocol, connection, ssl=self.tls)
        except OSError:  # the client has gone, is not accepted, or does not speak TLS
            connection.close()
