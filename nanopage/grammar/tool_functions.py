"""Python functions as tools: their names, docstrings and type hints describe them to the model."""

import importlib.util
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanopage.grammar.tool_definitions import Tool, read_tools

MAX_RESULT = 100_000  # characters of a function's result


def load_functions(file: Path) -> dict[str, Callable]:
    """The functions that a Python file defines, by name, except those that begin with an underscore. Runs the file.

    Raises: ValueError, FileNotFoundError naming the file.
    """
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}")
    spec = importlib.util.spec_from_file_location(f"nanopage_tools_{file.stem}", file)
    if file.suffix != ".py" or spec is None or spec.loader is None:
        raise ValueError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and type hints look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{file} cannot be run: {type(error).__name__}: {error}") from error
    functions: dict[str, Callable] = {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == spec.name and not name.startswith("_")
    }
    if not functions:
        raise ValueError(f"{file} defines no function that does not begin with an underscore")
    return functions


def describe_function(function: Callable) -> Tool:
    """The tool of a function. Its docstring says what it does and, under "Args:", what each argument is.

    Raises: ValueError naming what is missing.
    """
    from transformers.utils import get_json_schema  # takes half a second

    try:
        schema = get_json_schema(function)
    except Exception as error:  # of several kinds
        raise ValueError(f"{function.__name__}(): {error}") from None
    described = schema["function"]
    kept = {name: described[name] for name in ("name", "description", "parameters")}
    return read_tools([{"type": "function", "function": kept}])[0]


def read_arguments(function: Callable, arguments: str) -> dict[str, Any]:
    """The arguments of a call. Raises: ValueError if they are not JSON, or not those that the function takes."""
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the arguments are not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError("the arguments are no object")
    try:
        inspect.signature(function).bind(**values)
    except TypeError as error:
        raise ValueError(f"the arguments are wrong: {error}") from None
    return values


def run_function(function: Callable, arguments: dict[str, Any]) -> str:
    """The result of a call, as text for the model. A string stays as it is, and anything else becomes JSON if possible.
    An exception becomes text, too."""
    try:
        result = function(**arguments)
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        text.encode()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    text = text.encode(errors="replace").decode()
    return text if len(text) <= MAX_RESULT else text[:MAX_RESULT] + " ... (cut)"
