"""ModelProcess: `nanopage serve` with one model in a process of its own (one_model.py), on a Unix socket."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil

import nanopage
from nanopage.files.json_log import JSON_LOG
from nanopage.server.errors import ApiError, internal_error
from nanopage.server.relay import ENGINE_DEAD, ERROR, Call, Reply

logger = logging.getLogger("nanopage")

LOOK_SECONDS = 0.1  # between checks whether the model is loaded
HEALTH_SECONDS = 10.0  # between checks of a process that has calls, and for an answer
SECONDS_TO_END = 10.0  # after SIGTERM
MAX_LINE = 1 << 20  # bytes of a line of the log
# Headers of a connection, not of a reply, and one that every server adds.
OF_CONNECTIONS = (b"connection", b"keep-alive", b"transfer-encoding", b"date")


@dataclass(eq=False)
class ModelProcess:
    """A server with one model."""

    name: str  # of the model, for messages
    command: list[str]  # the program and its arguments
    options: dict[str, Any]  # of `nanopage serve`, as in `run`: what the program reads from its stdin
    key: str  # one that the process accepts; "" if it needs none
    num_bytes: int  # the memory that it is assumed to need
    ready: bool = False  # whether it takes calls; whoever starts it sets this

    def __post_init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._log: asyncio.Task | None = None
        self._last_lines: deque[str] = deque(maxlen=1)
        # A new connection for each call: one that is kept could be closed while a call is sent through it.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        transport = httpx2.AsyncHTTPTransport(verify=False, uds=self.options["uds"], limits=limits)
        timeout = httpx2.Timeout(None, connect=HEALTH_SECONDS)
        self._client = httpx2.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=timeout, trust_env=False
        )

    async def start(self) -> None:
        """Start the process, and wait until the model is loaded. Raises: RuntimeError saying why it could not be."""
        self._process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            limit=MAX_LINE,
            env=environment(),
            start_new_session=True,  # Ctrl-C is for the server in front
        )
        self._log = asyncio.create_task(self._read_log())
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # the process has ended already
            self._process.stdin.write(json.dumps(self.options).encode() + b"\n")
            await self._process.stdin.drain()
        while not await self.is_healthy():
            if self._process.returncode is not None:
                await asyncio.wait((self._log,), timeout=1)
                raise RuntimeError(f"{self._how_ended()}: {''.join(self._last_lines) or 'it has said nothing'}")
            await asyncio.sleep(LOOK_SECONDS)

    async def is_healthy(self) -> bool:
        """Whether the model is loaded, its engine lives, and no step hangs."""
        with contextlib.suppress(httpx2.TransportError):
            return (await self.get("/health")).status_code == 200
        return False

    async def get(self, path: str) -> httpx2.Response:
        """A call of this server's own. Raises: httpx2.TransportError."""
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        return await self._client.get(path, headers=headers, timeout=HEALTH_SECONDS)

    async def card(self) -> dict:
        """The model's entry in /v1/models. Raises: httpx2.TransportError."""
        return (await self.get("/v1/models")).json()["data"][0]

    async def watch(self, has_calls: Callable[[], bool]) -> str:
        """Wait until the process has ended. A process that has calls and is not healthy is killed. Returns: how it has
        ended."""
        assert self._process is not None
        ended = asyncio.ensure_future(self._process.wait())
        try:
            while not (await asyncio.wait((ended,), timeout=HEALTH_SECONDS))[0]:
                if has_calls() and not await self.is_healthy():
                    logger.warning(f"{self.name}: its process is not healthy, and is killed")
                    self.kill()
        finally:
            ended.cancel()
        return self._how_ended()

    def measure(self) -> int:
        """Bytes that become free when the process ends with those that it has started. Takes milliseconds."""
        used = 0
        for process in self._tree():
            with contextlib.suppress(psutil.Error):  # it has ended
                used += process.memory_full_info().uss
        return used

    async def stop(self) -> None:
        """End the process, and wait until its memory is free."""
        self.ready = False
        if self._process is not None:
            others = self._tree()[1:]
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), SECONDS_TO_END)
            except TimeoutError:
                self.kill()
                await self._process.wait()
            for process in (await asyncio.to_thread(psutil.wait_procs, others, 1))[1]:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        if self._log is not None:  # the last lines may still be on their way
            await asyncio.wait((self._log,), timeout=1)
            self._log.cancel()
        await self._client.aclose()
        with contextlib.suppress(OSError):
            os.remove(self.options["uds"])

    def kill(self) -> None:
        """Kill the process and those that it has started, whatever they do."""
        for process in self._tree():
            with contextlib.suppress(psutil.Error):
                process.kill()

    async def forward(self, call: Call, reply: Reply) -> None:
        """Run a call. Raises: ApiError, also if the process ends before the reply does."""
        request = self._client.build_request(call.method, call.path, headers=call.headers, content=call.body)
        try:
            async with contextlib.aclosing(await self._client.send(request, stream=True)) as response:
                headers = [item for item in response.headers.raw if item[0].lower() not in OF_CONNECTIONS]
                if response.headers.get("content-type", "").startswith("text/event-stream"):
                    await reply.begin(response.status_code, headers)
                    await self._send_events(response, reply)
                    return
                body = await response.aread()
                if response.status_code == 503 and ENGINE_DEAD in body:
                    self.kill()
                if reply.begun:
                    raise error_of(response.status_code, body)
                await reply.send_whole(response.status_code, headers, body)
        except httpx2.TransportError as error:
            if not reply.complete:
                logger.warning(f"{self.name}: {reply.path}: lost ({type(error).__name__})")
                again = int(isinstance(error, httpx2.ConnectError))  # the process never had the call
                message = f"the process of the model {self.name!r} has died"
                raise ApiError(503, message, code="model_died", retry_after=again) from None

    async def _send_events(self, response: httpx2.Response, reply: Reply) -> None:
        rest = b""
        async for part in response.aiter_raw():
            events, end, rest = (rest + part).rpartition(b"\n\n")
            if end:
                await reply.send_events(events + end)
            if ENGINE_DEAD in events and any(event.startswith(ERROR) for event in events.split(b"\n\n")):
                self.kill()
        if not reply.complete:
            raise internal_error()

    def _tree(self) -> list[psutil.Process]:
        """The process and its workers, which are all in its session. Compiling processes have sessions of their own:
        they go on when the process ends, for its next start, and run with a low priority."""
        if self._process is None or self._process.returncode is not None:  # not started, or its id may be another's
            return []
        found: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self._process.pid)
            found = [process, *process.children(recursive=True)]
        return [each for each in found if _session_of(each.pid) == self._process.pid]

    def _how_ended(self) -> str:
        assert self._process is not None
        code = self._process.returncode or 0
        return f"its process was killed by {signal.Signals(-code).name}" if code < 0 else f"its process ended ({code})"

    async def _read_log(self) -> None:
        """Log what the process writes, with the model's name."""
        assert self._process is not None and self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # longer than MAX_LINE
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip().removeprefix("nanopage: ")
            if text and not text.startswith("ready: "):  # which names the socket
                logger.info(f"{self.name}: {text}")
                self._last_lines.append(text)


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:  # it has ended
        return -1


def environment() -> dict[str, str]:
    """The environment of a process that imports this nanopage, and nothing from the current directory."""
    paths = [str(Path(nanopage.__file__).parents[1]), *filter(os.path.isabs, sys.path)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", JSON_LOG: ""}


def error_of(status: int, body: bytes) -> ApiError:
    """The error in a reply of the server."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        error = json.loads(body)["error"]
        code = error.get("code") or error.get("details", {}).get("error_code")
        return ApiError(status, error["message"], param=error.get("param"), code=code)
    return internal_error()
