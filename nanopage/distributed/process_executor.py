"""ProcessExecutor: a process for each worker. Every worker gets every Batch; the worker that samples sends the results.

A worker that dies, hangs or raises leaves the others waiting for it, so all workers end, and the error names the first.
"""

import contextlib
import itertools
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing import Pipe, connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

import nanopage
from nanopage.config.model import ModelConfig
from nanopage.config.options import EngineConfig
from nanopage.cpu.threads import default_threads
from nanopage.distributed import messages
from nanopage.distributed.division import divide, layers_of_stage
from nanopage.step import Batch, BatchResult, Capacity, WorkerDiedError

logger = logging.getLogger("nanopage")

PING_SECONDS = 1.0  # between pings while the executor waits
START_LIMIT, STEP_LIMIT = 120.0, 10.0  # seconds in which a worker must answer a ping: while it loads, and later
STOP_SECONDS = 5.0  # for a step to end, at shutdown
CAUSE_SECONDS = 2.0  # to find the worker whose end made another one fail
SMALL = 2**14  # bytes of a message that always fit into the buffer of a connection
ERRORS: dict[str, type[Exception]] = {
    "ValueError": ValueError,
    "MemoryError": MemoryError,
    "FileNotFoundError": FileNotFoundError,
    "TypeError": TypeError,
}  # that a start or a call may raise
M = TypeVar("M", messages.Measured, messages.Ready, messages.Called)


class Link(Protocol):
    """A worker process and the connection to it: `ProcessLink`, or the links of ray_link.py."""

    connection: connection.Connection
    local_rank: int  # its GPU, if it has one

    def ended(self) -> str | None:
        """How the process has ended; None while it runs."""

    def kill(self) -> None:
        """End the process now, whatever it does."""


class ProcessLink:
    """A worker process on this machine.

    Args:
        rank: the worker's rank.
        num_ranks: the number of workers, which share the CPUs.
    """

    def __init__(self, rank: int, num_ranks: int):
        self.local_rank = rank
        self.connection, theirs = Pipe()
        threads = str(max(1, default_threads() // num_ranks))
        paths = [str(Path(nanopage.__file__).parents[1]), *filter(os.path.isabs, sys.path)]
        environment = {"OMP_NUM_THREADS": threads} | os.environ
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        environment |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
        command = [sys.executable, "-P", "-m", "nanopage.startup.worker_process", str(theirs.fileno())]
        # A process group of its own, because Ctrl-C is for the engine. In the same session, because a stopped worker
        # cannot notice that the engine has ended: the kernel then sends SIGHUP to this orphaned group.
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment, process_group=0
        )
        theirs.close()

    def ended(self) -> str | None:
        code = self.process.poll()
        if code is None:
            return None
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        return f"its process {self.process.pid} {how}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def start_processes(config: EngineConfig, scratch: str) -> tuple[list[Link], str]:
    """Start the workers of an engine on this machine.

    Args: scratch: a directory that lasts until all workers have met.
    Returns: links to the workers by rank, and the address at which they meet.
    """
    links: list[Link] = []
    try:
        for rank in range(config.num_ranks):
            links.append(ProcessLink(rank, config.num_ranks))
    except BaseException:
        for link in links:
            link.kill()
        raise
    return links, f"file://{scratch}/meeting"


class ProcessExecutor:
    """Runs `config.num_ranks` workers in processes of their own.

    Args:
        path: the model's path.
        model_config: its shape.
        start_links: starts the workers: `start_processes`, or `start_actors` of ray_link.py.
        on_progress: called while the first worker loads its weights, with the number of weights read and the total.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        path: Path,
        on_progress: Callable[[int, int], None] | None = None,
        start_links: Callable[[EngineConfig, str], tuple[list[Link], str]] = start_processes,
    ):
        # Both raise where the model cannot be divided.
        divide(model_config, config.tensor_parallel_size, config.enable_expert_parallel)
        layers_of_stage(model_config, 0, config.pipeline_parallel_size)
        self.config, self.path, self.on_progress, self.start_links = config, path, on_progress, start_links
        self.links: list[Link] = []
        self.error: WorkerDiedError | None = None  # why no step can run any more
        self._pinged: dict[int, float] = {}  # rank -> when the ping was sent that it has not answered
        self._starting = True
        self._numbers = itertools.count()  # numbers of batches and calls
        self._awaited: deque[int] = deque()  # the batches whose results are wanted, oldest first
        self._results: dict[int, BatchResult] = {}  # the awaited results that have come
        self._answers: dict[int, messages.Measured | messages.Ready | messages.Called] = {}  # rank -> answer
        self._called = -1  # the number of the Call whose answers are wanted

    # The interface of an executor: see step.Executor

    def start(self) -> Capacity:
        with tempfile.TemporaryDirectory(prefix="nanopage-", ignore_cleanup_errors=True) as scratch:
            try:
                self.links, address = self.start_links(self.config, scratch)
                for rank, link in enumerate(self.links):
                    self._send(rank, messages.Start(self.config, str(self.path), rank, link.local_rank, address))
                measured = self._collect(messages.Measured)
                self._check_alike(measured)
                capacity = messages.least([message.capacity for message in measured])
                self._send_all(messages.Agreed(capacity))
                self._collect(messages.Ready)
            except BaseException:
                self._kill()
                raise
        self._starting = False
        return capacity

    def submit(self, batch: Batch) -> None:
        number = next(self._numbers)
        self._send_all(messages.Run(number, batch))
        self._awaited.append(number)

    def add_masks(self, masks: dict[int, bytes]) -> None:
        self._send_all(messages.Masks(masks))

    def result(self) -> BatchResult:
        number = self._awaited[0]
        while number not in self._results:
            self._receive()
        self._awaited.popleft()
        return self._results.pop(number)

    def discard(self) -> None:
        self._awaited.clear()
        self._results.clear()

    def rest(self) -> None:
        with contextlib.suppress(WorkerDiedError):  # the next step raises it
            self._send_all(messages.Rest())

    def check(self) -> None:
        if self.error is not None:
            raise self.error
        while self._take_messages(0):
            pass
        self._ping()

    def compile(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        self.on_progress = on_progress
        self._send_all(messages.Compile())
        self._collect(messages.Ready)

    def call(self, method: str, *arguments: Any) -> None:
        self._called = next(self._numbers)
        try:
            self._send_all(messages.Call(self._called, method, [*arguments]))  # type: ignore[arg-type]
            for rank, answer in enumerate(self._collect(messages.Called)):
                if answer.error is not None:
                    kind, text = answer.error
                    raise ERRORS.get(kind, RuntimeError)(f"rank {rank}: {text}")
        finally:  # after Ctrl-C, answers may still come
            self._called = -1
            self._answers.clear()

    def shutdown(self) -> None:
        if self.error is None:
            with contextlib.suppress(WorkerDiedError):
                self._send_all(messages.Stop())
            deadline = time.monotonic() + STOP_SECONDS
            while time.monotonic() < deadline and any(link.ended() is None for link in self.links):
                time.sleep(0.01)
            self.error = WorkerDiedError("the workers have been shut down")
        self._kill()

    # Messages

    @property
    def _limit(self) -> float:
        return START_LIMIT if self._starting else STEP_LIMIT

    def _send(self, rank: int, message: messages.ToWorker) -> None:
        self._send_bytes(rank, messages.encode(message))

    def _send_all(self, message: messages.ToWorker) -> None:
        if self.error is not None:
            raise self.error
        data, rank = messages.encode(message), 0
        try:
            for rank in range(len(self.links)):
                self._send_bytes(rank, data)
        except KeyboardInterrupt:  # perhaps only a part was sent, or only some workers got it
            self._end(rank, "Ctrl-C interrupted a message to it")
            raise

    def _send_bytes(self, rank: int, data: bytes) -> None:
        """Send a message. A hung worker does not read, so another thread sends large messages.

        Does nothing if the connection is closed: `_receive` finds out why.
        """

        def send() -> None:
            with contextlib.suppress(OSError):
                self.links[rank].connection.send_bytes(data)

        if len(data) <= SMALL:
            send()
            return
        thread = threading.Thread(target=send, daemon=True, name="nanopage-sender")
        thread.start()
        thread.join(self._limit)
        if thread.is_alive():
            raise self._end(rank, f"it has not read a message for {self._limit:.0f} s")

    def _collect(self, kind: type[M]) -> list[M]:
        """Wait for an answer of one kind from every worker. Returns them by rank."""
        while len(self._answers) < len(self.links):
            self._receive()
        answers: list[M] = []
        for rank in range(len(self.links)):
            answer = self._answers.pop(rank)
            if not isinstance(answer, kind):
                raise self._end(rank, f"it has answered {type(answer).__name__} instead of {kind.__name__}")
            answers.append(answer)
        return answers

    def _receive(self) -> None:
        """Wait for messages and take them. Meanwhile, ping the workers.

        Raises: WorkerDiedError; while the workers start, the error that ended one of them.
        """
        while not self._take_messages(PING_SECONDS):
            self._ping()

    def _take_messages(self, seconds: float) -> bool:
        """Take the messages that have come, or that come within `seconds`. Returns whether there were any.

        Raises: as `_receive`.
        """
        if self.error is not None:
            raise self.error
        ranks = {link.connection: rank for rank, link in enumerate(self.links)}
        ready = connection.wait(ranks, seconds)
        for each in ready:
            rank = ranks[each]  # type: ignore[index]
            try:
                message = self._read(rank)
                if message is None:
                    raise self._end(rank, self._how_ended(rank))
                self._take(rank, message)
            except KeyboardInterrupt:
                self._end(rank, "Ctrl-C interrupted a message from it")  # a part of the message may have been read
                raise
        return bool(ready)

    def _read(self, rank: int) -> messages.FromWorker | None:
        """The next message of a worker; None if it has closed its connection."""
        try:
            return messages.decode_from_worker(self.links[rank].connection.recv_bytes())
        except (EOFError, OSError):
            return None

    def _take(self, rank: int, message: messages.FromWorker) -> None:
        """Raises: as `_receive`."""
        match message:
            case messages.Pong():
                self._pinged.pop(rank, None)
            case messages.Log(level, text):
                logger.log(level, text)
            case messages.Progress(done, total):
                if self.on_progress is not None:
                    self.on_progress(done, total)
            case messages.Failed():
                raise self._failed(rank, message)
            case messages.Result(number, result):
                if number in self._awaited:
                    self._results[number] = result
            case messages.Called(number=number) if number != self._called:
                pass  # the call was interrupted
            case _:
                self._answers[rank] = message

    def _ping(self) -> None:
        """Ask the workers whether they live. Raises: WorkerDiedError for one that has not answered in time."""
        now = time.monotonic()
        for rank in range(len(self.links)):
            since = self._pinged.get(rank)
            if since is None:
                self._send(rank, messages.Ping())
                self._pinged[rank] = now
            elif now - since > self._limit:
                raise self._end(rank, f"it has not answered for {now - since:.0f} s")

    # Failures

    def _how_ended(self, rank: int) -> str:
        """Why a connection is closed. Waits a moment for the process to end."""
        deadline = time.monotonic() + 1
        while (how := self.links[rank].ended()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return how or "it has closed its connection"

    def _failed(self, rank: int, failed: messages.Failed) -> Exception:
        """The error to raise for a worker's exception, or for the lost worker that the exception is about."""
        deadline = time.monotonic() + CAUSE_SECONDS
        waiting = {link.connection: other for other, link in enumerate(self.links) if other != rank}
        while failed.in_exchange and waiting and time.monotonic() < deadline:
            for ready in connection.wait(waiting, 0.05):
                other = waiting[ready]  # type: ignore[index]
                message = self._read(other)
                if message is None:
                    return self._end(other, self._how_ended(other))
                if isinstance(message, messages.Failed):
                    del waiting[ready]  # type: ignore[arg-type]
                    if not message.in_exchange:
                        rank, failed = other, message
                        break
        logger.error(f"rank {rank} failed:\n{failed.traceback}")
        return self._end(rank, f"{failed.kind}: {failed.message}", ERRORS.get(failed.kind))

    def _end(self, rank: int, cause: str, start_error: type[Exception] | None = None) -> Exception:
        """End all workers. Returns the error to raise, which names the rank and the cause."""
        self.error = WorkerDiedError(f"rank {rank} of {len(self.links)}: {cause}")
        self._kill()
        if self._starting and start_error is not None:
            return start_error(f"rank {rank}: {cause.partition(': ')[2]}")
        return self.error

    def _kill(self) -> None:
        for link in self.links:
            link.kill()
        for link in self.links:
            link.connection.close()

    def _check_alike(self, measured: list[messages.Measured]) -> None:
        """Raises: ValueError if a worker has other files than the first one, or computes in another dtype."""
        first = measured[0]
        for rank, other in enumerate(measured):
            if other.fingerprint != first.fingerprint:
                raise ValueError(f"rank {rank} has loaded other files of {self.path} than rank 0: copy the same model")
            if other.capacity.dtype != first.capacity.dtype:
                raise ValueError(
                    f"rank {rank} computes in {other.capacity.dtype}, and rank 0 in {first.capacity.dtype}: give dtype"
                )


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
