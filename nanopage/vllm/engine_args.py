"""EngineConfig's options on a command line: of argparse, as vLLM has them, and of typer.

Their names, types, defaults and help come from EngineConfig and its docstring.
"""

import argparse
import dataclasses
import difflib
import functools
import inspect
import json
import re
import sys
import typing
from collections.abc import Callable, Iterable

import typer

from nanopage import MAX_MESSAGE, escaped
from nanopage.checks.options import choices_of
from nanopage.checks.vllm_options import accept_engine
from nanopage.config.options import EngineConfig

if typing.TYPE_CHECKING:
    from nanopage.engine.engine import LLMEngine
    from nanopage.engine.token_budget import Use


class EngineArgs(EngineConfig):
    """An EngineConfig that also takes the options of vLLM that change nothing (see checks/vllm_options.py).

    Raises: TypeError for an option that does not exist, and what EngineConfig raises.
    """

    def __init__(self, **options):
        super().__init__(**accept_engine("EngineArgs()", options, option_names()))

    def create_engine(self, use: "Use" = "steps") -> "LLMEngine":
        """An engine with these options. Arguments and errors are those of `nanopage.build.build_engine`."""
        from nanopage.build import build_engine  # imports torch, which parsing options does not need

        return build_engine(self, use=use)

    @staticmethod
    def add_cli_args(parser):
        """Add the options of EngineConfig to a parser, or to an argument group. Returns `parser`."""
        for name, (kind, default, metavar, text) in _options().items():
            option = "--" + name.replace("_", "-")
            given: dict = {"default": default, "help": text.replace("%", "%%")}
            if kind is bool:
                given["action"] = argparse.BooleanOptionalAction
            else:
                parse: dict = {dict: _json_object, list: lambda text: text.split(",")}
                given |= {"type": parse.get(kind, kind), "metavar": metavar}
            if default is not None:
                given["help"] += " (default: %(default)s)"
            parser.add_argument(option, **given)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        """Make EngineArgs from the arguments of a parser with `add_cli_args`."""
        return cls(**{name: getattr(args, name) for name in option_names()})


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser that also takes --max_model_len for --max-model-len, as vLLM's does. An error is two lines."""

    def parse_known_args(self, args=None, namespace=None):
        """Parse arguments, by default those of the program."""
        arguments = sys.argv[1:] if args is None else args
        return super().parse_known_args([_with_dashes(argument) for argument in arguments], namespace)

    def parse_args(self, args=None, namespace=None):
        """As `parse_known_args`. Arguments that are not known are an error, which names options that resemble them."""
        namespace, others = self.parse_known_args(args, namespace)
        if unknown := next((each for each in others if each.startswith("-")), None):
            name = unknown.partition("=")[0]
            self.error(f"no such option: {name}{nearest(name, self._option_string_actions)}")
        if others:
            self.error(f"unrecognized arguments: {' '.join(others)}")
        return namespace

    def error(self, message: str) -> typing.NoReturn:
        """Exit with code 2. The usage, which takes dozens of lines, is left to --help."""
        self.exit(2, f"{self.prog}: error: {escaped(message, MAX_MESSAGE)}\nTry '{self.prog} --help' for help.\n")


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of an error's sentence: the name that a mistyped one resembles; empty if there is none."""
    found = difflib.get_close_matches(name, names, 1)
    return f". Did you mean {found[0]}?" if found else ""


def takes_engine_options(*names: str) -> Callable[[Callable], Callable]:
    """Decorate a command of typer. Options of EngineConfig take the place of its parameter `switches`, which gets their
    values by name. Their help is the first sentence of the docstring; `enforce_eager` is --eager.
    """
    options = _options()

    def decorate(command: Callable) -> Callable:
        parameters = []
        for parameter in inspect.signature(command).parameters.values():
            if parameter.name != "switches":
                parameters.append(parameter)
                continue
            for name in names:
                kind, default, metavar, text = options[name]
                option = "--" + ("eager" if name == "enforce_eager" else name.replace("_", "-"))
                declared = [option] if default is False else []  # others get typer's: --x, or --x/--no-x
                first = text.partition(". ")[0].removesuffix(".") + "."
                annotation: typing.Any = typing.Annotated
                annotation = annotation[kind | None, typer.Option(*declared, metavar=metavar, help=first)]
                parameters.append(parameter.replace(name=name, default=default, annotation=annotation))

        @functools.wraps(command)
        def run(**values):
            return command(switches={name: values.pop(name) for name in names}, **values)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def option_names() -> list[str]:
    """The names of EngineConfig's options."""
    return [field.name for field in dataclasses.fields(EngineConfig)]


def _options() -> dict[str, tuple[type, typing.Any, str | None, str]]:
    """The type of each option apart from None, its default, its choices if it has some, and what the docstring says."""
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", inspect.getdoc(EngineConfig) or "", re.MULTILINE)
    texts = {name: " ".join(text.split()) for name, text in entries}
    kinds = typing.get_type_hints(EngineConfig)
    return {
        field.name: (
            _kind(kinds[field.name]),
            field.default,
            "|".join(choices_of(kinds[field.name])) or None,
            (text := texts.get(field.name, ""))[:1].upper() + text[1:],
        )
        for field in dataclasses.fields(EngineConfig)
    }


def _kind(annotation) -> type:
    """The type of an option that may be None, or one of several names."""
    for kind in (str, bool, int, float, dict, list):
        if kind in (typing.get_origin(part) or part for part in (annotation, *typing.get_args(annotation))):
            return kind
    return str  # a Literal


def _json_object(text: str) -> dict:
    if re.fullmatch(r"\w+=\d{1,9}(,\w+=\d{1,9})*", text):  # vLLM's other form: image=4
        return {name: int(number) for name, number in (part.split("=") for part in text.split(","))}
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
