"""POST /v1/responses, without a store: each call has its whole conversation."""

import re
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from nanopage.async_llm import AsyncLLM, EngineDeadError
from nanopage.outputs import CompletionOutput, RequestOutput
from nanopage.params import SamplingParams
from nanopage.server.chat import Chat
from nanopage.server.choices import changes, usage
from nanopage.server.errors import ApiError, unsupported
from nanopage.server.generation import Generation
from nanopage.server.protocol import NO_TOOLS, ChatBody, ResponsesBody

TEXT_PARTS = ("input_text", "output_text", "text")


class Responses:
    """One call: a response, or the events in which it comes. Arguments and errors are those of Chat."""

    def __init__(self, llm: AsyncLLM, body: ResponsesBody, model: str):
        if body.tools:
            raise unsupported("tools", NO_TOOLS)
        if body.top_logprobs:
            raise unsupported("top_logprobs", "use /v1/chat/completions")
        if body.response_format is not None:
            raise unsupported("response_format", "use text.format")
        self.body, self.model = body, model
        self.messages = _messages(body)
        self.num_added = len(self.messages) - (1 if isinstance(body.input, str) else len(body.input))
        fields: dict[str, Any] = {"messages": self.messages, "max_tokens": body.max_output_tokens}
        for name in ("temperature", "top_p", "stream", "cache_salt", "structured_outputs"):
            fields[name] = getattr(body, name)
        fields["response_format"] = _response_format(body.text.format)
        try:
            self.chat = Chat(llm, ChatBody(**fields), model)
        except ApiError as error:
            raise self._renamed(error) from None
        self.id, self.created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self.item_id = f"msg_{uuid.uuid4().hex}"

    @property
    def prompts(self) -> list[str]:
        return self.chat.prompts

    @property
    def params(self) -> SamplingParams:
        return self.chat.params

    async def start(self, entered: Callable[[], None]) -> Generation:
        """Put the conversation into the engine. Arguments and errors are those of `generation.start`."""
        try:
            return await self.chat.start(entered)
        except ApiError as error:
            raise self._renamed(error) from None

    def reply(self, outputs: list[RequestOutput]) -> dict:
        """The whole response."""
        (output,) = outputs
        return self._response(output, output.outputs[0])

    async def chunks(self, generation: Generation) -> AsyncIterator[dict]:
        """The response as it grows. If it fails, the last event says so."""
        number = -1

        def event(kind: str, **fields: Any) -> dict:
            nonlocal number
            number += 1
            return {"type": kind, "sequence_number": number} | fields

        where = {"item_id": self.item_id, "output_index": 0, "content_index": 0}
        yield event("response.created", response=self._envelope("in_progress"))
        yield event("response.in_progress", response=self._envelope("in_progress"))
        try:
            begun = False
            async for change in changes(generation, 1, 1):
                if not begun:
                    begun = True
                    item = self._item("in_progress", [])
                    yield event("response.output_item.added", output_index=0, item=item)
                    yield event("response.content_part.added", **where, part=_part(""))
                if change.text:
                    yield event("response.output_text.delta", **where, delta=change.text, logprobs=[])
                if change.completion.finish_reason is not None:
                    text = change.completion.text
                    response = self._response(change.output, change.completion)
                    yield event("response.output_text.done", **where, text=text, logprobs=[])
                    yield event("response.content_part.done", **where, part=_part(text))
                    yield event("response.output_item.done", output_index=0, item=response["output"][0])
                    yield event(f"response.{response['status']}", response=response)
        except (ApiError, EngineDeadError) as error:
            failure = {"code": "server_error", "message": str(error)}
            yield event("response.failed", response=self._envelope("failed") | {"error": failure})

    def _renamed(self, error: ApiError) -> ApiError:
        """An error whose `param` is this endpoint's name of the field."""
        if match := re.match(r"messages(\[(\d+)\])?", error.param or ""):
            index = "" if match[2] is None else f"[{int(match[2]) - self.num_added}]"
            error.param = f"input{index}{(error.param or '')[match.end() :]}"
        elif error.param == "max_tokens":
            error.param = "max_output_tokens"
        elif match := re.match(r"response_format(\.json_schema(?=\.))?", error.param or ""):
            error.param = f"text.format{(error.param or '')[match.end() :]}"
        return error

    def _response(self, output: RequestOutput, completion: CompletionOutput) -> dict:
        status = "incomplete" if completion.finish_reason == "length" else "completed"
        counts = usage([output])
        response = self._envelope(status) | {
            "output": [self._item(status, [_part(completion.text)])],
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": counts["completion_tokens_details"],
                "total_tokens": counts["total_tokens"],
            },
        }
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response

    def _envelope(self, status: str) -> dict:
        params, body = self.chat.params, self.body
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": self.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": body.text.format},
            "tool_choice": "auto",
            "tools": [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _item(self, status: str, content: list[dict]) -> dict:
        return {"type": "message", "id": self.item_id, "status": status, "role": "assistant", "content": content}


def _part(text: str) -> dict:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _response_format(text_format: dict[str, Any]) -> dict[str, Any]:
    """A `text.format` as the `response_format` of a chat."""
    if text_format.get("type") != "json_schema":
        return text_format
    inner = {name: value for name, value in text_format.items() if name != "type"}
    return {"type": "json_schema", "json_schema": inner}


def _messages(body: ResponsesBody) -> list[dict]:
    """The input as the messages of a chat. Raises: ApiError naming the item."""
    messages: list[dict] = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for i, item in enumerate(body.input):
        kind = item.get("type", "message")
        if kind != "message":
            message = f"input[{i}] is of type {str(kind)[:50]!r}, which is not supported; supported: 'message'"
            raise ApiError(400, message, param=f"input[{i}].type")
        content = item.get("content")
        if isinstance(content, list):
            content = [
                {"type": "text", "text": part.get("text")}
                if isinstance(part, dict) and part.get("type") in TEXT_PARTS
                else part
                for part in content
            ]
        messages.append({"role": item.get("role"), "content": content})
    return messages
