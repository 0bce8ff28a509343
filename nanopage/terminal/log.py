"""The engine's messages, as `nanopage chat` shows them: warnings, messages marked `for_user`, and with --verbose all
others. They never appear within a reply."""

import contextlib
import logging
from collections.abc import Iterator

from nanopage import MAX_MESSAGE, escaped
from nanopage.terminal.text import say

LOGGER = logging.getLogger("nanopage")


class _Said(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(escaped(record.getMessage(), MAX_MESSAGE))


class _Held(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def say_log(verbose: bool) -> None:
    """Print these messages, or all messages if `verbose`, in place of the engine's own handler."""
    handler = _Said()
    handler.addFilter(lambda record: verbose or record.levelno >= logging.WARNING or hasattr(record, "for_user"))
    LOGGER.handlers = [handler]


@contextlib.contextmanager
def held_log() -> Iterator[None]:
    """Hold messages back until the block ends."""
    handlers, held = LOGGER.handlers, _Held()
    LOGGER.handlers = [held]
    try:
        yield
    finally:
        LOGGER.handlers = handlers
        for record in held.records:
            LOGGER.handle(record)
