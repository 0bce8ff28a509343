"""Conversations as clients send them, through the model's chat template."""

from typing import Any

from nanopage.async_llm import AsyncLLM
from nanopage.engine.input_processor import PromptTooLongError
from nanopage.server.errors import ApiError, invalid
from nanopage.server.generation import too_long
from nanopage.server.protocol import ChatBody, TokenizeBody
from nanopage.tools.definitions import Tool
from nanopage.tools.prompt import make_prompt

TEMPLATE_KWARGS = ("enable_thinking", "thinking", "date_string")  # variables that a client may set
EMPTY_FIELDS = ("refusal", "annotations", "audio", "function_call")  # of the replies that clients send back


def chat_prompt(llm: AsyncLLM, body: ChatBody | TokenizeBody, tools: list[Tool]) -> dict:
    """The prompt of a conversation, as text and token ids. It may take seconds: call it in a thread.

    Args: tools: those that the model is told about.
    Raises: ApiError naming the field.
    """
    if body.continue_final_message and body.add_generation_prompt:
        raise ApiError(
            400,
            "continue_final_message and add_generation_prompt exclude each other: the model goes on with a message or "
            "begins a new one",
            param="continue_final_message",
        )
    kwargs = body.chat_template_kwargs or {}
    for name in kwargs:
        if name not in TEMPLATE_KWARGS:
            message = f"chat_template_kwargs: {name[:100]!r} is not one of {', '.join(TEMPLATE_KWARGS)}"
            raise ApiError(400, message, param=f"chat_template_kwargs.{name[:100]}")
    processor = llm.engine.input_processor
    try:
        tokenizer = processor.require_tokenizer("a conversation", "prompt_token_ids to /v1/completions")
        has_developer = "developer" in (tokenizer.template_for(bool(tools)) or "")
        messages = [
            _without_what_is_empty(message, f"messages[{i}]", has_developer)
            for i, message in enumerate(body.messages or [])
        ]
        return make_prompt(
            tokenizer,
            processor.encode,
            messages,
            [tool.describe() for tool in tools] or None,
            add_generation_prompt=not body.continue_final_message and body.add_generation_prompt is not False,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=kwargs or None,
        )
    except PromptTooLongError as error:
        raise too_long(llm, error, "messages") from None
    except (ValueError, TypeError) as error:
        raise invalid(error, ("chat_template_kwargs", "messages")) from None


def _without_what_is_empty(message: dict[str, Any], name: str, has_developer: bool) -> dict[str, Any]:
    """A message in the form that `normalize_messages` takes. `developer` is `system` to templates without that role."""
    message = {field: value for field, value in message.items() if value is not None}
    for field in (*EMPTY_FIELDS, "tool_calls"):
        if not message.get(field, True):
            del message[field]
    for field in EMPTY_FIELDS:
        if field in message:
            raise ApiError(400, f"{name}.{field} is not supported", param=f"{name}.{field}")
    if "reasoning" in message:
        message.setdefault("reasoning_content", message.pop("reasoning"))
    if message.get("role") == "developer" and not has_developer:
        message["role"] = "system"
    return message
