"""EngineArgs and FlexibleArgumentParser: an EngineConfig from vLLM's options or from a command line."""

import argparse
import dataclasses
import json
import sys
import typing

from nanopage.config.options import EngineConfig
from nanopage.vllm.options import accept_engine

if typing.TYPE_CHECKING:
    from nanopage.engine.engine import LLMEngine


class EngineArgs(EngineConfig):
    """An EngineConfig that also takes the options of vLLM that change nothing (see options.py).

    Raises: TypeError for an option that does not exist, and what EngineConfig raises.
    """

    def __init__(self, **options):
        super().__init__(**accept_engine("EngineArgs()", options, option_names()))

    def create_engine(self) -> "LLMEngine":
        """An engine with these options. Raises as `nanopage.build.build_engine`."""
        from nanopage.build import build_engine  # imports torch, which parsing options does not need

        return build_engine(self)

    @staticmethod
    def add_cli_args(parser):
        """Add the options of EngineConfig to a parser, or to an argument group. Returns `parser`."""
        kinds = typing.get_type_hints(EngineConfig)
        for field in dataclasses.fields(EngineConfig):
            kind, option = _kind(kinds[field.name]), "--" + field.name.replace("_", "-")
            if kind is bool:
                parser.add_argument(option, action=argparse.BooleanOptionalAction, default=field.default)
            else:
                parser.add_argument(option, type=_json_object if kind is dict else kind, default=field.default)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        """Make EngineArgs from the arguments of a parser with `add_cli_args`."""
        return cls(**{name: getattr(args, name) for name in option_names()})


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser that also takes --max_model_len for --max-model-len, as vLLM's does."""

    def parse_known_args(self, args=None, namespace=None):
        """Parse arguments, by default those of the program."""
        arguments = sys.argv[1:] if args is None else args
        return super().parse_known_args([_with_dashes(argument) for argument in arguments], namespace)


def option_names() -> list[str]:
    """The names of EngineConfig's options."""
    return [field.name for field in dataclasses.fields(EngineConfig)]


def _kind(annotation) -> type:
    """The type of an option that may be None, or one of several names."""
    for kind in (str, bool, int, float, dict):
        if annotation is kind or kind in typing.get_args(annotation):
            return kind
    return str  # a Literal


def _json_object(text: str) -> dict:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _with_dashes(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value
