"""Private files: only this user can have written them. Cached files are checked here before they are loaded."""

import os
import stat
from pathlib import Path


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/nanopage`, by default `~/.cache/nanopage`. As the XDG specification says, a relative path in
    XDG_CACHE_HOME is ignored."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "nanopage"


def private_cache(name: str) -> Path:
    """The directory `name` in the cache directory, made for this user alone.

    Raises: PermissionError if another user owns one of these directories or may write to it.
    """
    for directory in (cache_directory(), cache_directory() / name):
        make_private(directory)
    return directory


def make_private(directory: Path) -> None:
    """Create a directory and its missing parents with mode 0700. Check the directory, but not what is in it.

    Raises:
        PermissionError: another user owns the directory or may write to it.
        OSError: it cannot be created.
    """
    for path in reversed([directory, *directory.parents]):
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)  # another process may create it at the same time
    if not directory.is_dir():
        raise NotADirectoryError(f"{directory} is not a directory")
    _check(directory, directory.stat())


def check_private(path: Path) -> None:
    """Check the owner and the mode of a path and, if it is a directory, of everything in it.

    `path` itself may be a symbolic link; its target is checked. A link inside a directory is refused, because it can
    lead to a place that other users can write to. On Windows nothing is checked: there are no such modes.

    Raises:
        FileNotFoundError: there is no such path.
        PermissionError: another user owns a file or may write to it; the message names the file.
    """
    _check(path, path.stat())
    if not path.is_dir():
        return
    for directory, folders, files in os.walk(path, onerror=_raise):
        for name in folders + files:
            entry = Path(directory, name)
            _check(entry, entry.lstat())


def _check(path: Path, status: os.stat_result) -> None:
    if not hasattr(os, "geteuid"):
        return
    user = os.geteuid()
    if stat.S_ISLNK(status.st_mode):
        raise PermissionError(f"{path} is a symbolic link, which is not allowed here: delete it")
    if status.st_uid != user:
        raise PermissionError(f"{path} belongs to user {status.st_uid}, not to you (user {user}): not used. Delete it")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        raise PermissionError(
            f"{path} is not used: other users may write to it (mode {mode}). Delete it, or run 'chmod go-w' on it if "
            "you know that nobody has changed it"
        )


def _raise(error: OSError) -> None:
    raise error
