"""Options of models that programs of the server have in common: of one model, with its loading, and of several."""

import argparse
import importlib
import logging
import math
import os
import re
from pathlib import Path
from typing import Any

from nanopage.aio.async_llm import AsyncLLM
from nanopage.grammar.tool_formats import FORMATS
from nanopage.server.adapters import parse_modules
from nanopage.server.app import changed_defaults
from nanopage.server.state import ServerState
from nanopage.server.tools import FINISH_REASONS, ToolOptions
from nanopage.startup.imports import quick_imports
from nanopage.vllm.engine_args import EngineArgs
from nanopage.weights import hub

logger = logging.getLogger("nanopage")

SECONDS_TO_CLOSE = 5  # at shutdown, for clients to read what was sent and for a step to end
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


def positive(text: str) -> int:
    """The type of an option that counts something."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return int(text)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add --config, for `read_options`, MODEL, and a group with names of the model, adapters and calls of tools."""
    parser.add_argument("--config", metavar="FILE", help="YAML file of options, such as `port: 8080`")
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    add = parser.add_argument_group("model").add_argument
    add("--served-model-name", nargs="+", help="names of the model in requests")
    text = (
        "most tokens of a reply whose request has no limit (default: as many as the context holds, in "
        "/v1/completions 16)"
    )
    add("--default-max-tokens", type=positive, metavar="N", help=text)
    add("--lora-modules", nargs="+", default=[], metavar="NAME=PATH", help="adapters that requests name as models")
    add("--prompt-adapters", nargs="+", default=[], metavar="NAME=PATH", help="soft prompts, which are named likewise")
    text = "how the model writes calls of tools (default: found in its chat template)"
    add("--tool-call-parser", choices=FORMATS, help=text)
    text = "finish_reason of a reply whose call the request has named (default: %(default)s)"
    add("--named-tool-finish-reason", choices=FINISH_REASONS, default="stop", help=text)
    add("--enable-auto-tool-choice", action="store_true", help="accepted for vLLM's commands: tools always work")


class Model:
    """The model of a program, as its options say.

    engine_args: of its engine.
    settings: fields of ServerState.
    modules, soft_prompts: name of an adapter -> its path.

    Raises: ValueError for options that contradict each other.
    """

    def __init__(self, args: argparse.Namespace):
        if args.model_tag is not None and args.model is not None:
            raise ValueError(f"the model is given twice: {args.model_tag}, and --model {args.model}")
        args.model = args.model_tag if args.model is None else args.model
        self.modules = parse_modules("--lora-modules", args.lora_modules)
        self.soft_prompts = parse_modules("--prompt-adapters", args.prompt_adapters)
        self.engine_args = EngineArgs.from_cli_args(args)
        names = args.served_model_name or [hub.name_of(args.model)]
        self.settings: dict[str, Any] = {
            "model_names": names,
            "default_max_tokens": args.default_max_tokens,
            "tool_options": ToolOptions(args.tool_call_parser, args.named_tool_finish_reason),
        }
        check_adapters(args, [*self.modules, *self.soft_prompts], names)

    def load(self, state: ServerState) -> AsyncLLM:
        """Load the model and its adapters, and put them into `state`. Raises: as `nanopage.build.build_engine`."""
        with quick_imports():
            importlib.import_module("nanopage.build")
        llm, adapters = load_engine(self.engine_args), state.adapters
        try:
            adapters.requests |= {name: adapters.check(llm, name, path) for name, path in self.modules.items()}
            for name, path in self.soft_prompts.items():
                adapters.requests[name] = adapters.check_soft_prompt(llm, name, path)
        except BaseException:
            llm.shutdown(SECONDS_TO_CLOSE)
            raise
        state.llm = llm
        return llm


def check_adapters(args: argparse.Namespace, names: list[str], model_names: list[str]) -> None:
    """Raises: ValueError for options of adapters that need others."""
    for name in ("lora_modules", "allow_runtime_lora_updating"):  # run-batch lacks the second one
        if getattr(args, name, None) and not args.enable_lora:
            raise ValueError(f"--{name.replace('_', '-')} needs --enable-lora")
    if args.prompt_adapters and not args.enable_prompt_adapter:
        raise ValueError("--prompt-adapters needs --enable-prompt-adapter")
    if taken := set(names) & set(model_names):
        raise ValueError(f"an adapter cannot have the name of the model: {', '.join(sorted(taken))}")
    if len(set(names)) < len(names):
        raise ValueError("--lora-modules and --prompt-adapters have a name in common")


def load_engine(engine_args: EngineArgs) -> AsyncLLM:
    """Load the model, and log what its requests get by default. Raises: as `nanopage.build.build_engine`."""
    llm = AsyncLLM.from_engine_args(engine_args)
    if changed := changed_defaults(llm):
        logger.info(f"requests without these parameters get those of generation_config.json: {changed}")
    return llm


# Several models


def add_models(parser: argparse.ArgumentParser) -> None:
    """Add the options of several models, apart from --model."""
    add = parser.add_argument_group("several models (see docs/server.md)").add_argument
    add("--models-dir", metavar="DIR", help="serve each subdirectory and each .gguf file as a model")
    text = "most memory of all loaded models, such as 8GiB (default: what is free at the start)"
    add("--models-memory", type=_size, metavar="SIZE", help=text)
    text = "unload a model that has been idle for this time, such as 30s, 5m or 1h; -1: never (default: 5m)"
    add("--keep-alive", type=_duration, metavar="TIME", help=text)


def named_models(args: argparse.Namespace) -> dict[str, str]:
    """The models of a server with several: name -> path. Empty for a server with one. Raises: ValueError for options
    that do not fit, FileNotFoundError for a model that is not there."""
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
