"""POST /v1/responses, without a store: each call sends its whole conversation."""

import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from nanopage.aio.async_llm import AsyncLLM
from nanopage.grammar.tool_pieces import Arguments, Call, Content, Piece, Reasoning
from nanopage.outputs import CompletionOutput, RequestOutput
from nanopage.params import SamplingParams
from nanopage.server.adapters import AnyServed
from nanopage.server.chat import Chat
from nanopage.server.errors import ApiError, renamed, unsupported
from nanopage.server.generation import Generation, changes
from nanopage.server.protocol import ChatBody, CommonBody, ResponsesBody
from nanopage.server.templates import TEMPLATE_FIELDS, template_kwargs
from nanopage.server.tools import ToolOptions

TEXT_PARTS = ("input_text", "output_text", "text")
LOGPROBS = "message.output_text.logprobs"  # in `include`
NAMES = (  # of a chat, and of a response
    (r"\bmax_tokens\b", "max_output_tokens"),
    (r"\b(tools\[\d+\]|tool_choice)\.function\b", r"\1"),  # tools are described without this level
    (r"\bresponse_format\b(\.json_schema(?=\.))?", "text.format"),
)


class Responses:
    """One call: a response, or the events that it comes in. Arguments and errors: as Chat."""

    def __init__(
        self,
        llm: AsyncLLM,
        body: ResponsesBody,
        model: str,
        adapter: AnyServed | None = None,
        options: ToolOptions | None = None,
    ):
        for field, asks in (("top_logprobs", body.top_logprobs > 0), ("include", LOGPROBS in body.include)):
            if asks:
                raise unsupported(field, "for log-probabilities, use /v1/chat/completions")
        if body.response_format is not None:
            raise unsupported("response_format", "use text.format")
        self.body, self.model = body, model
        self.messages, self.places = _messages(body)
        fields: dict[str, Any] = {"messages": self.messages, "max_tokens": body.max_output_tokens}
        for name in (*CommonBody.model_fields, "parallel_tool_calls", *TEMPLATE_FIELDS, "stop_in_reasoning"):
            fields[name] = getattr(body, name)
        fields |= {"tools": _tools(body.tools) or None, "tool_choice": _tool_choice(body.tool_choice)}
        fields["response_format"] = _response_format(body.text.format)
        try:
            self.chat = Chat(llm, ChatBody(**fields), model, adapter, options)
            self.effort = template_kwargs(llm, body)[0].get("reasoning_effort")  # None: no template reads it
        except ApiError as error:
            raise renamed(error, self.places, NAMES) from None
        self.id, self.created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self.items = _Items(self.chat)
        self.num_events = 0  # events of the stream so far

    @property
    def prompts(self) -> list[str]:
        return self.chat.prompts

    @property
    def params(self) -> SamplingParams:
        return self.chat.params

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
        params, body, choice = self.chat.params, self.body, self.chat.use.choice
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "background": False,
            "frequency_penalty": params.frequency_penalty,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata,
            "model": self.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls,
            "presence_penalty": params.presence_penalty,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": self.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": _returned_format(body.text.format)},
            "tool_choice": {"type": "function", "name": choice.name} if choice.kind == "named" else choice.kind,
            "tools": [
                {
                    "type": "function",
                    "name": tool.name,
                    "description": tool.description or None,
                    "parameters": tool.parameters,
                    "strict": tool.strict,
                }
                for tool in self.chat.use.tools
            ],
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }


class _Items:
    """The items of a response: reasoning, messages and calls, one after the other, and the events that they come in.

    done: the complete items.
    """

    def __init__(self, chat: Chat):
        self.chat = chat
        self.done: list[dict] = []
        self._item: dict | None = None  # the item that grows
        self._text = ""  # its text so far
        self._num_calls = 0

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
        self._item = self._make(kind, name)
        yield {"type": "response.output_item.added", "output_index": len(self.done), "item": self._item}
        if kind != "function_call":
            yield {"type": "response.content_part.added", "part": _part(kind, "")} | self._where("content_index")

    def _where(self, *zeros: str) -> dict:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self.done)} | dict.fromkeys(zeros, 0)

    def _make(self, kind: str, name: str) -> dict:
        item: dict = {"type": kind, "status": "in_progress"}
        if kind == "message":
            return item | {"id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "content": []}
        if kind == "reasoning":
            return item | {"id": f"rs_{uuid.uuid4().hex}", "summary": [], "content": []}
        self._num_calls += 1
        call_id = self.chat.call_ids[0, self._num_calls - 1]
        return item | {"id": f"fc_{uuid.uuid4().hex}", "call_id": call_id, "name": name, "arguments": ""}


def _status(completion: CompletionOutput) -> str:
    return "incomplete" if completion.finish_reason == "length" else "completed"


def _part(kind: str, text: str) -> dict:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _tools(tools: list[Any]) -> list[Any]:
    """The tools in the form of a chat. Raises: ApiError for tools that are not functions."""
    for i, tool in enumerate(tools):
        if isinstance(tool, dict) and tool.get("type") != "function":
            raise unsupported(f"tools[{i}].type", "tools are functions, which the client runs")
    return [
        {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
        if isinstance(tool, dict)
        else tool
        for tool in tools
    ]


def _tool_choice(choice: str | dict | None) -> str | dict | None:
    if isinstance(choice, dict) and "function" not in choice:
        return {"type": choice.get("type"), "function": {"name": choice.get("name")}}
    return choice


def _response_format(text_format: dict[str, Any]) -> dict[str, Any]:
    """A `text.format` as the `response_format` of a chat."""
    if text_format.get("type") != "json_schema":
        return text_format
    inner = {name: value for name, value in text_format.items() if name != "type"}
    return {"type": "json_schema", "json_schema": inner}


def _returned_format(text_format: dict[str, Any]) -> dict[str, Any]:
    """A `text.format` with all fields that its type has."""
    missing = {"name": "", "description": None, "strict": False} if text_format["type"] == "json_schema" else {}
    return missing | {name: value for name, value in text_format.items() if value is not None}


def _messages(body: ResponsesBody) -> tuple[list[dict], dict[str, str]]:
    """The input as the messages of a chat, and a map from the paths of messages and their parts in the chat to their
    places in the body.

    Raises: ApiError naming the item.
    """
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
            function = {"name": _text(item, "name", i), "arguments": item.get("arguments")}
            call = {"id": _text(item, "call_id", i), "type": "function", "function": function}
            if not (messages and messages[-1].get("tool_calls")):  # calls of one turn are one message
                add({"role": "assistant", "content": "", "tool_calls": []}, place, f"{place}.content")
            calls = messages[-1]["tool_calls"]
            places[f"messages[{len(messages) - 1}].tool_calls[{len(calls)}].function"] = place
            calls.append(call)
        elif kind == "function_call_output":
            output = _content(item.get("output"))
            add(
                {"role": "tool", "tool_call_id": _text(item, "call_id", i), "content": output}, place, f"{place}.output"
            )
        elif kind != "reasoning":  # templates leave out what the model thought in earlier turns
            known = "'message', 'function_call', 'function_call_output', 'reasoning'"
            text = f"{place} is of type {str(kind)[:50]!r}, which is not supported; supported: {known}"
            raise ApiError(400, text, param=f"{place}.type")
    return messages, places


def _text(item: dict, name: str, i: int) -> str:
    if not isinstance(item.get(name), str):
        raise ApiError(400, f"input[{i}].{name} must be a string", param=f"input[{i}].{name}")
    return item[name]


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [_chat_part(part) if isinstance(part, dict) else part for part in content]


def _chat_part(part: dict) -> dict:
    if part.get("type") == "input_image":
        url = {name: part[name] for name in ("detail",) if name in part} | {"url": part.get("image_url")}
        return {"type": "image_url", "image_url": url}
    return {"type": "text", "text": part.get("text")} if part.get("type") in TEXT_PARTS else part
