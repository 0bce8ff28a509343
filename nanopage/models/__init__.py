"""Model families, one file each: a family's names in config.json and GGUF files, its fields, and its decoder layer."""

import importlib
from types import ModuleType

FAMILIES = ("llama", "qwen2", "qwen3")


def find_family(architecture: str) -> ModuleType | None:
    """The module of the family that has an architecture of config.json, such as "LlamaForCausalLM"."""
    return next((family for family in load_families() if architecture in family.ARCHITECTURES), None)


def load_families() -> list[ModuleType]:
    return [importlib.import_module(f"nanopage.models.{name}") for name in FAMILIES]
