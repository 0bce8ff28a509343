"""Options of the model that `nanopage serve` and `nanopage run-batch` have in common, and its loading."""

import argparse
import logging
from typing import Any

from nanopage.aio.async_llm import AsyncLLM
from nanopage.grammar.tool_formats import FORMATS
from nanopage.server.adapters import parse_modules
from nanopage.server.app import changed_defaults
from nanopage.server.state import ServerState
from nanopage.server.tools import FINISH_REASONS, ToolOptions
from nanopage.vllm.engine_args import EngineArgs
from nanopage.weights import hub

logger = logging.getLogger("nanopage")

SECONDS_TO_CLOSE = 5  # at shutdown, for clients to read what was sent and for a step to end


def positive(text: str) -> int:
    """The type of an option that counts something."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return int(text)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, and a group with names of the model, adapters and calls of tools."""
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    group = parser.add_argument_group("model")
    group.add_argument("--served-model-name", nargs="+", help="names of the model in requests")
    group.add_argument(
        "--default-max-tokens",
        type=positive,
        metavar="N",
        help="most tokens of a reply whose request has no limit (default: as many as the context holds, in "
        "/v1/completions 16)",
    )
    group.add_argument(
        "--lora-modules", nargs="+", default=[], metavar="NAME=PATH", help="adapters that requests name as models"
    )
    group.add_argument(
        "--prompt-adapters", nargs="+", default=[], metavar="NAME=PATH", help="soft prompts, which are named likewise"
    )
    group.add_argument(
        "--tool-call-parser",
        choices=FORMATS,
        help="how the model writes calls of tools (default: found in its chat template)",
    )
    group.add_argument(
        "--named-tool-finish-reason",
        choices=FINISH_REASONS,
        default="stop",
        help="finish_reason of a reply whose call the request has named (default: %(default)s)",
    )
    group.add_argument(
        "--enable-auto-tool-choice", action="store_true", help="accepted for vLLM's commands: tools always work"
    )


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
