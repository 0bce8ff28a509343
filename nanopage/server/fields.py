"""The fields of objects inside a body: of messages, tools, and the items of a response.

One rule holds for all unknown fields, those of bodies included: they are ignored and listed, unless leaving them out
would change the answer.
"""

import re
from collections.abc import Iterator
from typing import Any

from nanopage.server.errors import unsupported

PARTS = ("type", "text", "refusal")
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
RESPONSE_PARTS = (*PARTS, "annotations", "logprobs")
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
# What would change the answer. Empty values ask for nothing.
REFUSED = {
    **dict.fromkeys(("images", "image", "image_url", "videos", "video"), "models read and write text"),
    **dict.fromkeys(("audio", "input_audio"), "models read and write text"),
    **dict.fromkeys(("file", "files", "attachments", "documents"), "send their text as content"),
    "function_call": "use tool_calls",
    "prefix": "use continue_final_message",
    "partial": "use continue_final_message",
}


def find_ignored(body: dict[str, Any], known: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """Where unknown fields are, such as "messages[].timestamp". Raises: ApiError for a field that is refused.

    Args: known: CHAT or RESPONSES.
    """
    for root in {re.split(r"\W", place)[0] for place in known}:
        yield from _find(body.get(root), root, known)


def _find(value: Any, place: str, known: dict[str, tuple[str, ...]]) -> Iterator[str]:
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
        if name in REFUSED and item:
            raise unsupported(f"{place}.{name}", REFUSED[name])
        if name in known[kind]:
            yield from _find(item, f"{place}.{name}", known)
        elif name not in REFUSED:
            yield f"{kind}.{name[:100]}"
