"""What a body says about the form of its text: OpenAI's `response_format`, and vLLM's `structured_outputs`."""

import re
from collections.abc import Collection
from typing import Any

from nanopage.params import StructuredOutputsParams
from nanopage.server.errors import ApiError, unsupported

FIELDS = {"text": ("type",), "json_object": ("type",), "json_schema": ("type", "json_schema")}
FIELD = r"structured_outputs(\.\w+)?"  # how the engine's messages begin
SCHEMA_FIELDS = {
    "name": (str, "a string"),
    "description": (str, "a string"),
    "schema": (dict, "a JSON schema"),
    "strict": (bool, "true or false"),
}


def read_response_format(value: dict[str, Any]) -> StructuredOutputsParams | None:
    """The parameters of a `response_format`; None for plain text. Raises: ApiError naming the field.

    A schema is always followed: "strict" changes nothing.
    """
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in FIELDS:
        raise ApiError(400, f"response_format.type must be one of {', '.join(FIELDS)}", param="response_format.type")
    _refuse_others("response_format", value, FIELDS[kind])
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    place = "response_format.json_schema"
    inner = value.get("json_schema")
    if not isinstance(inner, dict):
        raise ApiError(400, f"{place} must be an object with a schema", param=place)
    _refuse_others(place, inner, SCHEMA_FIELDS)
    for name, (kind, what) in SCHEMA_FIELDS.items():
        if not isinstance(inner.get(name), kind) and (name == "schema" or inner.get(name) is not None):
            raise ApiError(400, f"{place}.{name} must be {what}", param=f"{place}.{name}")
    return StructuredOutputsParams(json=inner["schema"])


def read_structured_outputs(value: dict[str, Any]) -> StructuredOutputsParams | None:
    """The parameters of `structured_outputs`; None for an empty object. Raises: ApiError naming the field."""
    if all(option is None for option in value.values()):
        return None
    try:
        return StructuredOutputsParams(**value)
    except (ValueError, TypeError) as error:
        message = str(error)
        if (match := re.match(FIELD, message)) is None:
            raise ApiError(400, f"structured_outputs: {message}", param="structured_outputs") from None
        raise ApiError(400, message, param=match[0]) from None


def _refuse_others(place: str, value: dict[str, Any], known: Collection[str]) -> None:
    for name in value:
        if name not in known and value[name] is not None:
            raise unsupported(f"{place}.{name[:100]}", f"{place} may have {', '.join(known)}")
