"""Options of a server with several models: which models there are, and where their files are."""

import argparse
import logging
import math
import os
import re
from pathlib import Path

from nanopage.server.adapters import parse_modules
from nanopage.weights import hub
from nanopage.weights.inventory import bytes_of_weights, stored_models

logger = logging.getLogger("nanopage")

UNITS = {"MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30}
SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}
# Options that do not work with several models -> why.
REFUSED = {
    "model_tag": "give --model NAME=PATH",
    "served_model_name": "the names are those of --model NAME=PATH",
    "lora_modules": "an adapter belongs to one model",
    "prompt_adapters": "a soft prompt belongs to one model",
    "allow_runtime_lora_updating": "an adapter belongs to one model",
    "allow_sleep": "models are loaded and unloaded by need",
    "view": "the live view shows one engine",
    "replicas": "replicas have one model",
}


def add_models_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of several models, apart from --model."""
    group = parser.add_argument_group("several models (see docs/server.md)")
    group.add_argument("--models-dir", metavar="DIR", help="serve each subdirectory and each .gguf file as a model")
    group.add_argument(
        "--models-memory",
        type=_size,
        metavar="SIZE",
        help="most memory of all loaded models, such as 8GiB (default: what is free at the start)",
    )
    group.add_argument(
        "--keep-alive",
        type=_duration,
        metavar="TIME",
        help="unload a model that has been idle for this time, such as 30s, 5m or 1h; -1: never (default: 5m)",
    )


def named_models(args: argparse.Namespace) -> dict[str, str]:
    """The models of a server with several: name -> path. Empty for a server with one.

    Raises: ValueError for options that do not fit, FileNotFoundError for a model that is not there.
    """
    given = args.model or []
    named = [value for value in given if "=" in value and not os.path.exists(os.path.expanduser(value))]
    if len(given) < 2 and not named and args.models_dir is None:
        for option in ("models_memory", "keep_alive"):
            if getattr(args, option) is not None:
                name = option.replace("_", "-")
                raise ValueError(f"--{name} needs several models: --model NAME=PATH, or --models-dir")
        return {}
    if plain := [value for value in given if value not in named]:
        raise ValueError(f"--model {plain[0]}: with several models, each needs a name: --model NAME=PATH")
    for option, why in REFUSED.items():
        if getattr(args, option):
            name = "MODEL" if option == "model_tag" else f"--{option.replace('_', '-')}"
            raise ValueError(f"{name} does not work with several models: {why}")
    if args.distributed_executor_backend == "ray":
        raise ValueError("--distributed-executor-backend ray does not work with several models: use mp")
    models = parse_modules("--model", named)
    for name, path in ({} if args.models_dir is None else _models_in(args.models_dir)).items():
        if name in models:
            raise ValueError(f"--models-dir {args.models_dir}: there is a --model {name}={models[name]} as well")
        models[name] = path
    for path in models.values():
        hub.find(path)
    return models


def _models_in(directory: str) -> dict[str, str]:
    """The models in a directory: name -> path. Raises: ValueError."""
    try:
        entries = sorted(Path(directory).expanduser().iterdir())
    except (OSError, RuntimeError) as error:
        raise ValueError(f"--models-dir {directory}: {getattr(error, 'strerror', None) or error}") from None
    models: dict[str, str] = {}
    for entry in entries:
        if entry.name.startswith(".") or not (entry.is_dir() or entry.suffix == ".gguf"):
            continue
        if entry.is_dir() and not (entry / "config.json").is_file():
            logger.warning(f"{entry} is skipped: it has no config.json")
            continue
        name = entry.name.removesuffix(".gguf")
        if not name.isprintable():
            raise ValueError(f"--models-dir {directory}: {entry.name!r} cannot be the name of a model")
        if name in models:
            raise ValueError(f"--models-dir {directory}: {entry.name} and {Path(models[name]).name} have the same name")
        models[name] = str(entry.resolve())
    if not models:
        raise ValueError(f"--models-dir {directory}: there is no model in it")
    return models


def weight_bytes(path: str) -> int:
    """Bytes of a model's files of weights; 0 if they have not been fetched yet."""
    place = Path(os.path.expanduser(path))
    if not place.exists():
        stored = (each for each in stored_models() if path.lower() in (each.id.lower(), each.name.lower()))
        place = next((each.directory for each in stored), place)
    return bytes_of_weights(place)


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(MB|MiB|GB|GiB)", text)
    if match is None or (size := int(float(match[1]) * UNITS[match[2]])) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a size such as 8GiB or 500MB")
    return size


def _duration(text: str) -> float:
    match = re.fullmatch(r"(-1|\d+(?:\.\d+)?)([smh]?)", text)
    if match is None or not math.isfinite(seconds := float(match[1]) * SECONDS[match[2]]):
        raise argparse.ArgumentTypeError(f"{text} is not a time such as 30s, 5m, 1h, or -1")
    return seconds
