"""Options of a program of the server from its command line, the environment and the file of --config. The first
source that has an option decides.

The file is YAML: a mapping of the options' names, with - or _, to their values. A value is read as on the command line,
from its text as it is written. YAML's types count only within an option that is a JSON object.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from nanopage.vllm.engine_args import nearest

PREFIX = "NANOPAGE_"
# What follows PREFIX in variables of the engine and of tests, which belong to no option.
OTHERS = re.compile("BENCH|COMPILE|HISTORY|LONG_TESTS|ALL_KERNELS|ATTACKS|CLIENTS|FUZZ_.*|SOAK.*")
MAX_BYTES, MAX_DEPTH = 1 << 20, 16  # of a file
FLAGS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


class Setting(NamedTuple):
    """The value of an option that is not from the command line. place: where it is, for an error."""

    option: str
    value: str | list[str] | dict[str, Any]
    place: str


def read_options(
    parser: argparse.ArgumentParser, arguments: list[str], variables: Mapping[str, str]
) -> argparse.Namespace:
    """Parse the arguments of a command line. What they leave out is taken from variables of the environment, such as
    NANOPAGE_PORT, and then from the file of --config. An error ends the program with code 2."""
    args, options = parser.parse_args(arguments), options_of(parser)
    unset = argparse.Namespace(**{action.dest: None for action in parser._actions})
    given = {name for name, value in vars(parser.parse_args(arguments, unset)).items() if value is not None}
    if "model_tag" in given:  # MODEL is another name of --model
        given.add("model")
    try:
        found = {each.option: _convert(options[each.option], each) for each in _from_environment(options, variables)}
        if (file := args.config if args.config is not None else found.get("config")) is not None:
            settings = _from_file(Path(file).expanduser(), options)
            found = {each.option: _convert(options[each.option], each) for each in settings} | found
    except ValueError as error:
        parser.error(str(error))
    for name in found.keys() - given:
        setattr(args, name, found[name])
    return args


def options_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The options that a file may have, by their names there. Options that need a command line are left out."""
    actions = [each for each in parser._actions if each.option_strings and not each.required and each.dest != "help"]
    return {action.dest: action for action in actions}


def variable_of(option: str) -> str:
    """The environment variable of an option."""
    return PREFIX + option.upper()


def unknown_variables(parser: argparse.ArgumentParser, variables: Mapping[str, str]) -> list[str]:
    """A warning for each variable that looks like an option's but is none."""
    found, known = [], {variable_of(option) for option in options_of(parser)}
    for name in sorted(variables):
        option = name.removeprefix(PREFIX)
        if name != option and name not in known and not OTHERS.fullmatch(option):
            meant = nearest("--" + option.lower().replace("_", "-"), parser._option_string_actions)
            found.append(f"the environment variable {name} belongs to no option{meant}")
    return found


def _from_environment(options: dict[str, argparse.Action], variables: Mapping[str, str]) -> Iterator[Setting]:
    """Commas separate the values of an option that takes several. An empty variable counts as unset."""
    for name, action in options.items():
        if text := variables.get(variable_of(name), "").strip():
            several = [part.strip() for part in text.split(",") if part.strip()]
            yield Setting(name, several if _takes_several(action) else text, variable_of(name))


def _from_file(file: Path, options: dict[str, argparse.Action]) -> Iterator[Setting]:
    """Raises: ValueError that names the file and the line."""
    seen = set()
    for key, node in _read_yaml(file):
        place, name = f"{file}, line {key.start_mark.line + 1}", str(key.value).replace("-", "_")
        if name not in options or name == "config":
            raise ValueError(f"{place}: no such option: {name}{nearest(name, options)}")
        if name in seen:
            raise ValueError(f"{place}: {name} is there twice")
        seen.add(name)
        try:
            yield Setting(name, _value_of(node), f"{place}: {name}")
        except (ValueError, yaml.YAMLError) as error:
            raise ValueError(f"{place}: {name}: {getattr(error, 'problem', error)}") from None


def _read_yaml(file: Path) -> list[tuple[yaml.Node, yaml.Node]]:
    """The mapping in a file. Raises: ValueError that names the file, also for what could make a small file large."""
    try:
        with open(file, "rb") as opened:
            data, depth = opened.read(MAX_BYTES + 1), 0
        if len(data) > MAX_BYTES:
            raise ValueError(f"{file} is larger than {MAX_BYTES >> 20} MiB")
        text = data.decode()
        for event in yaml.parse(text, yaml.SafeLoader):
            place = f"{file}, line {event.start_mark.line + 1}"
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:  # what follows is recursive
                raise ValueError(f"{place}: nested more than {MAX_DEPTH} levels deep")
            if getattr(event, "anchor", None) or getattr(event, "tag", None):
                raise ValueError(f"{place}: anchors, aliases and tags are not allowed")
        root = yaml.compose(text, yaml.SafeLoader)
    except OSError as error:
        raise ValueError(f"--config {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8") from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        line = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{file}{line}: {problem.splitlines()[0]}") from None
    if isinstance(root, yaml.MappingNode):
        return root.value
    if root is None:
        return []
    raise ValueError(f"{file}, line {root.start_mark.line + 1}: not a mapping of options to values")


def _value_of(node: yaml.Node) -> str | list[str] | dict[str, Any]:
    """The text of a scalar, the texts of a list, or the objects of a mapping. Raises: ValueError, yaml.YAMLError."""
    if isinstance(node, yaml.MappingNode):
        return _plain(node)
    if isinstance(node, yaml.SequenceNode):
        if not all(isinstance(item, yaml.ScalarNode) for item in node.value):
            raise ValueError("a list of anything but texts")
        return [item.value for item in node.value]
    if node.tag == "tag:yaml.org,2002:null":
        raise ValueError("no value")
    return node.value


def _plain(node: yaml.Node) -> Any:
    """What a node means in YAML, as objects of JSON. Raises: ValueError, yaml.YAMLError."""
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        names = Counter(str(key.value) for key, _ in node.value)
        if (twice := names.most_common(1)) and twice[0][1] > 1:
            raise ValueError(f"{twice[0][0]} is there twice")
        return {str(key.value): _plain(value) for key, value in node.value}
    value = yaml.SafeLoader("").construct_object(node)
    if not isinstance(value, str | int | float | None):  # such as a date
        raise ValueError(f"JSON has no {type(value).__name__}")
    return value


def _takes_several(action: argparse.Action) -> bool:
    return action.nargs == "+" or isinstance(action, argparse._AppendAction)


def _convert(action: argparse.Action, setting: Setting) -> Any:
    """The value of an option, by its type and its choices. Raises: ValueError that names the place."""
    value, place = setting.value, setting.place
    try:
        if isinstance(value, str) and action.nargs == 0:
            if value.lower() not in FLAGS:
                raise ValueError(f"{value!r} is neither true nor false")
            return FLAGS[value.lower()]
        if _takes_several(action) and not isinstance(value, dict):
            return [_convert_text(action, text) for text in ([value] if isinstance(value, str) else value)]
        if isinstance(value, str):
            return _convert_text(action, value)
        found = _convert_text(action, json.dumps(value) if isinstance(value, dict) else ",".join(value))
        if not isinstance(found, type(value)):
            raise ValueError("it takes a single value" if isinstance(value, list) else "it takes no mapping")
        return found
    except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
        links = " (Kubernetes sets it for a Service of this name: enableServiceLinks: false)"
        raise ValueError(f"{place}: {error}{links if str(value).startswith('tcp://') else ''}") from None


def _convert_text(action: argparse.Action, text: str) -> Any:
    value = action.type(text) if callable(action.type) else text
    if action.choices is not None and value not in action.choices:
        raise ValueError(f"{text!r} is not one of {', '.join(map(str, action.choices))}")
    return value
