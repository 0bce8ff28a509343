"""A model behind a server of OpenAI's API, as the chat needs it."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from nanopage.params import SamplingParams
from nanopage.terminal.calls import Call, Server, ServerError, message_of
from nanopage.terminal.reply import MOST_TOKENS, SPINNER_DELAY, Reply, Request, Stopped
from nanopage.terminal.session import SETTINGS
from nanopage.terminal.signals import Interrupt
from nanopage.terminal.spinner import spinner
from nanopage.text.image_parts import is_image
from nanopage.text.reasoning import END_THINK, THINK

if TYPE_CHECKING:
    from nanopage.step import Capacity
    from nanopage.view.picture import Picture

TEMPLATE_FIELDS = ("model", "prompt", "messages", "tools", "add_generation_prompt", "continue_final_message")


class Card(msgspec.Struct):
    """A model in /v1/models. Only OpenAI's `id` is certain to be there."""

    id: str
    owned_by: str | None = None
    max_model_len: int | None = None  # nanopage and vLLM
    default_sampling_params: dict[str, Any] = {}  # nanopage


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _CallPart(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_CallPart] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None  # of /v1/completions
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


@dataclasses.dataclass(eq=False)
class RemoteModel:
    """A model of a server, as a Model."""

    server: Server
    card: Card  # what the server says of it
    given: frozenset[str]  # names of the settings that the user has set at the start
    where: str  # the server, for the user
    sees_images: bool | None = None  # None: it is not known

    def __post_init__(self) -> None:
        card = self.card
        self.name, self.max_model_len, self.is_nanopage = card.id, card.max_model_len, card.owned_by == "nanopage"
        self.capacity: Capacity | None = None
        self.goes_on = self.counts = self.is_nanopage or card.owned_by == "vllm"  # with a message; tokens
        try:
            self.defaults = SamplingParams(**card.default_sampling_params if self.is_nanopage else {}, max_tokens=None)
        except (TypeError, ValueError) as error:
            raise ServerError(f"{self.server.where} has settings that are not known here: {error}") from None

    def check(self, params: SamplingParams) -> None:
        """Nothing is checked here: the server says what it refuses when it answers."""

    def count(self, request: Request) -> int | None:
        if not self.counts or self.max_model_len is None:
            return None
        if isinstance(request.prompt, list) and any(isinstance(message["content"], list) for message in request.prompt):
            return None  # nanopage's server counts no images
        body = {name: value for name, value in self.body(request).items() if name in TEMPLATE_FIELDS}
        # A token has at least one byte, and templates add little.
        if (most := len(json.dumps(body, ensure_ascii=False).encode()) + 512) <= self.max_model_len // 2:
            return most
        try:
            return msgspec.convert(self.server.post("../tokenize", body)["count"], int)
        except ServerError as error:
            if error.status not in (401, 403, 404, 405):  # a proxy may let only /v1 through
                raise
            self.counts = False
            return None
        except (KeyError, TypeError, msgspec.ValidationError):
            return None

    def stream(self, request: Request, interrupt: Interrupt) -> "RemoteStream":
        if not isinstance(request.prompt, str) and request.begun and not self.goes_on:
            raise ValueError("this server cannot go on with its reply: ask it to go on instead")
        usage = {"include_usage": True} | ({"continuous_usage_stats": True} if self.goes_on else {})
        body = self.body(request) | {"stream": True, "stream_options": usage}
        path = "completions" if isinstance(request.prompt, str) else "chat/completions"
        return RemoteStream(Call(self.server, path, body), request, interrupt)

    def begun(self, text: str, ids: list[int], params: SamplingParams) -> tuple[str, list[int]]:
        return text.rstrip("\ufffd"), []  # of an unfinished character

    def figures(self) -> list[tuple[str, str]]:
        return [("server", self.where)]

    def picture(self) -> "Picture":
        if not self.is_nanopage:
            raise ValueError(f"the KV blocks are in another process, and {self.server.where} does not show them")
        from nanopage.view.picture import Picture

        picture = Picture()
        with contextlib.closing(Call(self.server, "../view/events")) as call:
            picture.apply(json.loads(next(call.events())))
        return picture

    def body(self, request: Request) -> dict[str, Any]:
        """The fields of a request that say what to answer, and how."""
        given, body = self.given | request.given | {"max_tokens"}, dict[str, Any](model=self.name)
        for name in SETTINGS:
            value = getattr(request.params, name)
            if value is not None and (name in given or value != getattr(self.defaults, name)):
                body[name] = value
        if isinstance(request.prompt, str):
            return body | {"prompt": request.prompt + request.begun}
        messages = [self._message(message) for message in request.prompt]
        if request.begun:
            messages.append({"role": "assistant", "content": request.begun})
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if request.tools:
            body |= {"tools": request.tools} | ({} if request.reads_calls else {"tool_choice": "none"})
        return body | {"messages": messages}

    def _message(self, message: dict) -> dict:
        """A message as OpenAI's API has it: arguments of calls are text, images are data URLs, and reasoning is
        not sent back. The templates of nanopage and vLLM decide on reasoning by themselves."""
        calls = [
            call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
            for call in message.get("tool_calls", ())
        ]
        content = message["content"]
        if isinstance(content, list):
            content = [
                {"type": "image_url", "image_url": {"url": part["image"].url}} if is_image(part) else part
                for part in content
            ]
        if message["role"] == "assistant" and not self.goes_on:
            content = content.rpartition(END_THINK)[2].lstrip()
        return message | {"content": content} | ({"tool_calls": calls} if calls else {})


class RemoteStream:
    """One reply of a server, as a Stream. Reasoning is shown between marks, as models write it.

    Args: call: the call to make.
    """

    thinking = False

    def __init__(self, call: Call, request: Request, interrupt: Interrupt):
        self._call, self._interrupt = call, interrupt
        self._text, self._finish = "", ""
        self._usage: _Usage | None = None
        self._calls: dict[int, tuple[list[str], list[str]]] = {}  # index -> (id and name, pieces of the arguments)
        self._error: str | None = None
        self._reads_calls = bool(request.tools) and request.reads_calls
        self._opened = request.begun.rfind(THINK) > request.begun.rfind(END_THINK)  # the beginning has the mark
        self._thinks = False
        self._began = time.perf_counter()
        self._times: list[float] = []  # of the first text, and of the last

    def __iter__(self) -> Iterator[tuple[str, str]]:
        texts = self._texts()
        self._interrupt.notice = self._call.stop
        if self._interrupt.signum is not None:  # it came while the call was made
            raise Stopped
        with spinner("waiting for the server", SPINNER_DELAY):
            first = next(texts, None)
        if first is not None:
            yield first, first
            for text in texts:
                yield text, text

    def close(self) -> None:
        self._interrupt.notice = lambda: None
        self._call.close()

    def reply(self) -> Reply | None:
        if not (self._text or self._finish):
            return None
        usage, calls = self._usage, []
        if self._calls and self._reads_calls and self._finish == "stop":
            from nanopage.grammar.tool_pieces import ToolCall

            calls = [
                (call_id or f"call_{index}", ToolCall(name, "".join(parts)))
                for index, ((call_id, name), parts) in self._calls.items()
            ]
        details = None if usage is None else usage.prompt_tokens_details
        rate = None
        if usage is not None and self._times and self._times[1] > self._times[0]:
            rate = (usage.completion_tokens - 1) / (self._times[1] - self._times[0])
        return Reply(
            text=self._text,
            finish_reason=self._finish,
            num_prompt_tokens=None if usage is None else usage.prompt_tokens,
            num_cached_tokens=None if details is None else details.cached_tokens,
            num_output_tokens=None if usage is None else usage.completion_tokens,
            time_to_first_token=self._times[0] - self._began if self._times else None,
            prefill_rate=None,
            decode_rate=rate,
            error=self._error,
            content=self._text,
            calls=calls,
        )

    def _texts(self) -> Iterator[str]:
        """The text as it comes. Raises: ServerError if none has come; Stopped."""
        try:
            for data in self._events():
                if text := self._read(data):
                    now = time.perf_counter()
                    self._times = [*self._times[:1], now] if self._times else [now, now]
                    self._text += text
                    yield text
            self._finish = self._finish or "stop"
        except ServerError as error:
            if self._call.stopped:
                raise Stopped from None
            if self._finish:  # only the usage is missing, or `[DONE]`
                return
            if not self._text:
                raise
            self._finish, self._error = "error", str(error)

    def _events(self) -> Iterator[bytes]:
        """The events of the call. The call is repeated for models of OpenAI that have another name for the limit."""
        try:
            yield from self._call.events()
        except ServerError as error:
            body = self._call.body or {}
            if error.status != 400 or "max_completion_tokens" not in str(error) or "max_tokens" not in body:
                raise
            body["max_completion_tokens"] = body.pop("max_tokens")
            self._call.close()
            yield from self._call.events()

    def _read(self, data: bytes) -> str:
        """The text in an event. Raises: ServerError."""
        where = self._call.server.where
        try:
            chunk = msgspec.json.decode(data, type=_Chunk)
        except msgspec.MsgspecError as error:
            raise ServerError(f"{where} streams what is no reply: {error}") from None
        if chunk.error is not None:
            raise ServerError(f"{where}: {message_of(chunk.error)}")
        self._usage = chunk.usage or self._usage
        text = ""
        for choice in chunk.choices or ():
            delta = choice.delta or _Delta()
            text += self._marked(delta.reasoning_content or delta.reasoning, THINK + "\n", True)
            said = choice.text or delta.content or ("" if delta.tool_calls else None)
            text += self._marked(said, f"\n{END_THINK}\n\n", False)
            for part in delta.tool_calls or ():
                self._add(part)
            if choice.finish_reason is not None:
                is_call = choice.finish_reason in ("tool_calls", "function_call")
                self._finish = "stop" if is_call else choice.finish_reason
        return text

    def _marked(self, text: str | None, mark: str, thinks: bool) -> str:
        """A text, with the mark before it where reasoning begins or ends. Args: text: None if there is none."""
        if text is None or self._thinks == thinks:
            return text or ""
        self._thinks = thinks
        return text if thinks and self._opened and not self._text else mark + text

    def _add(self, part: _CallPart) -> None:
        names, arguments = self._calls.setdefault(part.index, (["", ""], []))
        names[0] = part.id or names[0]
        if part.function is not None:
            names[1] = part.function.name or names[1]
            arguments.append(part.function.arguments or "")


def find_card(server: Server, model: str | None) -> Card:
    """What a server says of a model, or of its first one. Raises: ServerError; ValueError for a model that it lacks."""
    try:
        cards = msgspec.convert(msgspec.convert(server.get("models"), dict[str, Any])["data"], list[Card])
    except (KeyError, msgspec.ValidationError):
        raise ServerError(f"{server.where} does not say which models it has") from None
    found = [card for card in cards if model in (None, card.id)]
    if not found:
        names = ", ".join(card.id for card in cards)[:1000]
        raise ValueError(f"{server.where} has no model {model!r}: it has {names or 'none'}")
    return found[0]


def connect(
    server: Server, model: str | None, asked: dict, where: str, sees_images: bool | None = None
) -> tuple[RemoteModel, str, SamplingParams]:
    """Find a model of a server. Returns it, its name, and its settings.

    Args: asked: settings of the user. The others: as in RemoteModel.
    """
    remote = RemoteModel(server, find_card(server, model), frozenset(asked), where, sees_images)
    params = remote.defaults
    # As for a model in this process. A model that is not loaded yet has no length, and does not say what it recommends.
    if remote.is_nanopage and remote.max_model_len is not None and params == SamplingParams(max_tokens=None):
        params = SamplingParams(temperature=0)
    return remote, remote.name, dataclasses.replace(params, **{"max_tokens": MOST_TOKENS} | asked)
