"""Ctrl-C, SIGTERM, SIGHUP and Ctrl-Z while something runs, and the terminal's modes during that time."""

import contextlib
import dataclasses
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator

TERMINATING = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
STOPPING = [signal.SIGINT, *TERMINATING]


def leave_on_interrupt() -> None:
    """Until `raise_on_interrupt`, Ctrl-C ends the process with code 130 at once. While a program starts or ends, a
    KeyboardInterrupt could come in the middle of any import or cleanup."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def raise_on_interrupt() -> None:
    """Ctrl-C raises KeyboardInterrupt again, unless it is ignored."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(signum, frame) -> None:
    os._exit(128 + signum)


@contextlib.contextmanager
def _handled(signums: list[signal.Signals], handler: Callable) -> Iterator[None]:
    """Signals call `handler`, except for those that are ignored already (nohup)."""
    previous = {s: signal.signal(s, handler) for s in signums if signal.getsignal(s) not in (signal.SIG_IGN, None)}
    try:
        yield
    finally:
        for signum, before in previous.items():
            signal.signal(signum, before)


@contextlib.contextmanager
def orderly_exit() -> Iterator[None]:
    """On SIGTERM and SIGHUP, run every cleanup and exit with code 128 + signal. The terminal gets its modes back."""

    def leave(signum, frame):
        raise SystemExit(128 + signum)

    with _handled(TERMINATING, leave), _modes_restored():
        yield


@contextlib.contextmanager
def orderly_exit_of(app) -> Iterator[Callable[[], None]]:
    """As `orderly_exit`, while a prompt_toolkit application waits for input. Yields what the application must call when
    it begins.

    An exception in the middle of one of its tasks would be reported by its event loop, which then waits for Enter.
    """
    arrived: list[int] = []

    def leave(signum, frame):
        arrived.append(signum)
        if app.loop is not None:
            app.loop.call_soon_threadsafe(end)

    def end():
        if arrived and app.is_running and not app.future.done():
            app.exit(exception=SystemExit(128 + arrived[0]))

    try:
        with _handled(TERMINATING, leave):
            yield end
    finally:
        if arrived:
            raise SystemExit(128 + arrived[0])


@dataclasses.dataclass
class Interrupt:
    """Whether work was asked to stop."""

    signum: int | None = None  # the signal that asked
    # Called at once when the signal arrives, in another thread: Python runs signal handlers only between two operations
    # of torch, which can take seconds.
    notice: Callable[[], None] = lambda: None
    over: bool = False  # the work has ended, so that a second signal has nothing to stop
    resumed: Callable[[], None] = lambda: None  # called when the program goes on after Ctrl-Z


@contextlib.contextmanager
def interruptible(typed: bytearray | None = None) -> Iterator[Interrupt]:
    """SIGINT, SIGTERM and SIGHUP only set a flag. The second one raises KeyboardInterrupt.

    After SIGTERM or SIGHUP the block is left by SystemExit, with code 128 + signal. Typed keys are not shown during
    the block.

    Args: typed: as in `unechoed`.
    """
    interrupt = Interrupt()

    def handler(signum, frame):
        first = interrupt.signum is None
        if interrupt.signum not in TERMINATING:
            interrupt.signum = signum
        if not first and not interrupt.over:
            raise KeyboardInterrupt

    try:
        with _handled(STOPPING, handler), _noticed_at_once(interrupt), unechoed(lambda: interrupt.resumed(), typed):
            yield interrupt
    finally:
        if interrupt.signum in TERMINATING:
            raise SystemExit(128 + interrupt.signum)


def wait_for_input() -> None:
    """Wait until there is something to read on a terminal. `input()` by itself can miss a signal that arrives just
    before it waits, and then handles the signal only after the next line."""
    if not sys.stdin.isatty():
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    previous = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        select.select([sys.stdin, reading], [], [])
    finally:
        signal.set_wakeup_fd(previous)
        os.close(reading)
        os.close(writing)


@contextlib.contextmanager
def _noticed_at_once(interrupt: Interrupt) -> Iterator[None]:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def watch():
        while arrived := os.read(reading, 1):
            if arrived[0] in STOPPING:
                interrupt.notice()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    previous = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        os.close(writing)
        watcher.join()
        os.close(reading)


@contextlib.contextmanager
def unechoed(resumed: Callable[[], None] = lambda: None, typed: bytearray | None = None) -> Iterator[None]:
    """Do not show typed keys. Ctrl-Z gives the shell its echo back.

    Args:
        resumed: called when the program goes on after Ctrl-Z.
        typed: gets the text typed during the block, which neither Ctrl-C nor Ctrl-Z then discards. Without it, the next
            reader of the terminal gets this text.
    """
    with _modes_restored() as before:
        if before is None:
            yield
            return
        import termios

        silent = [*before]
        silent[3] &= ~termios.ECHO
        if typed is not None:
            silent[3] |= termios.NOFLSH

        def suspend(signum, frame):
            if typed is not None:
                typed.extend(_read_typed(before))
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTSTP)  # returns when the shell resumes the program
            signal.signal(signal.SIGTSTP, suspend)
            if _in_foreground():
                termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
            resumed()

        try:
            with _handled([signal.SIGTSTP], suspend):
                termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
                yield
        finally:
            if typed is not None and _in_foreground():
                typed.extend(_read_typed(before))


def _read_typed(modes: list) -> bytes:
    """Read what has been typed, without waiting for a line to end. The caller must set the modes again."""
    import termios

    raw = [*modes[:6], [*modes[6]]]
    raw[3] &= ~(termios.ECHO | termios.ICANON)
    raw[6][termios.VMIN] = raw[6][termios.VTIME] = 0
    termios.tcsetattr(sys.stdin, termios.TCSANOW, raw)
    return b"".join(iter(lambda: os.read(sys.stdin.fileno(), 4096), b""))


@contextlib.contextmanager
def _modes_restored() -> Iterator[list | None]:
    """Yields the terminal's modes and restores them afterwards; None if this process must not set them."""
    if not _in_foreground():
        yield None
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    try:
        yield before
    finally:
        if _in_foreground():
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def _in_foreground() -> bool:
    """Whether this process is in the foreground of a Unix terminal. In the background, setting its modes would stop it.
    False once the terminal has hung up."""
    with contextlib.suppress(ImportError, OSError, ValueError, AttributeError):
        import termios  # noqa: F401

        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    return False
