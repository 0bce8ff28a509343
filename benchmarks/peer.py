"""An engine in its own process: bench.py's end of the connection. peers/protocol.py is the other end."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO, cast

import psutil

from benchmarks.peers.protocol import Run, Work

ROOT = Path(__file__).parent.parent


class PeerError(RuntimeError):
    """An engine's process ended before it answered. The message has the end of its log."""


class Peer:
    """The process of an engine. `environment` is added to this process's environment."""

    def __init__(self, command: list[str], threads: int, environment: dict[str, str] | None = None):
        self.log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed with the process)
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,  # python -m imports from here first, and not from the folder that bench.py was started in
            env=os.environ | {"OMP_NUM_THREADS": str(threads)} | (environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            start_new_session=True,  # so that Ctrl-C does not reach it, and its descendants can be ended with it
        )
        self.requests = cast(IO[str], self.process.stdin)
        self.answers = cast(IO[str], self.process.stdout)

    def ask(self, work: list[Work]) -> Run:
        """Run a batch. Raises PeerError."""
        request = {"prompts": [w.prompt for w in work], "output_lens": [w.output_len for w in work]}
        try:
            self.requests.write(json.dumps(request) + "\n")
            self.requests.flush()
        except BrokenPipeError:
            raise self.error() from None
        return Run(**self.answer())

    def answer(self) -> dict:
        """The next line that the engine writes. Raises PeerError."""
        line = self.answers.readline()
        if not line.endswith("\n"):
            raise self.error()
        return json.loads(line)

    def error(self) -> PeerError:
        code = self.process.wait()
        self.log.seek(0)
        return PeerError("\n".join([f"exit code {code}", *self.log.read().splitlines()[-15:]]))

    def cpu_seconds(self) -> float:
        """CPU time so far of the process and its children."""
        total = 0.0
        for each in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = each.cpu_times()
                total += times.user + times.system
        return total

    def processes(self) -> list[psutil.Process]:
        """The process and its descendants, even in other sessions. Empty when the process has ended."""
        if self.process.poll() is not None:  # its id may be another process's by now
            return []
        try:
            process = psutil.Process(self.process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def close(self) -> None:
        """Let the engine end by itself, then kill what is left."""
        with contextlib.suppress(BrokenPipeError):  # it has ended
            self.requests.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.kill()

    def kill(self) -> None:
        """End the process and all its descendants. A second call does nothing."""
        if self.log.closed:
            return
        for each in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        with contextlib.suppress(ProcessLookupError):  # processes that outlived their parent
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()


def prepare(command: list[str], threads: int) -> None:
    """Let an engine make the files that it keeps on disk. Raises PeerError."""
    peer = Peer(command, threads)
    try:
        if peer.process.wait():
            raise peer.error()
    finally:
        peer.kill()
