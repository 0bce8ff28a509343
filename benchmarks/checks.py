"""Checks before a model is loaded. A wrong option ends the program with a message that names it, and exit code 2.

`check_longest` alone runs later, because it needs the model, and ends with exit code 1.
"""

import reprlib
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import typer

from benchmarks.report import errors_by_name
from nanopage.config.model import ModelConfig
from nanopage.config.options import EngineConfig
from nanopage.terminal.text import printable

MAX_REQUESTS = 1_000_000
MAX_ITERATIONS = 1_000
MAX_TOKENS = 100_000_000  # in all prompts together: as Python integers they take some 4 GB
MAX_BLOCKS = 1_000_000  # in a simulated KV cache: the lists of each replica take some 40 MB
MAX_VALIDATED = 10_000  # requests in a run that is compared with its simulation
MAX_SEED = 2**64 - 1
MAX_SECONDS = 7 * 24 * 3600.0  # from the first arrival to the last


def refuse(message: str, option: str | Sequence[str]) -> NoReturn:
    """Raise typer.BadParameter for one option, or for several that are wrong together."""
    raise typer.BadParameter(printable(message), param_hint=option) from None


def shown(value: Any) -> str:
    """`repr` of a value from outside, cut to a readable length."""
    return reprlib.repr(value)


def check_choice(value: str | None, choices: Sequence[str], option: str) -> None:
    """Refuse everything but None and the choices."""
    if value is not None and value not in choices:
        refuse(f"{shown(value)} is not one of: {', '.join(choices)}", option)


def check_engine(switches: dict[str, Any]) -> None:
    """Refuse what EngineConfig refuses, and name the option.

    Args:
        switches: options of EngineConfig.
    """
    for name, value in switches.items():
        try:
            EngineConfig(**{name: value})
        except (ValueError, TypeError) as error:
            refuse(str(error), f"--{name.replace('_', '-')}")
    try:
        EngineConfig(**switches)
    except ValueError as error:  # of several options together
        refuse(str(error), [])


def check_server(base_url: str, switches: dict[str, Any], plot_file: Path | None) -> None:
    """Refuse a --base-url that is not a URL, and options that only an engine in this process could follow.

    Args:
        switches: options of EngineConfig.
        plot_file: the file of --plot, which draws the queues of an engine.
    """
    try:
        url = urllib.parse.urlsplit(base_url)
        valid = url.scheme in ("http", "https") and bool(url.hostname) and (url.port or 1) > 0
    except ValueError:  # a port that is no number
        valid = False
    if not valid or url.query or url.fragment or url.username:
        refuse(f"{shown(base_url)} is not a URL such as http://127.0.0.1:8000", "--base-url")
    defaults = EngineConfig()
    for name, value in switches.items():
        if value != getattr(defaults, name):
            option = "--eager" if name == "enforce_eager" else f"--{name.replace('_', '-')}"
            refuse("is for an engine in this process: the server of --base-url has its own options", option)
    if plot_file is not None:
        refuse("draws the queues of an engine in this process; with --base-url there is none", "--plot")


def check_folder(folder: Path, option: str) -> Path:
    """The absolute path of an existing folder."""
    try:
        folder = folder.expanduser().absolute()
        found = folder.is_dir()
    except (OSError, RuntimeError) as error:  # RuntimeError: "~name" without a user of that name
        refuse(f"{folder}: {error}", option)
    if not found:
        refuse(f"no such folder: {folder}", option)
    return folder


def find_environments(folder: Path | None) -> Path:
    """The folder that --environments names, or the default folder of peers."""
    from nanopage.files.private_files import cache_directory

    return cache_directory() / "peers" if folder is None else check_folder(folder, "--environments")


def find_path(model: str | None) -> Path:
    """The model's path. Exit code 2 for a --model that does not exist."""
    from nanopage.weights import hub

    with errors_by_name():
        try:
            return hub.resolve(model)
        except (OSError, RuntimeError, ValueError) as error:
            if model is None:  # the default model could not be fetched
                raise
            refuse(str(error), "--model")


def find_model(model: str | None) -> tuple[Path, ModelConfig]:
    """The model's path and its config.json. Exit code 2 for a --model that does not exist, 1 for a broken one."""
    from nanopage.weights import loader

    path = find_path(model)
    with errors_by_name():
        return path, loader.read_config(path)


def check_lengths(lengths: list[tuple[int, int]], config: ModelConfig, options: str | Sequence[str]) -> None:
    """Refuse requests that are longer than the model's context, or too many tokens in all.

    Args:
        lengths: tokens in and out of each request.
        options: the options that set the lengths.
    """
    longest, limit = max(i + o for i, o in lengths), config.max_position_embeddings
    if longest > limit:
        refuse(f"{longest} tokens are more than the model's {limit}", options)
    if (total := sum(i for i, _ in lengths)) > MAX_TOKENS:
        refuse(f"the prompts have {total:,} tokens in all: at most {MAX_TOKENS:,}", options)


def check_longest(lengths: list[tuple[int, int]], max_model_len: int, holder: str) -> None:
    """Raise ValueError if the longest request has more than `max_model_len` tokens in prompt and output.

    Args: holder: what sets this limit, for the message, such as "the KV cache holds".
    """
    longest = max(i + o for i, o in lengths)
    if longest > max_model_len:
        raise ValueError(f"{longest} tokens of a request are more than {holder}, {max_model_len}")
