"""JSON schemas as llguidance reads them."""

from typing import Any

# Formats that llguidance enforces, and formats of JSON Schema that it refuses by name. All others are annotations, such
# as OpenAPI's "int64" and "password".
ENFORCED = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
REFUSED = ("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template", "regex")
POINTERS = ("json-pointer", "relative-json-pointer")  # refused as well
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # names -> schemas
VALUES = ("enum", "const", "default", "examples", "required", "x-guidance")  # no schemas
MAX_DEPTH = 200  # anything nested deeper stays as it is


def without_annotations(schema: Any) -> tuple[Any, list[str]]:
    """A schema without the formats that only describe its strings and numbers, and these formats."""
    found: dict[str, None] = {}

    def clean(value: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            return value
        if isinstance(value, list):
            return [clean(each, depth + 1) for each in value]
        if not isinstance(value, dict):
            return value
        kept = {}
        for name, inner in value.items():
            if name == "format" and isinstance(inner, str) and inner not in ENFORCED + REFUSED + POINTERS:
                found[inner] = None
            elif name in NAMED and isinstance(inner, dict):
                kept[name] = {key: clean(each, depth + 2) for key, each in inner.items()}
            else:
                kept[name] = inner if name in VALUES else clean(inner, depth + 1)
        return kept

    return clean(schema, 0), list(found)
