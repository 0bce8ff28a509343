"""Imports torch and nanopage faster, for programs that run an engine."""

import ctypes
import gc
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def quick_imports() -> Iterator[None]:
    """Within it, importing torch and nanopage takes three quarters of the time. Does nothing once torch is imported.

    No garbage is collected meanwhile: that takes a tenth of torch's time and a third of nanopage's, and finds nothing.
    Later collections leave out all that exists now. So this is for programs: cycles that a script has made before would
    never be collected.

    A thread loads torch's library, a sixth of torch's time, beside the imports that need no torch.
    """
    if "torch" in sys.modules:
        yield
        return
    thread = threading.Thread(target=load_library, daemon=True)
    thread.start()
    gc.disable()
    try:
        import nanopage.engine.engine  # noqa: F401

        yield
    finally:
        gc.freeze()
        gc.enable()


def load_library() -> None:
    """Load torch's largest library, so that `import torch` finds it loaded."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return
    file = Path(spec.origin).with_name("lib") / "libtorch_cpu.so"
    if file.exists():  # on Linux
        ctypes.CDLL(None).dlopen(os.fsencode(file), os.RTLD_NOW)  # without Python's lock, which CDLL(file) would hold
