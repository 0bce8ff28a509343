"""W7 and W8 of compare: each question is put to a new process, whose start counts, as in a short program.

nanopage's cache of compiled code is empty at first, and nanopage compiles in the background, as it does by itself.
The other engines keep what they have on disk.
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
MARK = "NANOPAGE_BENCH"  # a variable in the environment of an engine's processes, by which they are found
LONGEST_WAIT = 300.0  # seconds


@dataclass
class Question(Run):
    """`seconds` and `ttft` count from the start of the process."""

    seconds_waited: float = 0.0  # before that, until nothing of the engine ran any more


def ask_in_new_processes(
    engine: str, command: list[str], threads: int, work: list[Work], busy: int
) -> tuple[list[Question], dict[str, str]]:
    """Put each question to a process of its own, when nothing of the previous one runs any more, or after LONGEST_WAIT.
    In the end, kill what still runs.

    Args: busy: cores that are busy with something else from the start of a process to its answer.
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
    """Returns the seconds that it took, at most LONGEST_WAIT."""
    started = time.perf_counter()
    while running(home) and time.perf_counter() - started < LONGEST_WAIT:
        time.sleep(0.2)
    return time.perf_counter() - started


def running(home: str) -> list[psutil.Process]:
    """The processes that have the mark, also those whose parents have ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it has ended, or is another user's
            if process.environ().get(MARK) == home:
                found.append(process)
    return found
