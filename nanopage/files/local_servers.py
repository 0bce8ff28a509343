"""The servers of this user on this machine. Each listens on a Unix socket in a private directory. A JSON file beside it
says what it serves, so that `nanopage chat` can use the model that a server has loaded (docs/chat.md)."""

import contextlib
import os
import secrets
import socket
import struct
from pathlib import Path
from typing import Any

import msgspec

from nanopage.files.model_files import read_text
from nanopage.files.private_files import cache_directory, check_private, make_private

MAX_BYTES = 1 << 20  # of a file that describes a server
CONNECT_SECONDS = 1.0  # to a server that is busy
MODEL_FILES = (".json", ".jinja", ".safetensors", ".gguf")


class LocalServer(msgspec.Struct, frozen=True):
    """What a server serves.

    host: the machine; a home directory may be shared by several.
    started: seconds since 1970.
    model: the identity of the model (see inventory.identity).
    name: its name in requests.
    path, files: where it was read from, and what was there (see `fingerprint`).
    options: of EngineConfig, without the model.
    needs_key: whether requests need an API key.
    has_template, sees_images: whether the model has a chat template, and whether it sees images.
    """

    host: str
    pid: int
    version: str
    started: float
    model: str
    name: str
    path: str
    files: dict[str, tuple[int, int]]
    options: dict[str, Any]
    needs_key: bool
    has_template: bool
    sees_images: bool


def new_file() -> Path:
    """The path for the file of a new server, in a directory that is made if needed.

    Raises: PermissionError if another user owns the directory or may write to it; OSError.
    """
    directory = _directory()
    make_private(directory)
    local_servers()  # removes what killed servers have left
    return directory / f"{os.getpid()}-{secrets.token_hex(4)}.json"


def socket_of(file: Path) -> Path:
    """The socket of the server that a file describes."""
    return file.with_suffix(".sock")


def publish(file: Path, server: LocalServer) -> None:
    """Write the file of a server that listens. The file appears whole or not at all. Raises: OSError."""
    scratch = file.with_suffix(".new")
    with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(msgspec.json.encode(server))
    os.replace(scratch, file)


def withdraw(file: Path) -> None:
    """Remove the files of a server."""
    for path in (file, file.with_suffix(".new"), socket_of(file)):
        with contextlib.suppress(OSError):
            path.unlink()


def local_servers() -> list[tuple[Path, LocalServer]]:
    """The servers of this user that listen on this machine with their files, the latest first. Removes the files of
    servers that were killed.

    Raises: PermissionError if another user owns the directory, or a file in it, or may write to it; OSError.
    """
    directory, found = _directory(), []
    if not directory.is_dir():
        return []
    make_private(directory)
    for file in directory.glob("*.json"):
        try:
            check_private(file)
            server = msgspec.json.decode(read_text(file, MAX_BYTES), type=LocalServer)
        except (FileNotFoundError, ValueError):  # it has just ended, or is of another version
            continue
        if server.host != os.uname().nodename:
            continue
        try:
            connect(socket_of(file), CONNECT_SECONDS).close()
            found.append((file, server))
        except (ConnectionRefusedError, FileNotFoundError):
            withdraw(file)
        except OSError:  # it hangs, or is not ours
            continue
    return sorted(found, key=lambda each: each[1].started, reverse=True)


def connect(path: Path, seconds: float) -> socket.socket:
    """A connection to a server's socket. Raises: OSError; PermissionError if another user listens there."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(seconds)
        sock.connect(str(path))
        check_peer(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def check_peer(sock: socket.socket) -> None:
    """Raises: PermissionError if another user is at the other end of a Unix socket. Only Linux says who it is.
    Elsewhere, the private directory keeps others out."""
    if not hasattr(socket, "SO_PEERCRED"):
        return
    size = struct.calcsize("iII")  # pid, uid, gid
    _, user, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if user != os.geteuid():
        raise PermissionError(f"the other end of the socket belongs to user {user}, not to you (user {os.geteuid()})")


def fingerprint(model: Path) -> dict[str, tuple[int, int]]:
    """The size and the time of change in nanoseconds of each file of a model, by name. They show whether the model has
    changed since it was loaded. Raises: OSError."""
    files = [file for file in model.iterdir() if file.suffix in MODEL_FILES] if model.is_dir() else [model]
    return {file.name: ((status := file.stat()).st_size, status.st_mtime_ns) for file in sorted(files)}


def _directory() -> Path:
    """`$XDG_RUNTIME_DIR/nanopage`, or `run` in the cache directory."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(base) / "nanopage" if os.path.isabs(base) else cache_directory() / "run"
