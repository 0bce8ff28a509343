"""Processes that keep cores busy, as other programs on the same machine would."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

# The process ends when its stdin is closed, even if bench.py is killed. The printed line says that it spins now.
SPIN = """
import os, sys, threading
threading.Thread(target=lambda: os._exit(len(sys.stdin.read())), daemon=True).start()
print("spinning", flush=True)
while True:
    pass
"""


@contextlib.contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Keep `count` cores busy until the block ends, each with a Python process of normal priority."""
    with contextlib.ExitStack() as stack:
        processes = []
        for _ in range(count):
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", SPIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            processes.append(stack.enter_context(process))  # at the end, closes its pipes and waits for it
            stack.callback(process.kill)  # runs before that
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        yield
