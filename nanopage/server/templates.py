"""Conversations as clients send them, through the model's chat template."""

import functools
import re
from typing import Any

from nanopage.aio.async_llm import AsyncLLM
from nanopage.grammar.tool_definitions import Tool
from nanopage.server.errors import ApiError, invalid
from nanopage.server.generation import prompt_room, too_long
from nanopage.server.images import check_sight
from nanopage.server.message_body import MessagesBody
from nanopage.server.protocol import ChatBody, ResponsesBody, TokenizeBody
from nanopage.text.chat_template import MESSAGE_FIELDS
from nanopage.text.prompts import PromptTooLongError
from nanopage.text.tool_prompt import make_prompt

TEMPLATE_KWARGS = ("enable_thinking", "thinking", "reasoning_effort", "date_string")  # clients may set these
# A template that reads `thinking` in place of enable_thinking; and one where that may be a variable of its own
THINKING, OWN = r"""{%-?\s*if\b[^%]*(?<![\w.'"])thinking\b(?!['"])""", r"\bset\s+thinking\b"
TEMPLATE_FIELDS = ("chat_template_kwargs", "enable_thinking", "reasoning_effort", "reasoning")  # in bodies


def chat_prompt(llm: AsyncLLM, body: ChatBody | TokenizeBody, tools: list[Tool]) -> dict:
    """The prompt of a conversation, as text and token ids. It may take seconds: call it in a thread.

    Args: tools: the tools that the model is told about.
    Raises: ApiError naming the field.
    """
    if body.continue_final_message and body.add_generation_prompt:
        why = "exclude each other: the model goes on with a message or begins a new one"
        message = f"continue_final_message and add_generation_prompt {why}"
        raise ApiError(400, message, param="continue_final_message")
    check_sight(llm, body.messages or [])
    kwargs, _ = template_kwargs(llm, body)
    reader = llm.engine.input_processor.prompts
    room = prompt_room(llm, body, body.limit) if isinstance(body, ChatBody) else None

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        return reader.check_text(text, truncated=room is not None).encode(text, add_special_tokens)

    try:
        tokenizer = reader.require_tokenizer("a conversation", "prompt_token_ids to /v1/completions")
        has_developer = "developer" in (tokenizer.template_for(bool(tools)) or "")
        messages = [_plain_message(message, has_developer) for message in body.messages or []]
        prompt = make_prompt(
            tokenizer,
            encode,
            messages,
            [tool.describe() for tool in tools] or None,
            add_generation_prompt=not body.continue_final_message and body.add_generation_prompt is not False,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=kwargs or None,
        )
        if room is not None and len(prompt["prompt_token_ids"]) > room:
            if "multi_modal_data" in prompt:
                raise ValueError("truncate_prompt_tokens: a prompt with images is never cut")
            prompt["prompt_token_ids"] = prompt["prompt_token_ids"][-room:]
        return prompt
    except PromptTooLongError as error:
        raise too_long(llm, error, "messages") from None
    except (ValueError, TypeError) as error:
        raise invalid(error, ("chat_template_kwargs", "truncate_prompt_tokens", "messages")) from None


def template_kwargs(
    llm: AsyncLLM, body: ChatBody | ResponsesBody | MessagesBody | TokenizeBody
) -> tuple[dict[str, Any], list[str]]:
    """The variables that a body sets for the model's template, and the fields that set variables that the template does
    not read: clients send them to every model. Raises: ApiError for a variable that a client may not set."""
    tokenizer = llm.engine.tokenizer
    template = "" if tokenizer is None else tokenizer.template_for(bool(body.tools)) or ""
    words, switch = _scan(template)
    given: dict[str, tuple[str, Any]] = {"enable_thinking": (switch, body.enable_thinking)}
    given |= {
        f"reasoning.{name[:100]}": ("reasoning_effort" if name == "effort" else "", value)
        for name, value in (body.reasoning or {}).items()
    }
    given["reasoning_effort"] = ("reasoning_effort", body.reasoning_effort)
    for name, value in (body.chat_template_kwargs or {}).items():
        given[f"chat_template_kwargs.{name[:100]}"] = (name, value)
    kwargs, ignored = {}, []
    for field, (name, value) in given.items():
        if value is None:
            continue
        if name not in words:
            ignored.append(field)
        elif name == "reasoning_effort" and not isinstance(value, str):
            raise ApiError(400, f"{field} must be a string", param=field)
        elif name not in TEMPLATE_KWARGS:
            raise ApiError(400, f"{field}: clients may set {', '.join(TEMPLATE_KWARGS)}", param=field)
        else:
            kwargs[name] = value
    return kwargs, ignored


def _plain_message(message: dict[str, Any], has_developer: bool) -> dict[str, Any]:
    """A message with the fields that `normalize_messages` takes. The role `developer` becomes `system` for templates
    without it. The refusal of a reply becomes content."""
    refusal, reasoning = message.get("refusal"), message.get("reasoning")
    message = {field: message[field] for field in MESSAGE_FIELDS if message.get(field) is not None}
    if not message.get("tool_calls", True):
        del message["tool_calls"]
    if reasoning is not None:
        message.setdefault("reasoning_content", reasoning)
    if refusal and message.get("role") == "assistant":
        content = message.get("content") or []
        message["content"] = [*([content] if isinstance(content, str) else content), refusal]
    if message.get("role") == "developer" and not has_developer:
        message["role"] = "system"
    return message


@functools.lru_cache(16)
def _scan(template: str) -> tuple[frozenset[str], str]:
    """The words of a template, and its variable that switches thinking."""
    words = frozenset(re.findall(r"\w+", template))
    reads = re.search(r"\bthinking\s+is\b" if re.search(OWN, template) else THINKING, template)
    return words, "thinking" if reads and "enable_thinking" not in words else "enable_thinking"
