"""POST /v1/responses, without a store: each call sends its whole conversation."""

import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from nanopage.grammar.tool_pieces import Arguments, Call, Content, Piece, Reasoning
from nanopage.outputs import CompletionOutput, RequestOutput
from nanopage.server.chat import Chat
from nanopage.server.errors import ApiError, renamed, unsupported
from nanopage.server.generation import Generation, changes
from nanopage.server.message_body import chat_form, text_field, unknown_type
from nanopage.server.protocol import ChatBody, CommonBody, ResponsesBody
from nanopage.server.state import ServerState
from nanopage.server.templates import TEMPLATE_FIELDS, template_kwargs

TEXT_PARTS = ("input_text", "output_text", "text")
LOGPROBS = "message.output_text.logprobs"  # in `include`
NAMES = (  # of a chat, and of a response
    (r"\bmax_tokens\b", "max_output_tokens"),
    (r"\b(tools\[\d+\]|tool_choice)\.function\b", r"\1"),  # tools are described without this level
    (r"\bresponse_format\b(\.json_schema(?=\.))?", "text.format"),
)


class Responses:
    """One call: a response, or the events that it comes in. Arguments and errors: as Chat."""

    def __init__(self, state: ServerState, body: ResponsesBody):
        for name, asks in (("top_logprobs", body.top_logprobs > 0), ("include", LOGPROBS in body.include)):
            if asks:
                raise unsupported(name, "for log-probabilities, use /v1/chat/completions")
        if body.response_format is not None:
            raise unsupported("response_format", "use text.format")
        self.body, self.model = body, state.model_name(body.model)
        self.messages, self.places = _messages(body)
        fields: dict[str, Any] = {"messages": self.messages, "max_tokens": body.max_output_tokens}
        for name in (*CommonBody.model_fields, "parallel_tool_calls", *TEMPLATE_FIELDS, "stop_in_reasoning"):
            fields[name] = getattr(body, name)
        fields |= {"tools": _tools(body.tools) or None, "tool_choice": _tool_choice(body.tool_choice)}
        fields["response_format"] = chat_form(body.text.format)
        try:
            self.chat = Chat(state, ChatBody(**fields))
            self.effort = template_kwargs(self.chat.llm, body)[0].get("reasoning_effort")  # None: no template reads it
        except ApiError as error:
            raise renamed(error, self.places, NAMES) from None
        self.id, self.created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self.prompts, self.params, self.items = self.chat.prompts, self.chat.params, _Items(self.chat)
        self.num_events = 0  # events of the stream so far

    async def start(self, entered: Callable[[], None]) -> Generation:
        """Put the conversation into the engine. Arguments and errors: as `generation.start`."""
        try:
            generation = await self.chat.start(entered)
        except ApiError as error:
            raise renamed(error, self.places, NAMES) from None
        generation.rename = lambda error: renamed(error, self.places, NAMES)
        return generation

    def reply(self, outputs: list[RequestOutput]) -> dict:
        """The whole response."""
        (output,) = outputs
        completion = output.outputs[0]
        for piece in self.chat.read(completion)[1]:
            list(self.items.add(piece))
        list(self.items.close(_status(completion)))
        return self._response(output, completion, self.items.done)

    async def chunks(self, generation: Generation) -> AsyncIterator[dict]:
        """The response as it grows."""
        for kind in ("created", "in_progress"):
            yield self._numbered({"type": f"response.{kind}", "response": self._envelope("in_progress")})
        async for change in changes(generation, 1, 1):
            for piece in self.chat.pieces(change):
                for event in self.items.add(piece):
                    yield self._numbered(event)
            if change.completion.finish_reason is not None:
                status = _status(change.completion)
                for event in self.items.close(status):
                    yield self._numbered(event)
                response = self._response(change.output, change.completion, self.items.done)
                yield self._numbered({"type": f"response.{status}", "response": response})

    def failed(self, error: ApiError) -> dict:
        """The last event of a stream that fails."""
        failure = {"code": "server_error", "message": str(error)}
        return self._numbered({"type": "response.failed", "response": self._envelope("failed") | {"error": failure}})

    def _numbered(self, event: dict) -> dict:
        self.num_events += 1
        return event | {"sequence_number": self.num_events - 1}

    def _response(self, output: RequestOutput, completion: CompletionOutput, items: list[dict]) -> dict:
        status = _status(completion)
        self.chat.outputs = [output]
        counts = self.chat.usage()
        response = self._envelope(status) | {
            "output": items,
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                # Writing to the prefix cache costs the client nothing.
                "input_tokens_details": counts["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": counts["completion_tokens_details"],
                "total_tokens": counts["total_tokens"],
            },
        }
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response

    def _envelope(self, status: str) -> dict:
        params, body, choice, tools = self.chat.params, self.body, self.chat.use.choice, self.chat.use.tools
        nulls = ("error", "incomplete_details", "max_tool_calls", "previous_response_id", "usage")
        of_params = ("frequency_penalty", "presence_penalty", "temperature", "top_p")
        of_body = ("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "prompt_cache_key", "user")
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "model": self.model,
            "output": [],
            "background": False,
            "reasoning": {"effort": self.effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "text": {"format": _returned_format(body.text.format)},
            "tool_choice": {"type": "function", "name": choice.name} if choice.kind == "named" else choice.kind,
            "tools": [{"type": "function"} | vars(tool) | {"description": tool.description or None} for tool in tools],
            "top_logprobs": 0,
            "truncation": "disabled",
            **dict.fromkeys(nulls),
            **{name: getattr(params, name) for name in of_params},
            **{name: getattr(body, name) for name in (*of_body, "safety_identifier")},
        }


@dataclass
class _Items:
    """The items of a response: reasoning, messages and calls, one after the other, and the events that they come in."""

    chat: Chat
    done: list[dict] = field(default_factory=list)  # the complete items
    _item: dict | None = None  # the item that grows
    _text: str = ""  # its text so far
    _num_calls: int = 0

    def add(self, piece: Piece) -> Iterator[dict]:
        """The events of a piece."""
        kind = {Reasoning: "reasoning", Content: "message"}.get(type(piece), "function_call")
        if self._item is None or self._item["type"] != kind or isinstance(piece, Call):
            if self._item is not None:
                yield from self.close("completed")
            yield from self._open(kind, piece.name if isinstance(piece, Call) else "")
        if isinstance(piece, Call):
            return
        self._text += piece.text
        if isinstance(piece, Content):
            delta = {"type": "response.output_text.delta", "delta": piece.text, "logprobs": []}
            yield delta | self._where("content_index")
        elif isinstance(piece, Arguments):
            yield {"type": "response.function_call_arguments.delta", "delta": piece.text} | self._where()
        else:
            yield {"type": "response.reasoning_text.delta", "delta": piece.text} | self._where("content_index")

    def close(self, status: str) -> Iterator[dict]:
        """The events at the end of an item. `status` is its status, and the response's if this is the last item."""
        if self._item is None:
            if self.done:
                return
            yield from self._open("message", "")  # a response has at least one item
            assert self._item is not None
        item, text = self._item, self._text
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            done = {"type": "response.function_call_arguments.done", "name": item["name"], "arguments": text}
            yield done | self._where()
        else:
            part = _part(item["type"], text)
            item["content"] = [part]
            done = {"type": f"response.{part['type']}.done", "text": text} | self._where("content_index")
            yield done | ({"logprobs": []} if item["type"] == "message" else {})
            yield {"type": "response.content_part.done", "part": part} | self._where("content_index")
        yield {"type": "response.output_item.done", "output_index": len(self.done), "item": item}
        self.done.append(item)
        self._item, self._text = None, ""

    def _open(self, kind: str, name: str) -> Iterator[dict]:
        self._item = {"type": kind, "status": "in_progress"}
        if kind == "message":
            self._item |= {"id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "content": []}
        elif kind == "reasoning":
            self._item |= {"id": f"rs_{uuid.uuid4().hex}", "summary": [], "content": []}
        else:
            call_id, self._num_calls = self.chat.call_ids[0, self._num_calls], self._num_calls + 1
            self._item |= {"id": f"fc_{uuid.uuid4().hex}", "call_id": call_id, "name": name, "arguments": ""}
        yield {"type": "response.output_item.added", "output_index": len(self.done), "item": self._item}
        if kind != "function_call":
            yield {"type": "response.content_part.added", "part": _part(kind, "")} | self._where("content_index")

    def _where(self, *zeros: str) -> dict:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self.done)} | dict.fromkeys(zeros, 0)


def _status(completion: CompletionOutput) -> str:
    return "incomplete" if completion.finish_reason == "length" else "completed"


def _part(kind: str, text: str) -> dict:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _tools(tools: list[Any]) -> list[Any]:
    """The tools in the form of a chat. Raises: ApiError for tools that are not functions."""
    found = []
    for i, tool in enumerate(tools):
        if isinstance(tool, dict):
            if tool.get("type") != "function":
                raise unsupported(f"tools[{i}].type", "tools are functions, which the client runs")
            tool = {"type": "function", "function": {name: tool[name] for name in tool if name != "type"}}
        found.append(tool)
    return found


def _tool_choice(choice: str | dict | None) -> str | dict | None:
    if isinstance(choice, dict) and "function" not in choice:
        return {"type": choice.get("type"), "function": {"name": choice.get("name")}}
    return choice


def _returned_format(text_format: dict[str, Any]) -> dict[str, Any]:
    """A `text.format` with all fields that its type has."""
    missing = {"name": "", "description": None, "strict": False} if text_format["type"] == "json_schema" else {}
    return missing | {name: value for name, value in text_format.items() if value is not None}


def _messages(body: ResponsesBody) -> tuple[list[dict], dict[str, str]]:
    """The input as the messages of a chat, and a map from the paths of messages and their parts in the chat to their
    places in the body. Raises: ApiError naming the item."""
    messages: list[dict] = []
    places = {"messages": "input"}

    def add(message: dict, place: str, content: str) -> None:
        path = f"messages[{len(messages)}]"
        places[path], places[f"{path}.content"] = place, content
        messages.append(message)

    if body.instructions is not None:
        add({"role": "system", "content": body.instructions}, "instructions", "instructions")
    if isinstance(body.input, str):
        add({"role": "user", "content": body.input}, "input", "input")
        return messages, places
    for i, item in enumerate(body.input):
        kind, place = item.get("type", "message"), f"input[{i}]"
        if kind == "message":
            add({"role": item.get("role"), "content": _content(item.get("content"))}, place, f"{place}.content")
        elif kind == "function_call":
            function = {"name": text_field(item, "name", place), "arguments": item.get("arguments")}
            call = {"id": text_field(item, "call_id", place), "type": "function", "function": function}
            if not (messages and messages[-1].get("tool_calls")):  # calls of one turn are one message
                add({"role": "assistant", "content": "", "tool_calls": []}, place, f"{place}.content")
            calls = messages[-1]["tool_calls"]
            places[f"messages[{len(messages) - 1}].tool_calls[{len(calls)}].function"] = place
            calls.append(call)
        elif kind == "function_call_output":
            result = {"role": "tool", "tool_call_id": text_field(item, "call_id", place)}
            add(result | {"content": _content(item.get("output"))}, place, f"{place}.output")
        elif kind != "reasoning":  # templates leave out what the model thought in earlier turns
            raise unknown_type(kind, place, "message", "function_call", "function_call_output", "reasoning")
    return messages, places


def _content(content: Any) -> Any:
    return content if not isinstance(content, list) else [_chat_part(part) for part in content]


def _chat_part(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    if part.get("type") == "input_image":
        url = {name: part[name] for name in ("detail",) if name in part} | {"url": part.get("image_url")}
        return {"type": "image_url", "image_url": url}
    return {"type": "text", "text": part.get("text")} if part.get("type") in TEXT_PARTS else part
