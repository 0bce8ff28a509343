"""The bodies of requests: the fields that each endpoint reads. fields.py handles other fields."""

import dataclasses
import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from nanopage.params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from nanopage.server.errors import ApiError, invalid
from nanopage.server.fields import CHAT, REFUSED, RESPONSES, USE_CHAT, check_unknown
from nanopage.server.formats import FIELD, read_response_format, read_structured_outputs

DEFAULT_MAX_TOKENS = 16  # OpenAI's default for /v1/completions
MAX_CHOICES = 128  # limit of n and best_of
MAX_ENTRIES = 4096  # in stop, logit_bias, stop_token_ids and bad_words
MAX_ALLOWED = 262_144  # entries of allowed_token_ids
MAX_CHARACTERS = 16_384  # in all bad words together
MAX_FIELDS = 256  # in a body
MAX_LOGPROBS = 500_000  # in a reply's output, or in its prompt: choices * tokens * (top log-probabilities + 1)


def _as_integer(value: Any) -> Any:
    """Turn 16.0 into 16, because JSON does not tell them apart."""
    if isinstance(value, list) and float in set(map(type, value)):
        return [_as_integer(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_as_integer)]
# Without fail_fast, a list of a million wrong entries would make a million errors.
Ids = Annotated[list[int], Field(fail_fast=True), BeforeValidator(_as_integer)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Salt = Annotated[str, Field(min_length=1)]  # as in vLLM: an empty one would keep nothing apart


class Body(BaseModel):
    """A JSON object without its nulls. Values must have exactly the declared types."""

    model_config = ConfigDict(extra="allow", strict=True, hide_input_in_errors=True)
    refused: ClassVar[dict[str, tuple[tuple, str]]] = {}  # besides REFUSED
    known: ClassVar[dict[str, tuple[str, ...]]] = {}  # fields of objects inside (see fields.py)
    prompt_field: ClassVar[str] = "messages"  # has the prompt, or the texts

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        if len(body) > MAX_FIELDS:
            raise ValueError(f"an object has more than {MAX_FIELDS} fields")
        return {name: value for name, value in body.items() if value is not None}

    def check_unknown(self, strict: bool) -> list[str]:
        """The ignored fields to be listed (see fields.py). Raises: ApiError for a field that is refused."""
        return check_unknown(self, strict, REFUSED | self.refused, self.known)

    def invalid(self, error: Exception) -> ApiError:
        """A 400 for an error of the engine, with the field's name if the message begins with one of this body's."""
        return invalid(error, (*type(self).model_fields, self.prompt_field))


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class TextOptions(Body):
    format: dict[str, Any] = {"type": "text"}


class CommonBody(Body):
    """The fields that all endpoints for text have in common: first OpenAI's names, then vLLM's."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    stop: str | Texts | None = None
    seed: Integer | None = None
    stream: bool = False
    top_k: Integer | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: Integer | None = None
    dry_sequence_breakers: Texts | None = None
    min_tokens: Integer = 0
    stop_token_ids: Ids | None = None
    bad_words: Texts | None = None
    allowed_token_ids: Ids | None = None
    ignore_eos: bool = False
    thinking_token_budget: Integer | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: dict[str, Any] | None = None
    priority: Integer = 0
    cache_salt: Salt | None = None

    limits: ClassVar[tuple[str, ...]] = ("max_tokens", "max_completion_tokens")

    def bound(self, max_tokens: int) -> None:
        """Limit the tokens of the reply to `max_tokens`, if the body sets no limit."""
        if all(getattr(self, name) is None for name in self.limits):
            setattr(self, self.limits[0], max_tokens)


OF_PARAMS = [field.name for field in dataclasses.fields(SamplingParams) if field.name in CommonBody.model_fields]


class SamplingBody(CommonBody):
    """What /v1/chat/completions and /v1/completions have in common."""

    n: Integer = 1
    best_of: Integer | None = None
    max_tokens: Integer | None = None
    max_completion_tokens: Integer | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    truncate_prompt_tokens: Integer | None = None
    prompt_logprobs: Integer | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @property
    def limit(self) -> int | None:
        """The most tokens of a choice; None if the body does not say."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_usage_always(self) -> bool:
        return self.wants_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    def check(self) -> None:
        """Raises: ApiError for fields that are out of bounds or contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream=true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs are not available with stream=true", param="prompt_logprobs")
        for name in ("n", "best_of"):
            if (value := getattr(self, name)) is not None and not 1 <= value <= MAX_CHOICES:
                raise ApiError(400, f"{name} must be in [1, {MAX_CHOICES}]", param=name)
        if self.best_of is not None and self.best_of < self.n:
            raise ApiError(400, f"best_of={self.best_of} is less than n={self.n}", param="best_of")
        for name in ("stop", "logit_bias", "stop_token_ids", "bad_words"):
            value = getattr(self, name)
            if isinstance(value, list | dict) and len(value) > MAX_ENTRIES:
                raise ApiError(400, f"{name} has {len(value):,} entries: at most {MAX_ENTRIES:,}", param=name)
        if len(self.allowed_token_ids or ()) > MAX_ALLOWED:
            raise ApiError(400, f"allowed_token_ids has more than {MAX_ALLOWED:,} entries", param="allowed_token_ids")
        if sum(map(len, self.bad_words or ())) > MAX_CHARACTERS:
            raise ApiError(400, f"bad_words has more than {MAX_CHARACTERS:,} characters", param="bad_words")

    def sampling_params(
        self,
        default: SamplingParams,
        max_tokens: Integer | None,
        logprobs: Integer | None,
        constrain: Callable[[StructuredOutputsParams | None], StructuredOutputsParams | None] = lambda form: form,
    ) -> SamplingParams:
        """The parameters for the engine.

        Args:
            default: the model's recommendation, for fields that are absent.
            max_tokens: the limit if the body has none.
            constrain: changes the form that the text must have.

        Raises: ApiError naming the field.
        """
        structured = constrain(self._structured_outputs())
        given = {name: getattr(self, name) for name in OF_PARAMS if getattr(self, name) is not None}
        try:
            given |= {"logit_bias": _token_ids(self.logit_bias), "structured_outputs": structured}
            given |= {"logprobs": logprobs, "prompt_logprobs": self.prompt_logprobs}
            given["max_tokens"] = max_tokens if self.limit is None else self.limit
            given["output_kind"] = RequestOutputKind.CUMULATIVE if self.stream else RequestOutputKind.FINAL_ONLY
            params = dataclasses.replace(default, **given)
            if not params.greedy:  # greedy completions are all the same, so only one is computed
                params = dataclasses.replace(params, n=self.n, best_of=self.best_of)
        except (ValueError, TypeError) as error:
            raise self.invalid(error) from None
        return params

    def _structured_outputs(self) -> StructuredOutputsParams | None:
        """The constraints on the text. Raises: ApiError naming the field."""
        form = self._format()
        structured = None if self.structured_outputs is None else read_structured_outputs(self.structured_outputs)
        if form is not None and structured is not None:
            raise ApiError(400, "response_format and structured_outputs exclude each other", param="structured_outputs")
        return structured if form is None else form

    def _format(self) -> StructuredOutputsParams | None:
        return None if self.response_format is None else read_response_format(self.response_format)

    def check_logprobs(self, num_choices: int, num_tokens: int, num_top: int, field: str = "logprobs") -> None:
        """Raises: ApiError for a reply with too many log-probabilities."""
        if num_choices * num_tokens * (num_top + 1) > MAX_LOGPROBS:
            message = f"{field}: {num_choices} choices of {num_tokens:,} tokens with {num_top} top log-probabilities "
            raise ApiError(400, f"{message}are more than {MAX_LOGPROBS:,}: ask for fewer", param=field)

    def invalid(self, error: Exception) -> ApiError:
        if match := re.match(FIELD, str(error)):
            param = match[0] if self._format() is None else "response_format"
            if self.structured_outputs is None and getattr(self, "tools", None) and param != "response_format":
                param = "tools"  # the grammar comes from the tools
            return ApiError(400, param + str(error)[match.end() :], param=param)
        return super().invalid(error)


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    refused = {"add_special_tokens": ((False,), "the chat template writes them")}
    known = CHAT

    messages: Objects
    logprobs: bool = False
    top_logprobs: Integer | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None  # these are variables of some templates, too
    reasoning_effort: str | None = None
    reasoning: dict[str, Any] | None = None  # its effort
    stop_in_reasoning: bool = False
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt_field = "prompt"

    def bound(self, max_tokens: int) -> None:
        super().bound(min(max_tokens, DEFAULT_MAX_TOKENS))

    prompt: str | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)] | None = None
    prompt_embeds: str | Texts | None = None
    suffix: str | None = None
    echo: bool = False
    logprobs: Integer | None = None
    add_special_tokens: bool = True


class ResponsesBody(CommonBody):
    """POST /v1/responses. Sampling parameters that OpenAI's endpoint lacks are the same as for a chat."""

    refused = ChatBody.refused | {
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), ((), "use max_output_tokens")),
        **dict.fromkeys(("n", "best_of"), ((1,), "a response is one: use /v1/chat/completions")),
        "messages": ((), "use input"),
        "add_generation_prompt": ((True,), USE_CHAT),
        "length_penalty": ((1, 1.0), USE_CHAT),
        **dict.fromkeys(("truncate_prompt_tokens", "prompt_logprobs"), ((), USE_CHAT)),
        **dict.fromkeys(("logprobs", "continue_final_message", "use_beam_search"), ((False,), USE_CHAT)),
        **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), ((False,), USE_CHAT)),
    }

    known = RESPONSES
    limits = ("max_output_tokens",)

    input: str | Objects
    instructions: str | None = None
    max_output_tokens: Integer | None = None
    metadata: dict[str, str] = {}
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    tools: list[Any] = []
    include: Texts = []  # ignored: a response always includes everything
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    top_logprobs: Integer = 0
    text: TextOptions = TextOptions()
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    reasoning: dict[str, Any] | None = None
    stop_in_reasoning: bool = False
    response_format: dict[str, Any] | None = None  # refused: a client might expect it to have an effect


class PoolingBody(Body):
    """What the endpoints for embeddings and scores have in common."""

    refused = {
        "truncation_side": (("right",), "truncate_prompt_tokens keeps the first tokens of a text"),
        "add_special_tokens": ((True,), "texts have the special tokens of the model"),
        "use_activation": ((), "use normalize"),  # of embeddings
        "embed_dtype": (("float32",), "numbers are float32"),
        "endianness": (("little",), "numbers are little-endian"),
        "max_tokens_per_doc": ((0,), "use truncate_prompt_tokens"),
    }

    model: str | None = None
    truncate_prompt_tokens: Integer | None = None
    priority: Integer = 0
    cache_salt: Salt | None = None
    stream: bool = False  # refused if true

    prompt_field = "input"


class EmbeddingBody(PoolingBody):
    """POST /v1/embeddings."""

    input: str | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)]
    encoding_format: str = "float"
    dimensions: Integer | None = None
    normalize: bool | None = None
    prompt_name: str | None = None


class ScoreBody(PoolingBody):
    """POST /v1/score: a text with each of several, or the texts of two lists."""

    prompt_field = "text_2"

    text_1: str | Texts
    text_2: str | Texts
    use_activation: bool | None = None


class RerankBody(PoolingBody):
    """POST /v1/rerank, in the form of Jina and Cohere."""

    prompt_field = "documents"

    query: str
    documents: Annotated[list[str | dict[str, Any]], Field(fail_fast=True)]
    top_n: Integer | None = None
    return_documents: bool = True
    use_activation: bool | None = None


class TokenizeBody(Body):
    """POST /tokenize: a prompt, or messages."""

    refused = {"truncate_prompt_tokens": ((), "all tokens are returned")}
    known = CHAT

    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    reasoning: dict[str, Any] | None = None
    tools: list[Any] | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Ids


def _token_ids(logit_bias: dict[str, Any] | None) -> dict[int, float] | None:
    """Turn keys into integers, because JSON has only strings as keys."""
    if logit_bias is None:
        return None
    for token_id in logit_bias:
        if not (token_id.isascii() and token_id.isdecimal() and len(token_id) < 10):
            raise ValueError(f"logit_bias: {token_id[:50]!r} is not a token id")
    return {int(token_id): bias for token_id, bias in logit_bias.items()}
