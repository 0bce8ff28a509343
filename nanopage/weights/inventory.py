"""What is in the caches: models, compiled code and repacked weights; the short names of models; what may be removed.

The models of the hub are in its own cache, shared with other programs. nanopage's cache directory has the models that
it makes itself, and what it makes again when it is gone.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nanopage.files.model_files import listed, read_json
from nanopage.files.private_files import cache_directory

CARRIED = ("SmolLM2-135M-Instruct", "whisper-tiny.en")  # models that come from the Python package index
PREFIX = "models--"  # of a model's directory in the hub's cache


@dataclass(frozen=True)
class Entry:
    """Files in a cache.

    path: the file, or the directory with all of them.
    num_bytes: on the disk.
    last_used: when the largest file was read or written, in seconds since 1970. Most systems note reading once a day.
    """

    path: Path
    num_bytes: int
    last_used: float


@dataclass(frozen=True)
class StoredModel(Entry):
    """A model in a cache.

    id: its id on the hub, or a name of CARRIED.
    name: what is enough to name it: the last part of the id, unless another model has the same.
    directory: the one with config.json.
    """

    id: str
    name: str
    directory: Path


@dataclass(frozen=True)
class Kept(Entry):
    """Files that nanopage, or the hub's client, makes again when they are needed. kind: what they are."""

    kind: str


@dataclass(frozen=True)
class Description:
    """What a model's small files say.

    quantization: the format of its weights; None: they are floats. context: its length in tokens. chat_template:
    whether there is one. problem: why no family of nanopage runs the model; the other fields may then be None.
    """

    architecture: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    context: int | None = None
    chat_template: bool = False
    problem: str | None = None


def describe(directory: Path) -> Description:
    """Describe a model by its files. What is wrong with them is in `problem`."""
    from nanopage.reading.config import config_from_directory  # importing either takes longer than looking up a name
    from nanopage.text.tokenizer import read_tokenizer_config

    architecture = None
    try:
        names = read_json(directory / "config.json").get("architectures")
        architecture = str(names[0])[:100] if isinstance(names, list) and names else None
        template = "default" in read_tokenizer_config(directory)["chat_templates"]
        config = config_from_directory(directory)
    except (OSError, ValueError) as error:
        return Description(architecture, problem=str(error))
    quantization = None if config.quantization is None else config.quantization.method
    return Description(architecture, str(config.dtype), quantization, config.max_position_embeddings, template)


def full_id(name: str) -> str | None:
    """The hub id that a name means: itself, or that of the downloaded model whose last part it is, in any case.

    Returns: None if it is neither.
    Raises: FileNotFoundError if several models have the name. The message lists them.
    """
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return name
    found = [model for model in hub_models() if _short(model) == name.casefold()]
    if len(found) > 1:
        raise FileNotFoundError(f"{name!r} is the name of several downloaded models, so give one of {listed(found)}")
    return found[0] if found else None


def bytes_of_weights(path: Path) -> int:
    """Bytes of a model's files of weights."""
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("model.bin")]
    return sum(file.stat().st_size for file in files if not file.name.startswith("consolidated"))  # the same again


def carried_name(model: str) -> str | None:
    """The name in CARRIED that `model` is, in any case; None if it is none of them."""
    return next((name for name in CARRIED if name.lower() == model.lower()), None)


def identity(model: str | None) -> str:
    """An identifier of the model that `--model` names: a path, a hub id, or the name of a model in CARRIED. Does not
    access the hub. Raises: as `full_id`."""
    if model is None:
        return CARRIED[0]
    if (path := Path(os.path.expanduser(model))).exists():
        return str(path.resolve())
    return carried_name(model) or full_id(model) or model


def hub_models() -> dict[str, Path]:
    """The models in the hub's cache: id -> directory there."""
    return {
        path.name.removeprefix(PREFIX).replace("--", "/"): path
        for path in sorted(_hub_cache().glob(f"{PREFIX}*"))
        if (path / "snapshots").is_dir()
    }


def stored_models() -> list[StoredModel]:
    """All models in the caches, by name."""
    places = {name: cache_directory() / "models" / name for name in CARRIED}
    found = [(model, root, root) for model, root in places.items() if root.is_dir()]
    found += [(model, root, snapshot(root)) for model, root in hub_models().items()]
    shorts = [*map(_short, {**places, **hub_models()})]
    return sorted(
        (
            StoredModel(
                root,
                *measure(root),
                model,
                model.rpartition("/")[2] if shorts.count(_short(model)) == 1 or model in CARRIED else model,
                directory,
            )
            for model, root, directory in found
        ),
        key=lambda each: each.name.casefold(),
    )


def find_stored(name: str) -> StoredModel | None:
    """The model in the caches with this name or id, in any case."""
    wanted = name.casefold()
    return next((each for each in stored_models() if wanted in (each.id.casefold(), each.name.casefold())), None)


def kept_files() -> list[Kept]:
    """What can be made again: compiled code, repacked weights, and what was left unfinished."""
    ours = cache_directory()
    patterns = {
        "compiled code": ours.glob("compiled/[!.]*"),
        "repacked weights": (path for path in ours.glob("tiles/*") if path.suffix != ".lock"),
        "converted model": (path for path in ours.glob("models/[!.]*") if path.is_dir() and path.name not in CARRIED),
        "unfinished model": (path for path in ours.glob("models/.*") if path.is_dir()),
        "unfinished download": _hub_cache().glob(f"{PREFIX}*/blobs/*.incomplete"),
    }
    return [Kept(path, *measure(path), kind) for kind, paths in patterns.items() for path in sorted(paths)]


def measure(path: Path) -> tuple[int, float]:
    """Bytes and last use of a file or a directory (see Entry)."""
    files = [Path(folder, name) for folder, _, names in os.walk(path) for name in names] or [path]
    found = []
    for file in files:
        with suppress(OSError):  # another process has removed it
            found.append(file.lstat())
    if not found:
        return 0, 0.0
    largest = max(found, key=lambda status: status.st_size)
    return sum(status.st_size for status in found), max(largest.st_atime, largest.st_mtime)


def used_paths() -> set[str]:
    """The files that processes have mapped, open or locked, and the directories that they run in. Only on Linux, and
    only of processes that this user may look at."""
    return {path for process in Path("/proc").glob("[0-9]*") for path in _used_by(process)}


def is_used(path: Path, used: set[str]) -> bool:
    """Whether `used` has a path, or something in it."""
    whole = os.path.realpath(path)
    return any(each == whole or each.startswith(f"{whole}{os.sep}") for each in used)


def remove(path: Path) -> bool:
    """Remove a file or a directory, unless a process uses it. Returns whether it is gone. Raises: OSError."""
    if is_used(path, used_paths()):
        return False
    if path.is_dir():
        shutil.rmtree(path)
        if path.parent == _hub_cache():
            shutil.rmtree(path.parent / ".locks" / path.name, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    return True


def _used_by(process: Path) -> Iterator[str]:
    with suppress(OSError):
        for line in (process / "maps").read_text(errors="surrogateescape").splitlines():
            yield line.split(maxsplit=5)[-1]
    with suppress(OSError):
        for link in [process / "cwd", *(process / "fd").iterdir()]:
            with suppress(OSError):
                yield os.readlink(link)


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def snapshot(root: Path) -> Path:
    """The snapshot of a model that the hub's client would give: that of "main", else the newest one."""
    with suppress(OSError):
        return root / "snapshots" / (root / "refs" / "main").read_text().strip()
    return max((root / "snapshots").iterdir(), key=lambda path: path.stat().st_mtime, default=root / "snapshots")


def _short(model: str) -> str:
    return model.rpartition("/")[2].casefold()
