"""Unknown fields of a body, and of the objects inside it: messages, tools, and input items.

A field that is null counts as absent. An unknown field is refused by name if leaving it out would change what the
client gets (`REFUSED`, `REFUSED_INSIDE`), and ignored otherwise. Ignored fields are listed in the header
x-ignored-fields, unless they ask for nothing (`WITHOUT_EFFECT`, and the neutral values in `REFUSED`).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from nanopage.grammar.schema import without_annotations
from nanopage.server.errors import ApiError, unsupported

USE_CHAT = "use /v1/chat/completions"
NO_GRAMMAR = "use response_format or structured_outputs"
NO_AUDIO = "models write text"
NO_STORE = "nothing is stored: send the whole conversation as input"

# field -> (the values that ask for nothing, why other values are refused)
REFUSED: dict[str, tuple[tuple, str]] = {
    "tools": ((), USE_CHAT),
    "tool_choice": (("none", "auto"), USE_CHAT),
    "functions": ((), "use tools"),
    "function_call": (("none",), "use tool_choice"),
    **dict.fromkeys(("grammar", "regex", "json_schema", "ebnf", "structural_tag"), ((), NO_GRAMMAR)),
    "prediction": ((), "there are no predicted outputs"),
    "modalities": ((["text"],), NO_AUDIO),
    "audio": ((), NO_AUDIO),
    "web_search_options": ((), "there is no web search"),
    "verbosity": (("medium",), "the model's template has no verbosity"),
    "chat_template": ((), "templates are those of the server"),
    "documents": (([],), "templates are given no documents"),
    "mm_processor_kwargs": (({},), "images are prepared as the model's files say"),
    "prompt_embeds": ((), "only /v1/completions takes embeddings"),
    "dry_penalty_last_n": ((-1,), "DRY looks at the last 2,048 tokens of the output"),
    "truncation_side": (("left",), "truncate_prompt_tokens keeps the last tokens of a prompt"),
    "logits_processors": (([],), "no code of a client is run"),
    "spaces_between_special_tokens": ((True,), "special tokens are never spaced"),
    "kv_transfer_params": (({},), "there is one engine"),
    **dict.fromkeys(("store", "background"), ((False,), "nothing is stored")),
    **dict.fromkeys(("previous_response_id", "conversation", "previous_input_messages"), ((), NO_STORE)),
    "prompt": ((), "there are no prompt templates"),
    "truncation": (("disabled",), "a prompt is never cut"),
    "echo": ((False,), "use /v1/completions"),
    "suffix": ((), "use /v1/completions"),
    "logprob_token_ids": (([],), "log-probabilities are those of the likeliest tokens"),
    "repetition_detection": ((), "use the parameters of DRY"),
    "watermarking": ((False,), "there is no watermarking"),
    "max_tool_calls": ((), "the client runs the tools"),
    "service_tier": (("auto", "default"), "there is one tier"),
}
WITHOUT_EFFECT = ("user", "metadata", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")

PARTS = ("type", "text", "refusal", "image_url")
TOOL = ("name", "description", "parameters", "strict")
# Where an object is -> the fields that are read there
CHAT = {
    "messages[]": (
        *("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning"),
        *("refusal", "annotations", "audio", "function_call"),  # of replies
    ),
    "messages[].content[]": PARTS,
    "messages[].tool_calls[]": ("id", "type", "function", "index"),
    "messages[].tool_calls[].function": ("name", "arguments"),
    "tools[]": ("type", "function"),
    "tools[].function": TOOL,
    "tool_choice": ("type", "function"),
    "tool_choice.function": ("name",),
}
RESPONSE_PARTS = (*PARTS, "detail", "annotations", "logprobs")
RESPONSES = {
    "input[]": (
        *("type", "id", "status", "role", "content", "call_id", "name", "arguments", "output"),
        *("summary", "encrypted_content"),  # of reasoning, which no template gets
    ),
    "input[].content[]": (*RESPONSE_PARTS,),
    "input[].output[]": (*RESPONSE_PARTS,),
    "tools[]": ("type", *TOOL),
    "tool_choice": ("type", "name", "function"),
}
# Fields that would change the answer. Empty values ask for nothing.
REFUSED_INSIDE = {
    **dict.fromkeys(("images", "image"), "images are parts of the type image_url"),
    **dict.fromkeys(("audio", "input_audio", "videos", "video"), "models read text and images"),
    **dict.fromkeys(("file", "files", "attachments", "documents"), "send their text as content"),
    "function_call": "use tool_calls",
    "prefix": "use continue_final_message",
    "partial": "use continue_final_message",
}


def check_unknown(
    body: BaseModel,
    strict: bool,
    refused: Mapping[str, tuple[tuple, str]],
    known: Mapping[str, tuple[str, ...]],
    path: str = "",
) -> list[str]:
    """The ignored fields to be listed, at most 50.

    Args:
        strict: refuse ignored fields as well.
        refused: fields, as in `REFUSED`.
        known: the known fields of the objects inside, such as CHAT.
        path: what precedes the names of the fields, such as "stream_options.".

    Raises: ApiError for a field that is refused.
    """
    ignored: list[str] = []
    for name, value in (body.model_extra or {}).items():
        if name in WITHOUT_EFFECT:
            continue
        neutral, why = refused.get(name, ((), NO_GRAMMAR))
        if name not in refused and not name.startswith("guided_"):
            ignored.append(path + name[:100])
        elif not any(value == other and type(value) is type(other) for other in neutral):
            raise unsupported(path + name, why)
    for name in type(body).model_fields:
        if isinstance(inner := getattr(body, name), BaseModel):
            ignored += check_unknown(inner, strict, refused, {}, f"{path}{name}.")
    ignored += dict.fromkeys(find_ignored(vars(body), known))
    for name in ("response_format", "structured_outputs", "tools", "format"):
        _, formats = without_annotations(getattr(body, name, None))
        ignored += [f"{path}{name}: format {each[:100]}" for each in formats]
    ignored += [f"include: {each[:100]}" for each in getattr(body, "include", ())]
    if ignored and strict:
        raise ApiError(400, f"unknown field {ignored[0]!r}", param=ignored[0], code="unknown_field")
    return ignored[:50]


def find_ignored(body: dict[str, Any], known: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Where unknown fields are, such as "messages[].timestamp". Raises: ApiError for a field that is refused.

    Args: known: as CHAT.
    """
    for root in {re.split(r"\W", place)[0] for place in known}:
        yield from _find(body.get(root), root, known)


def _find(value: Any, place: str, known: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _find(item, f"{place}[{index}]", known)
        return
    kind = re.sub(r"\[\d+\]", "[]", place)
    if not isinstance(value, dict) or kind not in known:
        return
    for name, item in value.items():
        if item is None:
            continue
        if name in REFUSED_INSIDE and item:
            raise unsupported(f"{place}.{name}", REFUSED_INSIDE[name])
        if name in known[kind]:
            yield from _find(item, f"{place}.{name}", known)
        elif name not in REFUSED_INSIDE:
            yield f"{kind}.{name[:100]}"


def ignored_header(ignored: list[str]) -> dict[str, str]:
    """The header that lists fields which were ignored."""
    names = ", ".join(name.encode("ascii", "replace").decode() for name in ignored)
    return {"x-ignored-fields": "".join(c for c in names if c.isprintable())} if ignored else {}
