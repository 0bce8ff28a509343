"""Messages on the terminal besides replies: those of the programs and of the engine. Makes text from outside safe to
print. Imports nothing of the engine."""

import contextlib
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from logging.handlers import BufferingHandler
from typing import TextIO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from nanopage import MAX_MESSAGE, escaped

LOGGER = logging.getLogger("nanopage")
# Control characters move the cursor, set the title or reach the clipboard; surrogates cannot be encoded.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
# Exceptions of the engine for input that it refuses, and of the system: their messages suffice.
ERRORS = (ValueError, TypeError, OSError, ImportError, RuntimeError, MemoryError)

# Environment variables that are set by tmux and by terminals that rewrap rows after a resize.
REFLOWING = {
    *("TMUX", "VTE_VERSION", "KONSOLE_VERSION", "KITTY_WINDOW_ID", "ALACRITTY_WINDOW_ID", "WEZTERM_PANE"),
    *("GHOSTTY_RESOURCES_DIR", "ITERM_SESSION_ID", "WT_SESSION"),
}


def printable(text: str) -> str:
    """`text` without control characters. Carriage returns are removed, others become U+FFFD. Tabs and newlines stay.
    For a reply as it arrives. Messages use `nanopage.escaped` instead, which shows the characters."""
    return UNSAFE.sub("\ufffd", text.replace("\r", ""))


def discard(stream: TextIO) -> None:
    """Discard further output to `stream`. Python flushes it at exit, and would fail again."""
    with contextlib.suppress(OSError, ValueError):  # no file descriptor
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, stream.fileno())
        os.close(devnull)


def open_missing_streams() -> bool:
    """Open closed standard streams on /dev/null, before another file gets their number. Returns: whether stdout was
    open."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # the new descriptor gets the lowest number that is free
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:
        sys.stderr = open(2, "w")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w")  # noqa: SIM115
        return False
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal may not support all characters
    return True


class _Stderr(Console):
    def on_broken_pipe(self) -> None:  # rich would end the program, and stdout may still have a reader
        discard(sys.stderr)


stderr = _Stderr(stderr=True)


def _print(what: RenderableType, soft_wrap: bool = False) -> None:
    """Print on stderr. A full disk behind it must not cost the answer on stdout."""
    try:
        stderr.print(what, soft_wrap=soft_wrap)
    except OSError:
        discard(sys.stderr)


def say(text: str, style: str = "dim") -> None:
    """Print a message on stderr."""
    _print(Text(escaped(text), style), soft_wrap=not stderr.is_terminal)


def say_table(rows: Iterable[tuple[str, ...]]) -> None:
    """Print rows of cells on stderr."""
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*(Text(escaped(cell)) for cell in row))
    _print(table)


def say_drawn(draw: Callable[[int], RenderableType]) -> None:
    """Print what `draw` makes for the width of stderr."""
    _print(draw(stderr.width - 1))


def say_error(message: str) -> None:
    _print(Text.assemble(("error:", "red"), " ", escaped(message, MAX_MESSAGE)), soft_wrap=True)


def describe_error(error: BaseException, verbose: bool) -> str:
    """An exception as a message: its text, its type if it was unexpected, and its traceback if `verbose`."""
    text = str(error) or ("there is too little memory" if isinstance(error, MemoryError) else "")
    expected = isinstance(error, ERRORS) and text
    message = text if expected else f"internal error: {type(error).__name__}: {error}"
    if verbose:
        return f"{message}\n{''.join(traceback.format_exception(error))}"
    return message if expected else f"{message}\nRun with --verbose for the traceback."


def terminal_reflows() -> bool:
    """Whether the terminal is known to rewrap rows when it is made narrower. A wrong True would erase finished rows; a
    wrong False leaves rows of the unfinished block behind."""
    if "STY" in os.environ:  # GNU screen does not rewrap rows, wherever it runs
        return False
    return bool(REFLOWING & os.environ.keys()) or os.environ.get("TERM_PROGRAM") in ("vscode", "Apple_Terminal")


def say_log(verbose: bool) -> None:
    """Print the engine's warnings and its messages that are marked `for_user`, or all its messages if `verbose`, in
    place of its own handler."""
    handler = _Said()
    handler.addFilter(lambda record: verbose or record.levelno >= logging.WARNING or hasattr(record, "for_user"))
    LOGGER.handlers = [handler]


class _Said(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(escaped(record.getMessage(), MAX_MESSAGE))


@contextlib.contextmanager
def held_log() -> Iterator[None]:
    """Hold these messages back until the block ends, so that none appears within a reply."""
    handlers, held = LOGGER.handlers, BufferingHandler(sys.maxsize)
    LOGGER.handlers = [held]
    try:
        yield
    finally:
        LOGGER.handlers = handlers
        for record in held.buffer:
            LOGGER.handle(record)
