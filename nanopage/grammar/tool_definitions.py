"""Tools as clients describe them: OpenAI's `tools` and `tool_choice`."""

import re
from dataclasses import dataclass
from typing import Any

MAX_TOOLS = 128
MAX_NAME = 128  # Anthropic's limit; OpenAI's is 64


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Args:
        parameters: JSON schema of an object that holds the arguments.
        strict: whether every call must follow that schema.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool = False

    def describe(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        function["parameters"] = self.schema()
        return {"type": "function", "function": function}

    def schema(self) -> dict[str, Any]:
        """JSON schema of the arguments."""
        return {"type": "object", "properties": {}} if self.parameters is None else self.parameters


@dataclass(frozen=True)
class ToolChoice:
    """Whether the model calls tools.

    Args:
        kind: "auto" leaves it to the model, "required" means at least one call, "none" means no call, and "named" means
            one call of the tool `name`.
    """

    kind: str
    name: str | None = None


def read_tools(value: Any) -> list[Tool]:
    """Args: value: a list of {"type": "function", "function": {"name", "description", "parameters", "strict"}}.

    Raises: ValueError, TypeError naming what is wrong.
    """
    if not isinstance(value, list):
        raise TypeError("tools must be a list")
    if not value:
        raise ValueError("tools must not be empty: leave it out")
    if len(value) > MAX_TOOLS:
        raise ValueError(f"tools has {len(value):,} entries: at most {MAX_TOOLS} are allowed")
    tools: list[Tool] = []
    for i, entry in enumerate(value):
        tool = _read_tool(entry, f"tools[{i}]")
        if any(tool.name == other.name for other in tools):
            raise ValueError(f"tools[{i}].function.name: there is another tool {tool.name!r}")
        tools.append(tool)
    return tools


def _read_tool(entry: Any, place: str) -> Tool:
    if not isinstance(entry, dict):
        raise TypeError(f"{place} must be an object")
    if entry.get("type") != "function":
        raise ValueError(f"{place}.type must be 'function'")
    function = entry.get("function")
    if not isinstance(function, dict):
        raise TypeError(f"{place}.function must be an object")
    place = f"{place}.function"
    name, description = function.get("name"), function.get("description") or ""
    parameters, strict = function.get("parameters"), function.get("strict") or False
    if not isinstance(name, str) or not re.fullmatch(rf"[a-zA-Z0-9_.-]{{1,{MAX_NAME}}}", name):
        raise ValueError(f"{place}.name must be 1 to {MAX_NAME} letters, digits, underscores, dots or dashes")
    if not isinstance(description, str):
        raise TypeError(f"{place}.description must be a string")
    if not isinstance(strict, bool):
        raise TypeError(f"{place}.strict must be true or false")
    if parameters is not None and not isinstance(parameters, dict):
        raise TypeError(f"{place}.parameters must be a JSON schema")
    if parameters and parameters.get("type", "object") != "object":
        raise ValueError(f"{place}.parameters.type must be 'object'")
    return Tool(name, description, parameters or None, strict)


def read_tool_choice(value: Any, tools: list[Tool]) -> ToolChoice:
    """Args: value: "none", "auto", "required" or {"type": "function", "function": {"name": ...}}; None for the default.

    Raises: ValueError, TypeError naming what is wrong.
    """
    if value is None:
        return ToolChoice("auto" if tools else "none")
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise ValueError("tool_choice must be 'none', 'auto', 'required' or an object that names a function")
        if value == "required" and not tools:
            raise ValueError("tool_choice='required' needs tools")
        return ToolChoice(value if tools else "none")
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or value.get("type") != "function" or not isinstance(function.get("name"), str):
        raise TypeError('tool_choice must be a string, or {"type": "function", "function": {"name": ...}}')
    if not any(tool.name == function["name"] for tool in tools):
        raise ValueError(f"tool_choice: {function['name'][:MAX_NAME]!r} is not one of the tools")
    return ToolChoice("named", function["name"])
