"""What a body says about tools, and how the reply must be read because of it."""

import json
import re
import time
from dataclasses import dataclass

from nanopage.aio.async_llm import AsyncLLM
from nanopage.grammar.structured import grammar_text
from nanopage.grammar.tool_definitions import Tool, ToolChoice, read_tool_choice, read_tools
from nanopage.grammar.tool_formats import ToolFormat, find_format
from nanopage.grammar.tool_grammar import json_value, make_grammar
from nanopage.grammar.tool_reply import ReplyReader
from nanopage.params import StructuredOutputsParams
from nanopage.server.errors import ApiError, invalid
from nanopage.server.protocol import ChatBody, TokenizeBody
from nanopage.text.tokenizer import Tokenizer

MAX_SECONDS = 5.0  # for finding out what is wrong
FINISH_REASONS = ("stop", "tool_calls")


@dataclass(frozen=True)
class ToolOptions:
    """Options of the server."""

    parser: str | None = None  # the form of calls; None: find it in the chat template
    # The finish_reason of a reply whose call the client has named. OpenAI's is "stop", but some clients run calls only
    # after "tool_calls".
    named_finish_reason: str = "stop"


@dataclass(frozen=True)
class ToolUse:
    """What a call's body says about tools."""

    tools: list[Tool]
    choice: ToolChoice
    format: ToolFormat | None = None  # how the model writes calls; None without tools
    parallel: bool = True

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model is told about."""
        return [] if self.choice.kind == "none" else self.tools

    def make_reader(self, reasoning: bool | None) -> ReplyReader | None:
        """The reader of a reply; None if all of the reply is content. Args: reasoning: as in ReplyReader."""
        if self.format is None and reasoning is None:
            return None
        return ReplyReader(self.format, [tool.name for tool in self.offered], self.parallel, reasoning)

    def constrain(
        self, form: StructuredOutputsParams | None, tokenizer: Tokenizer | None
    ) -> StructuredOutputsParams | None:
        """The constraints on the reply.

        Args: form: the constraints on a reply that calls no tool.
        Raises: ApiError for a form that excludes calls.
        """
        if self.format is None or tokenizer is None:
            return form
        body = None
        if form is not None:
            if form.kind not in ("json", "json_object"):
                message = f"structured_outputs.{form.kind} and tools exclude each other: use response_format"
                raise ApiError(400, message, param="structured_outputs")
            body = json_value(json.loads(grammar_text(form)[1]), not form.disable_any_whitespace)
        begin = self.format.begin
        mark_id = tokenizer.backend.token_to_id(begin) if is_special(tokenizer, begin) else None
        grammar = make_grammar(self.format, self.tools, self.choice, self.parallel, mark_id, body)
        return None if grammar is None else StructuredOutputsParams(grammar=grammar)


def read_tool_use(llm: AsyncLLM, body: ChatBody | TokenizeBody, options: ToolOptions) -> ToolUse:
    """Raises: ApiError naming the field."""
    parallel = body.parallel_tool_calls is not False if isinstance(body, ChatBody) else True
    try:
        tools = [] if body.tools is None else read_tools(body.tools)
        choice = read_tool_choice(body.tool_choice if isinstance(body, ChatBody) else None, tools)
        form = (body.structured_outputs if isinstance(body, ChatBody) else None) or {}
        if choice.kind in ("required", "named") and any(value is not None for value in form.values()):
            message = "structured_outputs and a tool_choice that forces calls exclude each other"
            raise ApiError(400, message, param="structured_outputs")
        offers = bool(tools) and choice.kind != "none"
        template = "" if (tokenizer := llm.engine.tokenizer) is None else tokenizer.template_for(offers) or ""
        return ToolUse(tools, choice, find_format(template, options.parser) if offers else None, parallel)
    except (ValueError, TypeError) as error:
        raise invalid_tools(error) from None


def invalid_tools(error: Exception) -> ApiError:
    """A 400 for a message that begins with the place of the error, such as tools[0].function.name."""
    message = str(error)
    place = message.split(":")[0].split(" ")[0].split("=")[0]
    return ApiError(400, message, param=place) if place.startswith("tool") else invalid(error, ("tools",))


def is_special(tokenizer: Tokenizer | None, mark: str) -> bool:
    """Whether a mark is a special token, which is left out of texts by default."""
    return tokenizer is not None and tokenizer.backend.token_to_id(mark) in tokenizer.special_ids


def find_wrong_tool(llm: AsyncLLM, tools: list[Tool], error: ApiError) -> ApiError:
    """The error of a grammar of calls, with the name of the schema that caused it. May take seconds."""
    end = time.monotonic() + MAX_SECONDS
    for i, tool in enumerate(tools):
        if time.monotonic() > end:
            break
        try:
            llm.engine.input_processor.compile_grammar(StructuredOutputsParams(json=tool.schema()))
        except ValueError as why:
            place = f"tools[{i}].function.parameters"
            message = re.sub(r"structured_outputs\.\w+", place, str(why), count=1)
            return ApiError(400, message, param=place)
    message = re.sub(r"(structured_outputs\.\w+|response_format)", "tools", str(error), count=1)
    return ApiError(400, message, param="tools" if error.param != "response_format" else error.param)
