"""A process for work on input that is not trusted: a model's templates and regular expressions, clients' grammars.

    LimitedProcess.ask ─▶ a line of JSON ─▶ this file, run as a script ─▶ answer() of a program ─▶ a line of JSON

The kernel refuses the process memory beyond a limit, and ends it when a request takes too much CPU time. This bounds
every request, whatever it does. The program is a file that imports nothing of nanopage and defines

    make_answer(setup) -> Callable[[dict], dict]   # may raise MemoryError
"""

import importlib.util
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

PROGRAM = Path(__file__).absolute()


@dataclass
class Limits:
    """Limits of one request.

    memory       bytes beyond those of the idle process; enforced only on Linux
    cpu_seconds  not enforced on Windows
    seconds      until the answer comes; enforced everywhere
    answer       bytes of an answer
    stack        bytes of the stack of a request's own thread, beyond `memory`
    """

    memory: int
    cpu_seconds: float
    seconds: float
    answer: int
    stack: int = 0


class LimitedProcess:
    """`start` or the first request starts the process; others reuse it. A request that exceeds a limit ends it, and the
    next request starts another. The process ends with this object, and with the nanopage process, even if that is
    killed. Threads may share the object, which does one request at a time.

    Args:
        program: the file, as above.
        packages: that the program imports. It has no others beside the standard library.
        limits: they may be changed; the process that runs keeps its limits of memory and CPU time.
    """

    def __init__(self, program: Path, packages: list[str], limits: Limits):
        self.program, self.packages, self.limits = program, packages, limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end_process: weakref.finalize | None = None

    def start(self, setup: Any = None) -> None:
        """Start the process before its first request, whose setup must be the same. Raises: as `ask`."""
        with self._lock:
            self._start(setup)

    def ask(self, request: dict, setup: Any = None) -> dict:
        """The answer to a request, or {"error": the limit that it exceeds}.

        Args: request, setup: plain JSON; lone surrogates are allowed. A process has the setup of its first request.
        Raises: RuntimeError if the process cannot be started.
        """
        with self._lock:
            # After os.fork(), the child starts a process of its own: poll() says there that this one has ended.
            if self._process is None or self._process.poll() is not None:
                self._start(setup)
            process = cast("subprocess.Popen[bytes]", self._process)
            start = time.monotonic()
            timer = threading.Timer(self.limits.seconds, process.kill)
            timer.start()
            try:
                line = _exchange(process, _encode(request), self.limits.answer)
            except BaseException:  # such as Ctrl-C: the next request must not read the answer to this one
                self.stop()
                raise
            finally:
                timer.cancel()
            if not line.endswith(b"\n"):
                self.stop()
                return {"error": self._why_it_ended(process.returncode, time.monotonic() - start)}
            answer = json.loads(line)
            if answer.pop("grown"):
                self.stop()
            return answer

    def stop(self) -> None:
        """End the process, if there is one."""
        if self._end_process is not None:
            self._end_process()
        self._process = self._end_process = None

    def _start(self, setup: Any) -> None:
        self.stop()
        limits = self.limits
        options: dict[str, Any] = {"memory": limits.memory, "stack": limits.stack, "seconds": limits.cpu_seconds}
        options["program"] = str(self.program)
        # Where memory is short, glibc would try in vain to make an arena for each allocation of a thread.
        env = os.environ | {"MALLOC_ARENA_MAX": "1"}
        # -I and -S: no code from the current directory, PYTHONPATH or site-packages runs at the start.
        # A new process group: Ctrl-C must not end the process, and the program's end ends even a stopped one.
        command = [sys.executable, "-I", "-S", str(PROGRAM), json.dumps(options), *map(_location, self.packages)]
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, process_group=0)
        except OSError as error:
            raise RuntimeError(f"cannot start the process that runs {self.program.name}: {error}") from error
        self._process, self._end_process = process, weakref.finalize(self, _end, process)
        stdin = cast(IO[bytes], process.stdin)
        with suppress(BrokenPipeError):
            stdin.write(_encode(setup))
            stdin.flush()  # the first request may come late, or never

    def _why_it_ended(self, status: int, seconds: float) -> str:
        if -status == getattr(signal, "SIGPROF", None):
            return f"it took more than {self.limits.cpu_seconds:g} s of CPU time"
        if seconds >= self.limits.seconds:
            return f"it took more than {self.limits.seconds:g} s"
        if -status == signal.SIGABRT:  # how Rust ends where memory is refused
            return out_of_memory(self.limits.memory)
        return f"its process ended with status {status}"  # a negative status is that of a signal


def out_of_memory(limit: int) -> str:
    return f"it needs more than {limit >> 20} MiB"


def _exchange(process: subprocess.Popen[bytes], request: bytes, max_bytes: int) -> bytes:
    """The answer to a request: one line, incomplete if the process ends."""
    stdin, stdout = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
    with suppress(BrokenPipeError):
        stdin.write(request)
        stdin.flush()
    return stdout.readline(max_bytes)


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(BrokenPipeError), process:  # closes the pipes and waits
        process.kill()


def _location(package: str) -> str:
    """The directory that contains a package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"{package} is not installed")
    return str(Path(spec.origin).absolute().parents[1])


def _encode(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass") + b"\n"


# In the process


def main(options: dict) -> None:
    """Answer requests until the parent closes stdin or is gone."""
    answer_to = runpy.run_path(options["program"])["make_answer"](json.loads(sys.stdin.buffer.readline()))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # no request writes to the terminal
    idle = _address_space()
    _limit_address_space(idle + options["memory"] + options["stack"])
    too_large = _encode({"error": out_of_memory(options["memory"]), "grown": True})
    try:
        for request in _requests(options["seconds"]):
            answer = answer_to(request)
            # The next request would lack the memory that this one has left behind.
            grown = answer.get("grown", False) or _address_space() - idle > options["memory"] / 4
            sys.stdout.buffer.write(_encode(answer | {"grown": grown}))
            sys.stdout.buffer.flush()
    except MemoryError:
        os.write(sys.stdout.fileno(), too_large)


def _requests(seconds: float) -> Iterator[dict]:
    while True:
        if hasattr(signal, "setitimer"):  # not on Windows
            signal.setitimer(signal.ITIMER_PROF, seconds)  # counts this process's CPU time, not its waiting
        if not (line := sys.stdin.buffer.readline()):
            return
        yield json.loads(line)


def _address_space() -> int:
    """The bytes of address space in use, or 0 on systems other than Linux."""
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _limit_address_space(size: int) -> None:
    """Have the kernel refuse to map more than `size` bytes. Other systems than Linux do not enforce this limit."""
    if sys.platform != "linux":
        return
    import resource  # not on Windows

    with suppress(ValueError):  # a lower limit is already in force
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold the conversation


if __name__ == "__main__":
    sys.path += sys.argv[2:]  # with -S, Python does not look in site-packages
    main(json.loads(sys.argv[1]))
