"""A log in which each line is a JSON object: what is logged, and what anything else prints.

The time is UTC, and `exception` has a whole traceback. Lines that native code writes itself, such as those of a crash,
are not caught.
"""

import io
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TextIO

from nanopage import MAX_MESSAGE, escaped
from nanopage.files.lossy_output import lose_output

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)  # of the call that a message is about

JSON_LOG = "_NANOPAGE_JSON_LOG"  # the environment variable that tells workers to do the same

logger = logging.getLogger("nanopage")


def log_as_json() -> None:
    """From now on, this process and its workers write JSON to stderr, and lose what stderr does not take at once."""
    os.environ[JSON_LOG] = "1"
    lose_output()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter())
    logging.getLogger().handlers = [handler]
    logger.handlers.clear()
    logging.getLogger("nanopage.access").setLevel(logging.INFO)
    logging.getLogger("nanopage.calls").setLevel(logging.WARNING)  # those of nanopage.access say more
    logging.captureWarnings(True)
    sys.excepthook = lambda *info: logger.critical("uncaught exception", exc_info=info)
    threading.excepthook = _log_end_of_thread
    sys.stdout = _Lines(sys.stdout, logging.getLogger("stdout").info)
    sys.stderr = _Lines(sys.stderr, logging.getLogger("stderr").warning)
    logging.getLogger("stdout").setLevel(logging.INFO)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": escaped(record.getMessage(), MAX_MESSAGE),
        }
        if request_id := REQUEST_ID.get():
            fields["request_id"] = request_id
        if record.exc_info:
            fields["exception"] = escaped(self.formatException(record.exc_info), MAX_MESSAGE)
        return json.dumps(fields | getattr(record, "fields", {}))


class _Lines(io.TextIOBase):
    """A stream whose lines are logged. If a line is overwritten, as by a progress bar, only its last state is logged.

    Args: stream: the stream that it replaces. log: logs a line.
    """

    encoding = "utf-8"

    def __init__(self, stream: TextIO, log: Callable[[str], None]):
        self._stream, self._log, self._lock, self._rest = stream, log, threading.Lock(), ""

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            *lines, rest = (self._rest + text).replace("\r\n", "\n").split("\n")
            self._rest = rest.rpartition("\r")[2][-MAX_MESSAGE:]
        for line in lines:
            if shown := line.rpartition("\r")[2].rstrip():
                self._log(shown)
        return len(text)


def _log_end_of_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is not SystemExit:
        name = args.thread.name if args.thread is not None else "a thread"
        logger.critical(f"uncaught exception in {name}", exc_info=(args.exc_type, args.exc_value, args.exc_traceback))  # type: ignore[arg-type]
