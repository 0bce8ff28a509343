"""nanopage's programs in forks of the test's process: they need not import torch again, which takes seconds.

A fork is made by subprocess.Popen or pexpect.spawn. What Python does before a program and after it is done here. A test
that is about this (imports, streams that are closed, a dumb terminal's input) starts Python itself. So does the fork of
a process that has imported Ray, whose libraries do not go on in forks.
"""

import atexit
import faulthandler
import gc
import io
import logging
import os
import runpy
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch

import nanopage
from nanopage.text import chat_template, tokenizer

ROOT = Path(__file__).parent.parent


def forked(program: Path | str, *arguments: object, env: Mapping[str, str] = os.environ) -> Callable[[], None]:
    """For `preexec_fn`: the process runs a program of Python and never gets as far as the command that it was made for.

    Args:
        program: a file, or the name of a module, as in python -m.
        env: environment variables of the process.
    """
    env = dict(env)

    def run() -> None:
        code = 1
        with suppress(BaseException):
            for descriptor in map(int, os.listdir("/proc/self/fd")):  # those of tests, and Popen's
                if descriptor > 2:
                    with suppress(OSError):  # that of the list itself
                        os.close(descriptor)
            if "ray" in sys.modules:
                start = [str(program)] if isinstance(program, Path) else ["-m", program]
                os.execve(sys.executable, [sys.executable, *start, *map(str, arguments)], dict(env))
            forget_the_tests()
            os.environ.clear()
            os.environ.update(env)
            sys.argv = [str(program), *map(str, arguments)]
            open_streams()
            code = exit_code(program)
            threading._shutdown()  # waits for threads, as Python does
            atexit._run_exitfuncs()
            sys.stdout.flush()
        os._exit(code)

    return run


def forget_the_tests() -> None:
    """Of this process, nothing is ended or told when the program ends, and it handles signals as at its start."""
    faulthandler.disable()
    atexit._clear()
    for name in [name for name in sys.modules if name.startswith(("test_", "conftest"))]:
        del sys.modules[name]
    tokenizer.TemplateRenderer = chat_template.TemplateRenderer  # the tests' belongs to another process
    weakref.finalize._registry.clear()
    weakref.finalize._registered_with_atexit = False
    gc.freeze()
    logging.getLogger().handlers.clear()
    logging.getLogger("nanopage").handlers = [nanopage._handler]
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGWINCH):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Popen lets them end what it starts
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)  # a fork has none of the other threads, and OpenMP would wait for them


def open_streams() -> None:
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        file = os.fdopen(number, "rb" if number == 0 else "wb", closefd=False)
        options = {"errors": "backslashreplace"} if number == 2 else {}
        at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
        by_line = number == 2 or file.isatty()
        stream = io.TextIOWrapper(file, "utf-8", line_buffering=by_line, write_through=at_once, **options)
        stream.mode = file.mode[0]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def exit_code(program: Path | str) -> int:
    """Run the program. Returns: what Python would exit with."""
    try:
        if isinstance(program, Path):
            runpy.run_path(str(program), run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
