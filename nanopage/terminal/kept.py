"""Conversations are kept in private files of the state directory while they go on, so that none is lost."""

import contextlib
import os
from datetime import datetime
from pathlib import Path

from nanopage.terminal.session import Session, write_atomically

MOST = 20  # conversations that are kept; older ones are deleted


def may_keep() -> bool:
    """Whether typed text may be written to disk: not with NANOPAGE_HISTORY=0. Raises ValueError for other values."""
    value = os.environ.get("NANOPAGE_HISTORY", "1")
    if value not in ("", "0", "1"):
        raise ValueError(f"NANOPAGE_HISTORY must be 0 or 1, got {value!r}")
    return value != "0"


class Kept:
    """The file of the present conversation, and the files of earlier conversations.

    Args:
        directory: where the files are; made when first needed.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.begin()

    def begin(self, file: Path | None = None, session: Session | None = None) -> None:
        """Make the next `keep` write another conversation: a new one, or `session`, which was read from `file`.

        A kept `file` is then replaced by a file with a new name, because another terminal may be writing to `file`.
        """
        self._before = file if file is not None and file.parent == self.directory else None
        self._written = session.to_json() if self._before is not None and session is not None else None
        self._file: Path | None = None

    def keep(self, session: Session) -> None:
        """Write the conversation, if there is one and it has changed since the last call. Raises OSError."""
        text = session.to_json()
        if not session.messages or text == self._written:
            return
        if self._file is None:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = self.directory / f"{datetime.now():%Y-%m-%d-%H%M%S-%f}.json"
        write_atomically(self._file, text)
        self._written = text
        if self._before is not None:
            self._before.unlink(missing_ok=True)
            self._before = None
        for old in self._files()[MOST:]:
            old.unlink(missing_ok=True)

    def earlier(self) -> list[Path]:
        """The kept conversations, the latest first, except for the one that this process writes."""
        return [file for file in self._files() if file != self._file]

    def _files(self) -> list[Path]:
        ages = []
        for file in self.directory.glob("[0-9]*.json"):
            with contextlib.suppress(OSError):  # another process has just replaced it
                ages.append((file.stat().st_mtime_ns, file))
        return [file for _, file in sorted(ages, reverse=True)]
