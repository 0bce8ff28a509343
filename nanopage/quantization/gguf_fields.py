"""The metadata of a GGUF file, checked field by field: an error names the file and the field."""

from pathlib import Path
from typing import Any

import numpy as np

from nanopage.checks.fields import MAX_SIZES, RANGES
from nanopage.files.model_files import shown

INSTEAD = "the model's safetensors checkpoint may run"
REQUIRED: Any = object()  # the default of a field that must be present


class GGUFFields:
    """Reads values by their keys. `{arch}` in a key is the file's architecture.

    Args: values: as `Header.fields` (gguf_reader.py). Raises: ValueError, as all methods.
    """

    def __init__(self, path: Path, values: dict[str, Any]):
        self.path, self.values = path, values
        self.architecture = self.string("general.architecture")

    def error(self, key: str, problem: str) -> ValueError:
        return ValueError(f"{self.path}: {self.key(key)} {problem}")

    def unsupported(self, key: str) -> ValueError:
        """The error for a field that would change the output."""
        return self.error(key, f"= {shown(self.values[self.key(key)])} is not supported; {INSTEAD}")

    def key(self, key: str) -> str:
        return key.replace("{arch}", self.architecture) if "{arch}" in key else key

    def has(self, key: str) -> bool:
        return self.key(key) in self.values

    def field(self, key: str, kinds: type | tuple[type, ...], what: str, default: Any) -> Any:
        value = self.values.get(self.key(key), default)
        if value is REQUIRED:
            raise self.error(key, "is missing from the metadata")
        is_kind = isinstance(value, kinds) and (kinds is bool or not isinstance(value, bool))
        if value is not default and not is_kind:
            raise self.error(key, f"must be {what}, got {shown(value)}")
        return value

    def string(self, key: str, default: Any = REQUIRED) -> str:
        return self.field(key, str, "a string", default)

    def flag(self, key: str, default: bool) -> bool:
        return self.field(key, bool, "true or false", default)

    def size(self, key: str, name: str, default: Any = REQUIRED) -> int:
        """A size that config.json calls `name`, within its bounds."""
        value = self.field(key, int, "an integer", default)
        if value is not default and not 1 <= value <= MAX_SIZES[name]:
            raise self.error(key, f"must be from 1 to {MAX_SIZES[name]:,}, got {value}")
        return value

    def number(self, key: str, name: str, default: Any = REQUIRED) -> float:
        """A number that config.json calls `name`, within its range, as the shortest decimal with the same float32."""
        value = self.field(key, (int, float), "a number", default)
        low, high = RANGES[name]
        if not low <= value <= high:
            raise self.error(key, f"must be from {low:g} to {high:g}, got {value}")
        return float(str(np.float32(value)))  # 9.999999747378752e-06 is 1e-05

    def strings(self, key: str) -> list[str]:
        return self.field(key, list, "an array of strings", REQUIRED)
