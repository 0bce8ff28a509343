"""How many threads an engine on a CPU works with: one a physical core, of those it may use, within its quota."""

import logging
import os
from pathlib import Path

import psutil
import torch

logger = logging.getLogger("nanopage")


def limit_threads() -> None:
    """Take threads from torch, for the whole process, that would only wait for each other; never add any.

    torch's own count keeps to the affinity but knows no quota: beyond it threads are stopped, and the others wait for
    them at every barrier. The two hyperthreads of a core share what attention and products need. Whoever sets
    OMP_NUM_THREADS has decided otherwise.
    """
    before, useful = torch.get_num_threads(), default_threads()
    if "OMP_NUM_THREADS" not in os.environ and useful < before:
        torch.set_num_threads(useful)
        logger.info(f"using {useful} of {before} threads: the physical cores this process may use")


def default_threads(system: Path = Path("/sys")) -> int:
    """Physical cores that this process may run on, at most as many as its control group's CPU quota."""
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
