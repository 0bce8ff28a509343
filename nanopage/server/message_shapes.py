"""The shapes of the replies of /v1/messages, as in shapes.py."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from nanopage.server.shapes import replies


class Block(BaseModel):
    type: Literal["text", "thinking", "tool_use"]
    text: str = Field("", description="Of a text.")
    thinking: str = Field("", description="Of thinking, as the next one.")
    signature: str = ""
    id: str = Field("", description="Of a call, as the next two.")
    name: str = ""
    input: dict[str, Any] = {}


class MessageUsage(BaseModel):
    input_tokens: int = Field(description="Without those that were found in the prefix cache.")
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[Literal["thinking_tokens"], int]


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessageReply(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None = Field(description="null at the start of a stream.")
    stop_sequence: str | None
    usage: MessageUsage


class BlockDelta(BaseModel):
    """What is new in a block; or how the message has ended."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"] = "text_delta"
    text: str = ""
    thinking: str = ""
    signature: str = ""
    partial_json: str = ""
    stop_reason: StopReason = "end_turn"
    stop_sequence: str | None = None


class MessageErrorDetail(BaseModel):
    type: str
    message: str
    details: dict[Literal["error_code"], str] = {}


class MessageError(BaseModel):
    type: Literal["error"]
    error: MessageErrorDetail


class MessageEvent(BaseModel):
    """An event of a stream. Its other fields depend on its type."""

    type: str
    message: MessageReply | None = None
    index: int = 0
    content_block: Block | None = None
    delta: BlockDelta | None = None
    usage: MessageUsage | None = None
    error: MessageErrorDetail | None = None


class CountReply(BaseModel):
    input_tokens: int


def message_replies(reply: Any, event: type[BaseModel] | None = None) -> dict[int | str, dict[str, Any]]:
    """The same for Anthropic's API, whose errors have a form of their own."""
    return replies(reply, event) | {"default": {"model": MessageError, "description": "An error"}}
