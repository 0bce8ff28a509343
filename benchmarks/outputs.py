"""The files that bench.py writes. Measuring takes minutes, so results must not be lost: paths are checked first, a
stopped run writes what it has measured, and if a file cannot be written, its data is kept elsewhere."""

import contextlib
import json
import os
import signal
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from benchmarks.checks import refuse
from benchmarks.report import console, plain

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
PICTURES = (".png", ".svg", ".pdf")


class Stopped(SystemExit):
    """A signal ends the program. The exit code is 128 + the signal's number."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.signal = signal.Signals(number).name


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Make the first SIGINT, SIGTERM or SIGHUP raise Stopped in the main thread. Until the block ends, later ones are
    ignored, so that they do not disturb the writing of results."""
    # A signal that is already ignored stays ignored, such as SIGHUP under nohup.
    before = {number: signal.getsignal(number) for number in SIGNALS}
    handled = [number for number, handler in before.items() if handler != signal.SIG_IGN]

    def stop(number: int, frame: Any) -> None:
        for each in handled:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    for number in handled:
        signal.signal(number, stop)
    try:
        yield
    except Stopped as stopped:
        print(f"stopped by {stopped.signal}", file=sys.stderr)
        raise
    finally:
        for number in handled:
            signal.signal(number, before[number])


def check_outputs(outputs: dict[str, Path | None], inputs: dict[str, Path | None] | None = None) -> None:
    """Refuse files that cannot be written, or that another option names as well. Changes nothing.

    Args:
        outputs: option -> file to write.
        inputs: option -> file to read.
    """
    named = {os.path.realpath(file): option for option, file in (inputs or {}).items() if file is not None}
    for option, file in outputs.items():
        if file is None:
            continue
        path = Path(os.path.realpath(file))
        if str(path) in named and not path.is_char_device():  # /dev/null
            refuse(f"{named[str(path)]} and {option} name the same file", option)
        named[str(path)] = option
        if not path.parent.is_dir():
            refuse(f"no such folder: {path.parent}", option)
        try:
            check_writable(path, option)
        except OSError as error:
            refuse(f"{file}: {error.strerror}", option)


def check_writable(path: Path, option: str) -> None:
    """Open the file, and remove it if it is new. Raises OSError."""
    existed = path.exists()
    if existed and not (path.is_file() or path.is_dir() or stat.S_ISCHR(path.stat().st_mode)):
        refuse(f"{path}: not a regular file", option)  # opening a FIFO waits for a reader
    with open(path, "ab"):
        pass
    if not existed:
        path.unlink()


def check_plot(file: Path | None) -> None:
    """Refuse a picture that cannot be drawn."""
    if file is None:
        return
    if file.suffix.lower() not in PICTURES:
        refuse(f"{file.name!r} does not end in one of: {', '.join(PICTURES)}", "--plot")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        refuse("needs matplotlib: pip install -e '.[plot]'", "--plot")


@dataclass
class Record:
    """The file of --json: whether the run came to its end, and whether the file was written."""

    complete: bool = False
    written: bool = True


@contextlib.contextmanager
def recorded(file: Path | None, results: Callable[[], dict[str, Any]]) -> Iterator[Record]:
    """Write the results as JSON when the block ends, however it ends. "complete" says whether it ran to its end.

    Args:
        file: the file of --json. None: nothing is written.
        results: returns what has been measured so far.
    """
    record = Record()
    try:
        yield record
        record.complete = True
    finally:
        if file is not None:
            text = json.dumps({"complete": record.complete} | results(), indent=2) + "\n"
            record.written = write(file, text.encode())


def exit_unless(*succeeded: bool) -> None:
    """Raise typer.Exit(1) if anything failed."""
    if not all(succeeded):
        raise typer.Exit(1)


def write(file: Path, data: bytes) -> bool:
    """Write a file and say so. If that fails, say why and where the data is now, and return False."""
    try:
        file.write_bytes(data)
    except OSError as error:
        console.print(f"[red]error:[/red] cannot write {plain(str(file))}: {error.strerror}", highlight=False)
        keep(file, data)
        return False
    say(f"wrote {file}")
    return True


def keep(file: Path, data: bytes) -> None:
    """Write the data to a temporary file; if that fails, print it if it is text."""
    try:
        number, name = tempfile.mkstemp(prefix="bench-", suffix=file.suffix)
        with open(number, "wb") as kept:
            kept.write(data)
        say(f"kept in {name}")
    except OSError as error:
        say(f"no temporary file either: {error.strerror}")
        if file.suffix not in PICTURES:
            print(data.decode(errors="replace"))


def say(text: str) -> None:
    console.print(plain(text), highlight=False, soft_wrap=True)
