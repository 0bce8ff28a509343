"""The threads of an engine on a CPU: at most one for each physical core that the process may use, and fewer threads
while other processes keep cores busy."""

import contextlib
import logging
import os
import time
from pathlib import Path

import psutil

logger = logging.getLogger("nanopage")


def limit_threads() -> None:
    """Reduce torch's number of threads, for the whole process, to `default_threads`. Never increase it.

    torch respects the CPU affinity but ignores the CPU quota of a container. Threads beyond the quota are throttled,
    and the other threads wait for them at every barrier. The two hyperthreads of a core share the execution units that
    attention and products need, so a second thread does not help.

    Leaves the number as it is if OMP_NUM_THREADS is set.
    """
    import torch  # takes seconds, and whoever asks for `default_threads` may need none

    before, useful = torch.get_num_threads(), default_threads()
    if "OMP_NUM_THREADS" not in os.environ and useful < before:
        torch.set_num_threads(useful)
        logger.info(f"using {useful} of {before} threads: the physical cores this process may use")


def allowed_cpus() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def default_threads(system: Path = Path("/sys")) -> int:
    """The number of physical cores that this process may run on, within the CPU quota of its container
    (cgroup v2)."""
    allowed = allowed_cpus()
    siblings = [system / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list" for cpu in allowed]
    try:
        cores = len({file.read_text() for file in siblings})
    except OSError:
        cores = min(psutil.cpu_count(logical=False) or 1, len(allowed))
    try:
        quota, period = (system / "fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, int(quota) // int(period))
    except (OSError, ValueError):  # "max": no quota
        pass
    return max(1, cores)


def set_threads(number: int) -> None:
    """Set torch's number of threads for the calling thread, unless it has this number already. The call has a price:
    MKL then begins a parallel region for each product within attention, which takes 1.4 times as long in float32."""
    import torch

    if torch.get_num_threads() != number:
        torch.set_num_threads(number)


class ThreadCount:
    """Chooses the number of threads of each step: one for each CPU that other processes leave free, at least one.

    The threads of a step wait for each other many times. If one of them has to share its CPU, the others wait as well:
    with one of two CPUs busy, a step of two threads takes longer than a step of one.

    Args:
        most: the largest number of threads.
        engine: pid of the engine, if it is another process. The engine does not count as another process, because it
            works mostly while this process waits.
    """

    INTERVAL = 0.1  # seconds between measurements
    PAUSE = 1.0  # seconds without a request after which an average says little about now
    # Leave a CPU to other processes if they use more than BUSY of it. Take it back if they use less than IDLE.
    BUSY, IDLE = 0.4, 0.2

    def __init__(self, most: int, engine: int | None = None):
        self.most = self.threads = most
        self._engine = psutil.Process(engine) if engine is not None else None
        self._before = self._times()
        self._resting_since: float | None = None  # if no request is left: when the last step ended

    def set(self) -> None:
        """Set the number of threads for what the calling thread computes. Call this before each step."""
        if self.most > 1 and time.perf_counter() - self._before[0] >= self.INTERVAL:
            now = self._times()
            seconds, busy, own = (after - before for after, before in zip(now, self._before, strict=True))
            self._before = now
            if self._resting_since is None or now[0] - self._resting_since < self.PAUSE:
                self.threads = self.choose((busy - own) / seconds, len(allowed_cpus()))
        self._resting_since = None
        set_threads(self.threads)

    def reset(self) -> None:
        """Set the largest number of threads, for what the calling thread does after the last step. Call this when no
        request is left."""
        if self._resting_since is None:
            self._resting_since = time.perf_counter()
        set_threads(self.most)

    def choose(self, others: float, num_cpus: int) -> int:
        """Args: others: CPUs that other processes use, on average. num_cpus: all that this process may use."""
        at_most, at_least = (int(num_cpus - others + share) for share in (self.BUSY, self.IDLE))
        return max(1, min(self.most, max(at_least, min(self.threads, at_most))))

    def _times(self) -> tuple[float, float, float]:
        """Returns, in seconds: the clock, the CPU time of all processes on the CPUs that this process may use, and the
        CPU time of this process and its engine.

        Leaves out processes with a low priority, such as the one that compiles, because they give way. If the system
        does not report other processes, they count as idle.
        """
        now, own, allowed = time.perf_counter(), time.process_time(), allowed_cpus()
        if self._engine is not None:
            with contextlib.suppress(psutil.Error):
                times = self._engine.cpu_times()
                own += times.user + times.system
        try:
            cpus = [cpu for i, cpu in enumerate(psutil.cpu_times(percpu=True)) if i in allowed]
        except OSError:
            return now, own, own
        return now, sum(cpu.user + cpu.system for cpu in cpus), own
