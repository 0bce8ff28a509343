"""How a program begins and ends: every failure is a message and an exit code, not a traceback."""

import functools
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from nanopage.terminal.signals import leave_on_interrupt, orderly_exit, raise_on_interrupt
from nanopage.terminal.text import describe_error, discard, open_missing_streams, say_error, say_log


def run(app: Callable[[], int], answers: bool = True) -> int:
    """Run a command line. Returns the exit code, unless the command line raises SystemExit with one.

    Args: answers: whether the program is useless without a stdout.
    """

    def program() -> int:
        if not open_missing_streams() and answers:
            raise ValueError("stdout is closed: there is nowhere to write an answer")
        raise_on_interrupt()
        return app()

    try:
        return exit_code(program, verbose=False)
    finally:
        leave_on_interrupt()  # while Python ends


def command(work: Callable[..., int]) -> Callable[..., NoReturn]:
    """Turn a function that returns an exit code into a command of typer, which exits with this code. A signal ends the
    command in order. Warnings of the engine's log are shown, and the whole log if the command's option `verbose` is
    set."""

    @functools.wraps(work)
    def run_and_exit(**options: Any) -> NoReturn:
        verbose = options.get("verbose", False)
        say_log(verbose)
        with orderly_exit():
            code = exit_code(lambda: work(**options), verbose)
        raise SystemExit(code)

    return run_and_exit


def exit_code(work: Callable[[], int], verbose: bool) -> int:
    """Do the work. Exceptions are not shown as tracebacks, unless `verbose`."""
    try:
        code = work()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except SystemExit:
        raise
    except BrokenPipeError:  # the reader of our pipe has seen enough
        discard(sys.stdout)
        return 0
    except BaseException as error:  # when Rust panics, tokenizers raises something that is not an Exception
        say_error(describe_error(error, verbose))
        discard(sys.stdout)  # otherwise Python would fail again when it writes the rest
        return 1
