"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, without a store."""

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from nanopage.grammar.tool_pieces import Arguments, Call, Content, Piece, Reasoning
from nanopage.outputs import CompletionOutput, RequestOutput
from nanopage.server.chat import Chat
from nanopage.server.errors import ApiError, renamed, unsupported
from nanopage.server.generation import Generation, changes
from nanopage.server.json_body import read_json
from nanopage.server.message_body import Conversation, MessagesBody, chat_form, chat_tool_choice, chat_tools
from nanopage.server.protocol import ChatBody, CommonBody
from nanopage.server.state import ServerState
from nanopage.text.reasoning import knows_reasoning

SIGNATURE = "unsigned"  # many clients leave out thinking without a signature when they send a reply back
NAMES = (  # of a chat, and of a message
    (r"\bthinking_token_budget\b", "thinking.budget_tokens"),
    (r"\b(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
    (r"\b(tools\[\d+\]|tool_choice)\.function\b", r"\1"),
    (r"tool_choice='required'", "tool_choice.type='any'"),
    (r"\bresponse_format\b(\.json_schema(\.schema)?)?", "output_config.format"),
    (r"^enable_thinking\b", "thinking.type"),
    (r"^reasoning_effort\b", "output_config.effort"),
    (r"^stop\b", "stop_sequences"),
    (r"^This model's maximum", "prompt is too long: this model's maximum"),  # what Claude Code looks for
)
DELTAS = {  # type of a block -> type of its deltas, and their field
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}

T = TypeVar("T")


class Messages:
    """One call: a message, or the events that it comes in. Arguments and errors: as Chat."""

    def __init__(self, state: ServerState, body: MessagesBody):
        self.llm, self.body, self.model = state.require(), body, state.model_name(body.model)
        if body.thread is not None:  # the SDK's helper for tools then sends the whole conversation
            message = "thread is not supported: nothing is stored, so send the whole conversation"
            raise ApiError(400, message, param="thread", code="thread_unsupported_request")
        self.conversation = Conversation(body)
        fields: dict[str, Any] = {name: getattr(body, name) for name in CommonBody.model_fields if name != "stop"}
        for name in ("chat_template_kwargs", "enable_thinking", "reasoning_effort", "stop_in_reasoning"):
            fields[name] = getattr(body, name)
        fields |= self._form() | self._tools() | {"stop": body.stop_sequences}
        if body.max_tokens == 0:  # which only fills the prefix cache; the engine computes at least one token
            if body.stream:
                raise ApiError(400, "max_tokens=0 has nothing to stream", param="max_tokens")
            fields["min_tokens"] = 0
        fields["max_tokens"] = body.max_tokens or 1
        if self.conversation.goes_on:
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        if (budget := self._budget()) is not None:
            fields["thinking_token_budget"] = budget
        try:
            self.chat = Chat(state, ChatBody(messages=self.conversation.messages, **fields))
        except ApiError as error:
            raise renamed(error, self.conversation.places, NAMES) from None
        self.id, self.prompts, self.params = f"msg_{uuid.uuid4().hex}", self.chat.prompts, self.chat.params
        self.blocks = _Blocks(self.chat, body.thinking is not None and body.thinking.display == "omitted")

    def _form(self) -> dict[str, Any]:
        """The form of the text, as a chat's. Raises: ApiError."""
        for name, instead in (("stop", "stop_sequences"), ("thinking_token_budget", "thinking.budget_tokens")):
            if getattr(self.body, name) is not None:
                raise unsupported(name, f"use {instead}")
        form = self.body.output_config.format
        if form is None:
            return {}
        if form.get("type") != "json_schema":
            raise ApiError(400, "output_config.format.type must be 'json_schema'", param="output_config.format.type")
        return {"response_format": chat_form(form)}

    def _tools(self) -> dict[str, Any]:
        """The tools, as a chat's. Raises: ApiError."""
        alone = (self.body.tool_choice or {}).get("disable_parallel_tool_use") or False
        if not isinstance(alone, bool):
            place = "tool_choice.disable_parallel_tool_use"
            raise ApiError(400, f"{place} must be true or false", param=place)
        parallel = self.body.parallel_tool_calls and not alone
        tools, choice = chat_tools(self.body.tools), chat_tool_choice(self.body.tool_choice)
        return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}

    def _budget(self) -> int | None:
        """How many tokens a model that thinks may think. Raises: ApiError."""
        thinking, tokenizer = self.body.thinking, self.llm.engine.tokenizer
        if thinking is None or thinking.type != "enabled":
            return None
        budget, place = thinking.budget_tokens, "thinking.budget_tokens"
        if budget is None or budget < 1:
            raise ApiError(400, f"{place} must be at least 1 if thinking is enabled", param=place)
        thinks = tokenizer is not None and knows_reasoning(tokenizer.template_for(bool(self.body.tools)))
        return budget if thinks and budget < self.body.max_tokens else None

    async def start(self, entered: Callable[[], None]) -> Generation:
        """Put the conversation into the engine. Arguments and errors: as `generation.start`."""
        generation = await self._attempt(lambda: self.chat.start(entered))
        generation.rename = lambda error: renamed(error, self.conversation.places, NAMES)
        return generation

    async def count(self) -> int:
        """The tokens of the prompt. Raises: ApiError."""
        prompt = await self._attempt(self.chat.make_prompt)
        read = await self.llm.in_thread(self.llm.engine.input_processor.prompts.read, prompt)
        return len(read.token_ids)

    async def _attempt(self, step: Callable[[], Awaitable[T]]) -> T:
        """A step of the chat. If the template fails, system messages after the first become the user's.

        Raises: ApiError with this endpoint's names.
        """
        try:
            try:
                return await step()
            except ApiError as error:
                if not (self.conversation.has_system_later and "the chat template failed" in str(error)):
                    raise
                self.conversation = Conversation(self.body, system="user")
                self.chat.body.messages = self.conversation.messages
                return await step()
        except ApiError as error:
            raise renamed(error, self.conversation.places, NAMES) from None

    def reply(self, outputs: list[RequestOutput]) -> dict:
        """The whole message."""
        (output,) = outputs
        completion = output.outputs[0]
        if not self.body.max_tokens:  # nobody has asked for the token
            completion.text, completion.token_ids = "", []
        for piece in self.chat.read(completion)[1]:
            list(self.blocks.add(piece))
        list(self.blocks.close())
        self.chat.outputs = [output]
        return self._message(self.blocks.done) | self._ending(completion) | {"usage": self._usage()}

    async def chunks(self, generation: Generation) -> AsyncIterator[dict]:
        """The message as it grows."""
        async for change in changes(generation, 1, 1):
            if not self.chat.outputs:
                self.chat.outputs = [replace(change.output, outputs=[])]  # this event has no tokens
                yield {"type": "message_start", "message": self._message([]) | {"usage": self._usage()}}
                yield {"type": "ping"}
            for piece in self.chat.pieces(change):
                for event in self.blocks.add(piece):
                    yield event
            if change.completion.finish_reason is not None:
                for event in self.blocks.close():
                    yield event
                self.chat.outputs = [change.output]
                yield {"type": "message_delta", "delta": self._ending(change.completion), "usage": self._usage()}
                yield {"type": "message_stop"}

    def _message(self, blocks: list[dict]) -> dict:
        message = {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": blocks}
        return message | {"stop_reason": None, "stop_sequence": None}

    def _ending(self, completion: CompletionOutput) -> dict:
        reason, found = "end_turn", None
        if completion.finish_reason == "length" or not self.body.max_tokens:
            full = len(completion.token_ids) < self.body.max_tokens
            reason = "model_context_window_exceeded" if full else "max_tokens"
        elif isinstance(completion.stop_reason, str):
            reason, found = "stop_sequence", completion.stop_reason
        elif any(block["type"] == "tool_use" for block in self.blocks.done):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": found}

    def _usage(self) -> dict:
        counts = self.chat.usage()
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,  # writing to the prefix cache costs the client nothing
            "cache_read_input_tokens": cached,
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": counts["completion_tokens_details"]["reasoning_tokens"]},
        }


@dataclass
class _Blocks:
    """The blocks of a message: thinking, texts and calls, one after the other, and the events that they come in."""

    chat: Chat
    omits: bool  # leave out what the model thinks; its blocks stay
    done: list[dict] = field(default_factory=list)  # the complete blocks
    _block: dict | None = None  # the block that grows
    _text: str = ""  # its text so far
    _num_calls: int = 0

    def add(self, piece: Piece) -> Iterator[dict]:
        """The events of a piece."""
        kind = {Reasoning: "thinking", Content: "text"}.get(type(piece), "tool_use")
        if self._block is None or self._block["type"] != kind or isinstance(piece, Call):
            yield from self.close()
            self._block = self._make(kind, piece.name if isinstance(piece, Call) else "")
            yield self._event("start", content_block=dict(self._block))
        if isinstance(piece, Content | Arguments) or (isinstance(piece, Reasoning) and not self.omits):
            self._text += piece.text
            name, field = DELTAS[kind]
            yield self._event("delta", delta={"type": name, field: piece.text})

    def close(self) -> Iterator[dict]:
        """The events at the end of a block, if there is one."""
        if self._block is None:
            return
        kind = self._block["type"]
        if kind == "tool_use":
            self._block["input"] = _read_input(self._text)
        else:
            self._block[kind] = self._text
        if kind == "thinking":
            self._block["signature"] = SIGNATURE
            yield self._event("delta", delta={"type": "signature_delta", "signature": SIGNATURE})
        yield self._event("stop")
        self.done.append(self._block)
        self._block, self._text = None, ""

    def _event(self, what: str, **fields: Any) -> dict:
        return {"type": f"content_block_{what}", "index": len(self.done), **fields}

    def _make(self, kind: str, name: str) -> dict:
        if kind != "tool_use":
            return {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
        self._num_calls += 1
        return {"type": kind, "id": self.chat.call_ids[0, self._num_calls - 1], "name": name, "input": {}}


def _read_input(text: str) -> dict:
    """The arguments of a call. What is no object, or has been cut, is returned as Anthropic's documentation says."""
    try:
        value = read_json(text.encode() or b"{}")
    except ApiError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}
