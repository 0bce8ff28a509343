"""W7 and W8 of compare: a new process answers each question, and its start counts, as in a short program.

nanopage's cache of compiled code is empty at first, and nanopage compiles in the background, as it does by default.
The other engines keep their files on disk.
"""

import contextlib
import tempfile
import time
from dataclasses import asdict, dataclass

import psutil

from benchmarks.busy import busy_cores
from benchmarks.peer import Peer
from benchmarks.peers.protocol import Run, Work

PROCESSES = {"W7": 1, "W8": 3}  # workload -> how many processes, one after another
MARK = "NANOPAGE_BENCH"  # an environment variable that marks the processes of an engine
LONGEST_WAIT = 300.0  # seconds


@dataclass
class Question(Run):
    """`seconds` and `ttft` count from the start of the process."""

    seconds_waited: float = 0.0  # before the start, until no process of the engine ran


def ask_in_new_processes(
    engine: str, command: list[str], threads: int, work: list[Work], busy: int
) -> tuple[list[Question], dict[str, str]]:
    """Put each question to a new process, once no process of the previous question runs, or after LONGEST_WAIT.
    At the end, kill the processes that still run.

    Args: busy: the number of cores that are otherwise busy from the start of a process to its answer.
    Returns: the answers and the engine's versions.
    Raises: PeerError.
    """
    questions: list[Question] = []
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="nanopage-bench-") as home:
        environment = {MARK: home}
        if engine == "nanopage":  # on a GPU, its compiled code is in torch's cache and in Triton's
            caches = ("XDG_CACHE_HOME", *(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR") if "cuda" in command else ()))
            environment |= dict.fromkeys(caches, home)
        try:
            for w in work:
                waited = wait_until_idle(home) if questions else 0.0
                with busy_cores(busy):
                    peer = Peer(command, threads, environment)
                    try:
                        versions = peer.answer()["versions"]
                        run = peer.ask([w])
                        seconds = time.perf_counter() - peer.started
                        peer.close()
                    finally:
                        peer.kill()
                if run.ttft is not None:
                    run.ttft += seconds - run.seconds
                run.seconds = seconds
                questions.append(Question(**asdict(run), seconds_waited=waited))
        finally:
            while left := running(home):
                for process in left:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                psutil.wait_procs(left, timeout=1)
    return questions, versions


def wait_until_idle(home: str) -> float:
    """Wait until no process of the engine runs, at most LONGEST_WAIT. Returns the seconds that it took."""
    started = time.perf_counter()
    while running(home) and time.perf_counter() - started < LONGEST_WAIT:
        time.sleep(0.2)
    return time.perf_counter() - started


def running(home: str) -> list[psutil.Process]:
    """The processes that have the mark, even if their parents have ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # the process has ended, or belongs to another user
            if process.environ().get(MARK) == home:
                found.append(process)
    return found
