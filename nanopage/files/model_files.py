"""Reading a model's files without trusting them: what cannot be read is an error that names the file."""

import json
import math
import os
import re
import reprlib
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanopage import escaped

MAX_TEXT = 2**25  # bytes of a JSON file or a template; the index of a checkpoint with 160,000 tensors has 2**24
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def check_file(path: Path) -> None:
    """Check that `path` is a regular file, or a link to one: opening a FIFO or a device could block forever.

    Raises: FileNotFoundError, ValueError; both name the file.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise FileNotFoundError(f"no such file: {path}") from None
    except (OSError, ValueError) as error:  # ValueError: the name has a null character
        raise _cannot_read(path, error) from None
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} is not a regular file")


def exists(path: Path) -> bool:
    """Whether there is anything at this path. A dangling link counts, so that reading it reports the error."""
    return os.path.lexists(path)


def read_text(path: Path, most: int | None = None) -> str:
    """The contents of a UTF-8 file.

    Args: most: bytes of the file; None: MAX_TEXT. Raises: FileNotFoundError, ValueError; both name the file.
    """
    most = MAX_TEXT if most is None else most
    check_file(path)
    try:
        with memory_errors(path), open(path, "rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise _cannot_read(path, error) from None
    if len(data) > most:
        raise ValueError(f"{path} is larger than {most >> 20} MiB, too large for a file of its kind")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. NaN and a key that occurs twice are errors: readers disagree on what they mean. So is a lone
    surrogate, which is not text. Infinity is no JSON either, but transformers 4 wrote it.

    Raises: FileNotFoundError, ValueError; both name the file.
    """
    data = _read_value(path)
    if not isinstance(data, dict):
        raise ValueError(f"{path} is not a JSON object")
    return data


def read_json_list(path: Path) -> list:
    """A JSON array. Raises: as `read_json`."""
    data = _read_value(path)
    if not isinstance(data, list):
        raise ValueError(f"{path} is not a JSON array")
    return data


def _read_value(path: Path) -> Any:
    text = read_text(path)
    try:
        with memory_errors(path):
            return parse_json(text)
    except (ValueError, RecursionError) as error:  # not JSON, or beyond Python's limits
        raise ValueError(f"{path} is not valid JSON: {error}") from None


def parse_json(text: str) -> Any:
    """The value of a JSON text, with the errors of `read_json`. Raises: ValueError, RecursionError."""
    value = json.loads(text, parse_constant=_constant, object_pairs_hook=_unique)
    if SURROGATE.search(text):
        plain = json.dumps(value, ensure_ascii=False)
        if (at := find_surrogate(plain)) >= 0:
            raise ValueError(f"it has the lone surrogate {plain[at]!a}")
    return value


def is_plain_name(name: object) -> bool:
    """Whether a value of a file names something in the same directory."""
    plain = isinstance(name, str) and name not in ("", "..") and Path(name).name == name
    return plain and len(str(name)) <= 255 and str(name).isprintable()


@contextmanager
def memory_errors(place: object) -> Iterator[None]:
    """Let each MemoryError name the file that is read: `place` is put before its text, if not in it already. The
    RuntimeError that torch raises when it cannot allocate memory becomes a MemoryError, too."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error)
        is_of_torch = "allocate memory" in text or type(error).__name__ == "OutOfMemoryError"
        if not (isinstance(error, MemoryError) or is_of_torch):
            raise
        if str(place) not in text:
            text = f"{place}: {text or 'there is too little memory to read it'}"
        raise MemoryError(text) from None


@contextmanager
def rust_errors(place: str) -> Iterator[None]:
    """Turn what the tokenizers library raises into a ValueError that begins with `place`: bare Exceptions and, where
    its Rust code panics, a BaseException that no `except Exception` catches."""
    try:
        yield
    except MemoryError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # KeyboardInterrupt and the like
        raise ValueError(f"{place}: {escaped(str(error)[:300])}") from error


def find_surrogate(text: str) -> int:
    """The place of the first lone surrogate, which cannot be encoded; -1 if there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return -1


def shown(value: object) -> str:
    """A value for an error message: its repr, shortened."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 100
    try:
        return short.repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return type(value).__name__


def listed(names: Collection[str], most: int = 8) -> str:
    """The first names, for an error message, and how many others there are."""
    others = f" and {len(names) - most} others" if len(names) > most else ""
    return ", ".join([*names][:most]) + others


def _constant(name: str) -> float:
    if name == "Infinity":
        return math.inf
    raise ValueError(f"{name} is not a JSON value")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"the key {shown(name)} occurs twice")
        values[name] = value
    return values


def _cannot_read(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}")
