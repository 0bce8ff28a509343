"""The body of /v1/messages, Anthropic's API, and its conversation as the messages of a chat."""

import re
from typing import Any, ClassVar, Literal

from nanopage.server.errors import ApiError, unsupported
from nanopage.server.fields import USE_CHAT
from nanopage.server.protocol import Body, ChatBody, CommonBody, Integer, Objects, Texts

# Claude Code's note to its provider is no text for the model, and changes with each call: no prefix would be cached.
BILLING = "x-anthropic-billing-header:"
CLIENT_TOOLS = (None, "custom")

BLOCK = ("type", "text", "cache_control", "citations")
KNOWN = {  # where an object is -> the fields that are read there (see fields.py), or have no effect
    "messages[]": ("role", "content"),
    "messages[].content[]": (
        *(*BLOCK, "source", "thinking", "signature", "data", "id", "name", "input", "caller"),
        *("tool_use_id", "content", "is_error"),
    ),
    "messages[].content[].content[]": (*BLOCK, "source"),
    "messages[].content[].source": ("type", "media_type", "data", "url"),
    "messages[].content[].content[].source": ("type", "media_type", "data", "url"),
    "system[]": BLOCK,
    "tools[]": ("type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming"),
    "tool_choice": ("type", "name", "disable_parallel_tool_use"),
}
OF_CHATS = (  # fields whose defaults ask for nothing
    *("n", "best_of", "logprobs", "top_logprobs", "stream_options", "max_completion_tokens", "add_generation_prompt"),
    *("continue_final_message", "enable_thinking", "reasoning_effort", "reasoning", "truncate_prompt_tokens"),
    *("prompt_logprobs", "use_beam_search", "length_penalty", "return_token_ids", "return_tokens_as_token_ids"),
)
KEEPS_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}  # what Claude Code sends
OF_TEMPLATES = {"enable_thinking": "thinking", "reasoning_effort": "output_config.effort"}  # names of a chat, and here
NO_OTHER = "conversations are not edited: the client leaves out what is to be left out"


class ThinkingOptions(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Integer | None = None
    display: Literal["summarized", "omitted"] = "summarized"


class OutputOptions(Body):
    effort: str | None = None
    format: dict[str, Any] | None = None


class MessagesBody(CommonBody):
    """POST /v1/messages. Sampling parameters that Anthropic's endpoint lacks are the same as for a chat."""

    known = KNOWN
    limits = ("max_tokens",)
    refused = ChatBody.refused | {
        **{name: ((ChatBody.model_fields[name].default,), USE_CHAT) for name in OF_CHATS},
        "response_format": ((), "use output_config.format"),
        "output_format": ((), "use output_config.format"),
        "context_management": (({}, {"edits": []}, KEEPS_ALL), NO_OTHER),
        "container": ((), "no code is run"),
        "mcp_servers": (([],), "the client runs the tools"),
        "service_tier": (("auto", "standard_only"), "there is one tier"),
        "speed": (("standard",), "there is one speed"),
        "inference_geo": ((), "the model runs where the server runs"),
    }

    messages: Objects
    max_tokens: Integer
    system: str | Objects | None = None
    stop_sequences: Texts | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputOptions = OutputOptions()
    cache_control: dict[str, Any] | None = None  # prefixes are always cached
    thread: dict[str, Any] | None = None  # refused in a way that the SDK knows
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    stop_in_reasoning: bool = False

    # What templates read, under the names of a chat
    reasoning: ClassVar[dict[str, Any] | None] = None

    @property
    def enable_thinking(self) -> bool | None:
        return None if self.thinking is None else self.thinking.type != "disabled"

    @property
    def reasoning_effort(self) -> str | None:
        return self.output_config.effort


class CountBody(MessagesBody):
    """POST /v1/messages/count_tokens."""

    max_tokens: Integer = 1


class Conversation:
    """A conversation as a chat. Turns of the same role are one message, because templates want roles to alternate.
    Results of tools are messages of their own.

    Args: system: the role of system messages after the first message. Many templates know no system message there.
    Raises: ApiError naming the block.
    """

    def __init__(self, body: MessagesBody, system: str = "system"):
        self.messages: list[dict[str, Any]] = []
        self.places = {"messages": "messages"}  # see `renamed`
        self.names: dict[str, str] = {}  # of the tools, by the ids of their calls
        for block, place in _blocks(body.system or [], "system"):
            if not str(block.get("text")).startswith(BILLING):
                self._add_part("system", _text_part(block, place), place)
        if not body.messages:
            raise ApiError(400, "messages must have at least one message", param="messages")
        for i, message in enumerate(body.messages):
            role, place = message.get("role"), f"messages[{i}]"
            if role not in ("user", "assistant", "system"):
                raise ApiError(400, f"{place}.role must be 'user', 'assistant' or 'system'", param=f"{place}.role")
            blocks = _blocks(message.get("content"), f"{place}.content")
            if role == "assistant":
                self._add_reply(blocks, place)
            elif role == "user":
                self._add_request(blocks, place)
            else:
                is_first = all(each["role"] == "system" for each in self.messages)
                for block, where in blocks:
                    self._add_part("system" if is_first else system, _text_part(block, where), where)
        self.has_system_later = any(message["role"] == "system" for message in self.messages[1:])
        last = self.messages[-1] if self.messages else {}
        self.goes_on = last.get("role") == "assistant"  # the model goes on with the last message
        if self.goes_on and "tool_calls" in last:
            place = f"messages[{len(body.messages) - 1}]"
            raise ApiError(400, f"{place} calls tools: the next message must have their results", param=place)

    def _turn(self, role: str, place: str) -> dict[str, Any]:
        """The message that a turn of this role belongs to."""
        if not self.messages or self.messages[-1]["role"] != role:
            self._append({"role": role, "content": []}, place, f"{place}.content")
        return self.messages[-1]

    def _append(self, message: dict[str, Any], place: str, content: str) -> None:
        path = f"messages[{len(self.messages)}]"
        self.places[path], self.places[f"{path}.content"] = place, content
        self.messages.append(message)

    def _add_part(self, role: str, part: dict, place: str) -> None:
        content = self._turn(role, re.sub(r"(\.content)?\[\d+\]$|\.content$", "", place))["content"]
        self.places[f"messages[{len(self.messages) - 1}].content[{len(content)}]"] = place
        content.append(part)

    def _add_request(self, blocks: list[tuple[dict, str]], place: str) -> None:
        """A turn of the user: first the results of tools, and the images in them, which only users may send."""
        images, results = [], [pair for pair in blocks if pair[0].get("type") == "tool_result"]
        for block, where in results:
            parts = [{"type": "text", "text": "Error:"}] if block.get("is_error") else []
            content, call_id = block.get("content"), text_field(block, "tool_use_id", where)
            message = {"role": "tool", "tool_call_id": call_id, "content": parts}
            if call_id in self.names:
                message["name"] = self.names[call_id]
            self._append(message, where, f"{where}.content")
            for inner, inner_place in _blocks([] if content is None else content, f"{where}.content"):
                if inner.get("type") == "image":
                    images.append((inner, inner_place))
                    continue
                self.places[f"messages[{len(self.messages) - 1}].content[{len(parts)}]"] = inner_place
                parts.append(_text_part(inner, inner_place, "image"))
        others = [pair for pair in blocks if pair[0].get("type") != "tool_result"]
        if others or not results:
            self._turn("user", place)
        for block, where in images + others:
            if block.get("type") == "image":
                part = _image_part(block, where)
            else:
                part = _text_part(block, where, "image", "tool_result")
            self._add_part("user", part, where)

    def _add_reply(self, blocks: list[tuple[dict, str]], place: str) -> None:
        """A turn of the model."""
        message, thoughts = self._turn("assistant", place), []
        for block, where in blocks:
            match block.get("type"):
                case "thinking":
                    thoughts.append(text_field(block, "thinking", where))
                case "redacted_thinking":  # nobody here can read it
                    continue
                case "tool_use":
                    calls = message.setdefault("tool_calls", [])
                    self.places[f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}].function"] = where
                    calls.append(self._call(block, where))
                case _:
                    part = _text_part(block, where, "thinking", "redacted_thinking", "tool_use")
                    self._add_part("assistant", part, where)
        if any(thoughts):
            before = [message["reasoning_content"]] if "reasoning_content" in message else []
            message["reasoning_content"] = "\n".join(before + thoughts)

    def _call(self, block: dict, place: str) -> dict[str, Any]:
        call_id, name, given = text_field(block, "id", place), text_field(block, "name", place), block.get("input")
        if not isinstance(given, dict):
            raise ApiError(400, f"{place}.input must be an object", param=f"{place}.input")
        self.names[call_id] = name
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}


def _blocks(content: Any, place: str) -> list[tuple[dict, str]]:
    """The blocks of a content, and their places. Raises: ApiError."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, place)]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise ApiError(400, f"{place} must be a string or a list of blocks", param=place)
    return [(block, f"{place}[{i}]") for i, block in enumerate(content)]


def text_field(block: dict, name: str, place: str) -> str:
    """A field of an object that must be a string. Raises: ApiError if it is not."""
    if not isinstance(block.get(name), str):
        raise ApiError(400, f"{place}.{name} must be a string", param=f"{place}.{name}")
    return block[name]


def unknown_type(kind: Any, place: str, *supported: str) -> ApiError:
    """A 400 for an object whose type is not one of those supported at this place."""
    known = ", ".join(map(repr, supported))
    text = f"{place} is of type {str(kind)[:50]!r}, which is not supported; supported: {known}"
    return ApiError(400, text, param=f"{place}.type")


def _text_part(block: dict, place: str, *supported: str) -> dict[str, Any]:
    """The part of a text. Args: supported: the other types of blocks that may be here."""
    if block.get("type") != "text":
        raise unknown_type(block.get("type"), place, "text", *supported)
    return {"type": "text", "text": text_field(block, "text", place)}


def _image_part(block: dict, place: str) -> dict[str, Any]:
    source, place = block.get("source"), f"{place}.source"
    if not isinstance(source, dict):
        raise ApiError(400, f"{place} must be an object", param=place)
    if source.get("type") == "url":
        url = text_field(source, "url", place)
    elif source.get("type") == "base64":
        url = f"data:{text_field(source, 'media_type', place)};base64,{text_field(source, 'data', place)}"
    else:
        raise unsupported(f"{place}.type", "images come as 'base64' or 'url'")
    return {"type": "image_url", "image_url": {"url": url}}


def chat_tools(tools: list[Any] | None) -> list[Any] | None:
    """The tools in the form of a chat. Raises: ApiError for tools that the client does not run."""
    found = []
    for i, tool in enumerate(tools or []):
        place = f"tools[{i}]"
        if not isinstance(tool, dict):
            raise ApiError(400, f"{place} must be an object", param=place)
        if tool.get("type") not in CLIENT_TOOLS:
            raise unsupported(f"{place}.type", "tools are functions, which the client runs: give an input_schema")
        if tool.get("defer_loading"):
            raise unsupported(f"{place}.defer_loading", "there is no search for tools")
        function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
        function["parameters"] = tool.get("input_schema")
        found.append({"type": "function", "function": function})
    return found or None


def chat_tool_choice(choice: dict[str, Any] | None) -> str | dict[str, Any] | None:
    """The `tool_choice` in the form of a chat. Raises: ApiError."""
    if choice is None:
        return None
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in ("auto", "any", "none"):
        raise ApiError(400, "tool_choice.type must be 'auto', 'any', 'tool' or 'none'", param="tool_choice.type")
    return "required" if kind == "any" else kind


def chat_form(form: dict[str, Any]) -> dict[str, Any]:
    """A `text.format`, or an `output_config.format`, as the `response_format` of a chat."""
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}
