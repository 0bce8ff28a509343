"""Files of compiled code in the cache: what they depend on, and whether they are intact.

A directory has the files that were compiled for the same sources, sizes and processor. The name of a file contains a
digest of its contents.
"""

import hashlib
import os
from pathlib import Path

import torch

LOCK = "lock"  # name of the file that a process locks while it compiles


def may_compile() -> bool:
    """Whether NANOPAGE_COMPILE allows compiling. Raises: ValueError for an unknown value."""
    setting = os.environ.get("NANOPAGE_COMPILE")
    if setting not in (None, "", "never"):
        raise ValueError(f"NANOPAGE_COMPILE must be 'never' or not set, got {setting[:100]!r}")
    return setting != "never"


class DamagedFile(Exception):
    """The contents of a compiled file are not what was written."""

    def __init__(self, file: Path):
        super().__init__(f"{file} is damaged")
        self.file = file


def find_file(directory: Path, name: str) -> Path | None:
    """The file of the compiled part `name`, or None. The name of the file contains a digest of its contents."""
    stem = name.removesuffix(".so")
    return next((file for file in sorted(directory.glob(f"{stem}.*.so")) if file.name.count(".") == 2), None)


def find_whole(directory: Path, name: str) -> Path:
    """The file of the compiled part `name`. Raises: DamagedFile; FileNotFoundError if it is gone."""
    file = find_file(directory, name)
    if file is None:
        raise FileNotFoundError(f"{name} has just been removed")
    # Nothing else checks the contents, and damaged code would run.
    if digest(file) != file.name.split(".")[1]:
        raise DamagedFile(file)
    return file


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def processor() -> tuple[list, str]:
    """The CPU, and which of its instructions torch uses: what compiled code depends on."""
    return sorted(torch.cpu.get_capabilities().items()), torch.backends.cpu.get_cpu_capability()
