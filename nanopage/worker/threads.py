"""Limits the threads of an engine on a CPU to one for each physical core that the process may use."""

import logging
import os
from pathlib import Path

import psutil
import torch

logger = logging.getLogger("nanopage")


def limit_threads() -> None:
    """Reduce torch's number of threads, for the whole process, to `default_threads`. Never increase it.

    torch respects the CPU affinity but ignores the CPU quota of a container. Threads beyond the quota are throttled,
    and the other threads wait for them at every barrier. The two hyperthreads of a core share the execution units that
    attention and products need, so a second thread does not help.

    Leaves the number as it is if OMP_NUM_THREADS is set.
    """
    before, useful = torch.get_num_threads(), default_threads()
    if "OMP_NUM_THREADS" not in os.environ and useful < before:
        torch.set_num_threads(useful)
        logger.info(f"using {useful} of {before} threads: the physical cores this process may use")


def default_threads(system: Path = Path("/sys")) -> int:
    """The number of physical cores that this process may run on, within the CPU quota of its container
    (cgroup v2)."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
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
