"""A line on the terminal that says what is being done while it is being done."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from rich.text import Text

from nanopage.terminal.text import printable, stderr


@contextlib.contextmanager
def spinner(text: str, delay: float = 0.0) -> Iterator[Callable[[str], None]]:
    """Show `text` from `delay` seconds on. Yields a function that changes it. Shows nothing where there is no terminal.
    With a delay, no line flashes up for short work."""
    if not stderr.is_terminal:
        yield lambda text: None
        return
    status = stderr.status(_line(text))
    timer = threading.Timer(delay, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda text: status.update(_line(text))
    finally:
        timer.cancel()
        timer.join()
        status.stop()


def _line(text: str) -> Text:
    line = Text(printable(text).replace("\n", " "))
    line.truncate(max(1, stderr.width - 3), overflow="ellipsis")  # a resize would leave a second row behind
    return line
