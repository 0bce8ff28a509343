"""The engine's messages, as `nanopage chat` shows them: warnings, what is marked `for_user`, and with --verbose the
rest, never within a reply."""

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
    """Print these messages, or all of them if `verbose`, instead of what the engine's own handler prints."""
    handler = _Said()
    handler.addFilter(lambda record: verbose or record.levelno >= logging.WARNING or hasattr(record, "for_user"))
    LOGGER.handlers = [handler]


@contextlib.contextmanager
def held_log() -> Iterator[None]:
    """Messages wait until the block is left."""
    handlers, held = LOGGER.handlers, _Held()
    LOGGER.handlers = [held]
    try:
        yield
    finally:
        LOGGER.handlers = handlers
        for record in held.records:
            LOGGER.handle(record)
