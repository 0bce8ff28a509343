"""Chat templates: Jinja from a model's directory, which is not trusted.

Many of Jinja's filters can fill the memory or run for hours, so a separate process renders templates, with limits on
memory, time and output. `template_process.py` runs there, and says what templates see.
"""

import json
from pathlib import Path
from typing import Any, cast

from nanopage import escaped
from nanopage.files.limited_process import LimitedProcess, Limits
from nanopage.files.model_files import find_surrogate, shown
from nanopage.text.image_parts import IMAGE, for_template

MAX_CHARACTERS = 8_000_000  # of a template's output. JSON writes a character as at most six bytes

RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
END_MARK = "<|nanopage: the final message ends here|> "  # the space at its end shows whether a template trims messages

PROGRAM = Path(__file__).with_name("template_process.py").absolute()


class TemplateRenderer:
    """Renders chat templates in a separate process, one at a time. Threads may share it."""

    def __init__(self):
        limits = Limits(memory=256 << 20, cpu_seconds=2.0, seconds=30.0, answer=6 * MAX_CHARACTERS + 10_000)
        self.process = LimitedProcess(PROGRAM, ["jinja2", "markupsafe"], limits)

    def start(self) -> None:
        """Start the process before its first template. Raises: RuntimeError as `render`."""
        self.process.start({"characters": MAX_CHARACTERS})

    def render(
        self,
        source: str,
        messages: list[dict],
        add_generation_prompt: bool,
        special_tokens: dict[str, str],
        tools: list[dict] | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: dict | None = None,
    ) -> str:
        """The conversation as the model was trained to see it.

        Args:
            source: the template.
            messages: see `normalize_messages`.
            add_generation_prompt: end with the opening of the assistant's reply.
            special_tokens: their texts by their names in the template, such as "bos_token".
            tools: JSON schemas of the functions that the model may call.
            continue_final_message: end within the last message, where its content ends, so that the model goes on
                with it.
            chat_template_kwargs: more variables of the template, such as enable_thinking; plain JSON.

        Raises:
            TypeError: an argument of the wrong type.
            ValueError: messages of the wrong form; tools or variables that the template does not read; a template that
                fails, does what the sandbox forbids or exceeds a limit.
            RuntimeError: the process cannot be started.
        """
        if not isinstance(source, str):
            raise TypeError(f"chat_template must be a string of Jinja source, not {shown(source)}")
        for name, value in (
            ("add_generation_prompt", add_generation_prompt),
            ("continue_final_message", continue_final_message),
        ):
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, not {shown(value)}")
        if continue_final_message and add_generation_prompt:
            raise ValueError(
                "continue_final_message=True needs add_generation_prompt=False: the model goes on with a message or "
                "begins a new one"
            )
        messages, tools, more = (
            normalize_messages(messages),
            _check_tools(tools),
            _check_variables(chat_template_kwargs),
        )
        if continue_final_message:
            check_final_message(messages)
            messages[-1]["content"] += END_MARK
        messages = for_template(messages, source)
        variables = {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **special_tokens,
            **more,
        }
        request = {"source": source, "variables": variables, "required": [*(["tools"] if tools else []), *more]}
        answer = self.process.ask(request, {"characters": MAX_CHARACTERS})
        for change in (_replace_arguments, _write_arguments):  # `messages` is part of the request
            if "error" in answer and change(messages):
                answer = self.process.ask(request, {"characters": MAX_CHARACTERS})
        if "unread" in answer:
            raise ValueError(f"the chat template does not read {answer['unread']}: it would be ignored")
        if "error" in answer:
            raise ValueError(f"the chat template failed: {escaped(answer['error'])}")
        return _before_end_mark(answer["text"]) if continue_final_message else answer["text"]


def normalize_messages(messages: list[dict]) -> list[dict]:
    """A conversation in the form that templates expect, which is transformers'.

    Args:
        messages: dicts with "role" and "content", and optionally "name", "tool_calls", "tool_call_id" and
            "reasoning_content". The content is a string, or a list of parts {"type": "text", "text": ...}, which are
            joined by newlines, as in vLLM, unless an image is among them, an IMAGE (see image_parts.py). An assistant's
            message needs no content, and its parts may also be {"type": "refusal", "refusal": ...}. The arguments of a
            tool call are an object, the JSON text of one, or whatever else a model has written there, such as JSON that
            a limit has cut off.

    Returns: new messages, with contents that are strings, or lists of parts if there are images. Arguments that are not
        an object stay what they are. For a template that fails on them, the renderer replaces them with {}, and then
        all arguments with JSON text.

    Raises:
        ValueError, TypeError: naming what is wrong.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of at least one {'role': ..., 'content': ...}")
    return [_normalize_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _normalize_message(message: dict, name: str) -> dict:
    if not isinstance(message, dict):
        raise TypeError(f"{name} must be a dict, not {shown(message)}")
    _check_text(message.get("role"), f"{name}['role']")
    if unknown := message.keys() - set(MESSAGE_FIELDS):
        names = ", ".join(sorted(map(shown, unknown)))
        raise ValueError(f"{name} has fields that are not supported: {names:.200}")
    normal = {"role": message["role"], "content": message.get("content")}
    for field in ("name", "tool_call_id", "reasoning_content"):
        if message.get(field) is not None:
            _check_text(message[field], f"{name}[{field!r}]")
            normal[field] = message[field]
    if message.get("tool_calls"):
        if message["role"] != "assistant":
            raise ValueError(f"{name}['tool_calls'] needs the role 'assistant', not {shown(message['role'])}")
        normal["tool_calls"] = _normalize_tool_calls(message["tool_calls"], f"{name}['tool_calls']")
    content = normal["content"]
    if isinstance(content, list):
        kinds = ("text", "refusal") if message["role"] == "assistant" else ("text",)
        parts = [
            part if part == IMAGE else _part_text(part, f"{name}['content'][{i}]", kinds)
            for i, part in enumerate(content)
        ]
        if IMAGE in parts:
            normal["content"] = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
        else:
            normal["content"] = "\n".join(parts)
    elif content is None and message["role"] == "assistant":
        normal["content"] = ""  # as in vLLM
    else:
        _check_text(content, f"{name}['content']")
    return normal


def _part_text(part: dict | str, name: str, kinds: tuple[str, ...]) -> str:
    kind = part.get("type") if isinstance(part, dict) else "text"
    if kind not in kinds:
        known = ", ".join(map(repr, kinds))
        raise ValueError(f"{name} is of type {shown(kind)}, which is not supported; supported: {known}")
    text = part.get(kind) if isinstance(part, dict) else part
    _check_text(text, f"{name}[{kind!r}]" if isinstance(part, dict) else name)
    return cast(str, text)


def check_final_message(messages: list[dict]) -> None:
    """Raises: ValueError for normalized messages whose last cannot be continued."""
    if messages[-1].get("tool_calls"):
        raise ValueError(
            f"messages[{len(messages) - 1}]['tool_calls'] and continue_final_message=True exclude each other: the "
            "model goes on with the content of a message, which comes before its calls"
        )
    if not isinstance(messages[-1]["content"], str):
        raise ValueError("continue_final_message=True does not work with images in the last message")


def _normalize_tool_calls(calls: list[dict], name: str) -> list[dict]:
    if not isinstance(calls, list):
        raise TypeError(f"{name} must be a list, not {shown(calls)}")
    normal = []
    for i, call in enumerate(calls):
        call = _check_json(call, f"{name}[{i}]")
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise TypeError(f"{name}[{i}] must be {{'function': {{'name': ..., 'arguments': ...}}}}")
        normal.append(call | {"function": function | {"arguments": _read_arguments(function.get("arguments"))}})
    return normal


def _read_arguments(arguments: Any) -> Any:
    """The arguments of a call: an object if they are one or are missing, else the value or the text as it is."""
    if isinstance(arguments, str):
        try:
            value = _check_json(json.loads(arguments), "arguments") if arguments.strip() else None
        except (TypeError, ValueError, RecursionError):
            return arguments
        return arguments if isinstance(value, str) else {} if value is None else value
    return {} if arguments is None else arguments


def _replace_arguments(messages: list[dict]) -> bool:
    """Make {} of all arguments that are not an object. Returns whether there were any."""
    others = [function for function in _functions(messages) if not isinstance(function["arguments"], dict)]
    for function in others:
        function["arguments"] = {}
    return bool(others)


def _write_arguments(messages: list[dict]) -> bool:
    """Make JSON text of all arguments. Returns whether there were any."""
    functions = _functions(messages)
    for function in functions:
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return bool(functions)


def _functions(messages: list[dict]) -> list[dict]:
    return [call["function"] for message in messages for call in message.get("tool_calls", ())]


def _check_tools(tools: list[dict] | None) -> list[dict] | None:
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise TypeError(f"tools must be a list of JSON schemas, not {shown(tools)}")
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise TypeError(f"tools[{i}] must be a dict, not {shown(tool)}")
        _check_json(tool, f"tools[{i}]")
    return tools


def _check_variables(variables: dict | None) -> dict:
    if variables is None:
        return {}
    if not isinstance(variables, dict) or not all(isinstance(name, str) for name in variables):
        raise TypeError(f"chat_template_kwargs must be a dict with names as keys, not {shown(variables)}")
    if reserved := sorted(variables.keys() & set(RESERVED)):
        raise ValueError(f"chat_template_kwargs has {', '.join(reserved)}: that is an argument of its own")
    return _check_json(variables, "chat_template_kwargs")


def _check_json(value, name: str):
    """The value after a round trip through JSON, so that the rendering process gets plain JSON only."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        plain = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{name} must be plain JSON: {error!s:.200}") from None
    if find_surrogate(text) >= 0:
        raise ValueError(f"{name} has a lone surrogate, which cannot be encoded")
    return plain


def _before_end_mark(text: str) -> str:
    """The text up to where the content of the final message ends."""
    end = text.rfind(END_MARK.rstrip())
    if end < 0:
        raise ValueError("continue_final_message=True does not work with this chat template: it changes messages")
    return text[:end] if text.startswith(END_MARK, end) else text[:end].rstrip()


def _check_text(text, name: str) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a string, not {shown(text)}")
    if (at := find_surrogate(text)) >= 0:
        raise ValueError(f"{name} has a lone surrogate at character {at}, which cannot be encoded")
