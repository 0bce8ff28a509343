"""The shapes of replies, for /openapi.json. A field with a default may be missing."""

from typing import Any, Literal

from pydantic import BaseModel, Field

FinishReason = Literal["stop", "length", "tool_calls"]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = Field(description="The field that is wrong, such as messages[2].content.")
    code: str | None


class ErrorReply(BaseModel):
    error: ErrorDetail


# /v1/chat/completions and /v1/completions


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[Literal["cached_tokens"], int]
    completion_tokens_details: dict[Literal["reasoning_tokens"], int]


class Named(BaseModel):
    id: str
    created: int
    model: str


class Envelope(Named):
    system_fingerprint: str = Field(description="Names the version and the options of the engine.")


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list["TokenLogprob"] = []


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None


class Function(BaseModel):
    name: str = ""
    arguments: str


class ToolCall(BaseModel):
    index: int = Field(0, description="Only in chunks. Those after the first of a call have no id, type and name.")
    id: str = ""
    type: Literal["function"] = "function"
    function: Function


class Delta(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: None = None
    reasoning: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = []


class Message(Delta):
    role: Literal["assistant"]
    content: str | None
    refusal: None


class Choice(BaseModel):
    index: int
    finish_reason: FinishReason | None = Field(description="null in chunks before the last of the choice.")
    stop_reason: int | str | None = Field(None, description="The stop string or stop token that ended the choice.")
    token_ids: list[int] = Field([], description="With return_token_ids. In chunks, the new tokens.")


class ChatChoice(Choice):
    message: Message
    logprobs: ChatLogprobs | None


class PromptLogprob(BaseModel):
    logprob: float
    rank: int | None
    decoded_token: str | None


class PromptTokens(BaseModel):
    prompt_token_ids: list[int] = Field([], description="With return_token_ids. In a stream, in the first chunks.")
    prompt_logprobs: list[dict[str, PromptLogprob] | None] = Field([], description="With prompt_logprobs.")


class ChatReply(Envelope, PromptTokens):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChunkChoice(Choice):
    delta: Delta
    logprobs: ChatLogprobs | None


class ChatChunk(Envelope, PromptTokens):
    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: Usage | None = None


class CompletionLogprobs(BaseModel):
    text_offset: list[int]
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Choice, PromptTokens):
    text: str
    logprobs: CompletionLogprobs | None


class CompletionReply(Envelope):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


# /v1/responses


class Part(BaseModel):
    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class Item(BaseModel):
    type: Literal["message", "reasoning", "function_call"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = Field("assistant", description="Of a message.")
    content: list[Part] = Field([], description="Of a message, and of reasoning.")
    summary: list[Any] = Field([], description="Of reasoning: empty.")
    call_id: str = Field("", description="Of a call, as the next two.")
    name: str = ""
    arguments: str = ""


class ResponsesUsage(BaseModel):
    input_tokens: int
    input_tokens_details: dict[Literal["cached_tokens", "cache_write_tokens"], int]
    output_tokens: int
    output_tokens_details: dict[Literal["reasoning_tokens"], int]
    total_tokens: int


class ResponsesReply(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[Literal["code", "message"], str] | None
    incomplete_details: dict[Literal["reason"], str] | None
    background: Literal[False]
    frequency_penalty: float
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[Literal["effort", "summary"], str | None]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: Literal["none", "auto", "required"] | dict[Literal["type", "name"], str]
    tools: list[dict[Literal["type", "name", "description", "parameters", "strict"], Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponsesUsage | None
    user: str | None


class ResponsesEvent(BaseModel):
    """An event of a stream. Its other fields depend on its type."""

    type: str
    sequence_number: int
    response: ResponsesReply | None = None
    item: Item | None = None
    part: Part | None = None
    item_id: str = ""
    output_index: int = 0
    content_index: int = 0
    delta: str = ""
    text: str = ""
    logprobs: list[Any] = []
    name: str = ""
    arguments: str = ""


# /v1/audio/transcriptions and /v1/audio/translations


class SoundUsage(BaseModel):
    type: Literal["duration"]
    seconds: int


class TranscriptSegment(BaseModel):
    id: int
    seek: int = Field(description="Where the window begins that it was found in, in steps of 10 ms.")
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class TranscriptWord(BaseModel):
    word: str
    start: float
    end: float


class TranscriptReply(BaseModel):
    text: str
    usage: SoundUsage
    task: str = Field("", description="This and what follows: of response_format=verbose_json.")
    language: str = ""
    duration: float = 0.0
    segments: list[TranscriptSegment] = []
    words: list[TranscriptWord] = Field([], description="With timestamp_granularities[]=word.")


class TranscriptEvent(BaseModel):
    type: Literal["transcript.text.delta", "transcript.text.done"]
    delta: str = ""
    text: str = ""
    usage: SoundUsage | None = None


# Vectors, scores, models and tokens


class Entry(BaseModel):
    object: Literal["embedding", "score"]
    index: int
    embedding: list[float] | str = Field([], description="Of /v1/embeddings; text with encoding_format=base64.")
    score: float = Field(0.0, description="Of /v1/score.")


class Rank(BaseModel):
    index: int
    relevance_score: float
    document: dict[Literal["text"], str] = {}


class RerankReply(Named):
    results: list[Rank]
    usage: dict[Literal["prompt_tokens", "total_tokens"], int]


class ListReply(Named):
    object: Literal["list"]
    data: list[Entry]
    usage: dict[Literal["prompt_tokens", "total_tokens"], int]


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    type: Literal["model"]
    display_name: str
    created_at: str
    root: str
    parent: str | None
    max_model_len: int | None
    default_sampling_params: dict[str, Any]


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]
    has_more: Literal[False]
    first_id: str
    last_id: str


class TokenizeReply(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] = []


def replies(reply: Any, event: type[BaseModel] | None = None) -> dict[int | str, dict[str, Any]]:
    """Describe an operation's replies for FastAPI.

    Args:
        reply: the type of the reply.
        event: the type of each event, for operations that can stream.
    """
    if event is None:
        return {200: {"model": reply}}
    description = f"{reply.__name__}; with stream=true, events with a {event.__name__} each"
    return {200: {"model": reply | event, "description": description, "content": {"text/event-stream": {}}}}
