"""Model families, one file each: a family's names in config.json and GGUF files, its fields, and its decoder layer.

Llama is here, and each module of nanopage/families/ is another family. An installed package may add families of its
own: modules like these, named by entry points of the group `nanopage.models` (see docs/adding-a-model.md). Nothing is
ever imported from a model's directory.
"""

import importlib
import itertools
import pkgutil
from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType

GROUP = "nanopage.models"
NEEDED = ("ARCHITECTURES", "read_config", "make_layer")


def find_family(architecture: str) -> ModuleType | None:
    """The module of the family that has an architecture of config.json, such as "LlamaForCausalLM". Families of other
    packages are imported only if no family here has it. Raises: as `load_families`."""
    families = itertools.chain(own_families(), other_families())
    return next((family for family in families if architecture in family.ARCHITECTURES), None)


def load_families() -> list[ModuleType]:
    """All families, those of other packages last. Raises: ValueError naming an entry point that is not a family."""
    return [*own_families(), *other_families()]


def own_families() -> Iterator[ModuleType]:
    """The families here. Each is imported only when the search reaches it, so a Llama imports no other family."""
    folder = importlib.import_module("nanopage.families")
    others = [module.name for module in pkgutil.iter_modules(folder.__path__, "nanopage.families.")]
    yield from map(importlib.import_module, ("nanopage.models.llama", *others))


def other_families() -> Iterator[ModuleType]:
    yield from map(load_entry_point, entry_points(group=GROUP))


@cache
def load_entry_point(entry: EntryPoint) -> ModuleType:
    """The module of a family in another package. Raises: ValueError naming the entry point."""
    place = f"the entry point {entry.name} = {entry.value} of the group {GROUP}"
    try:
        family = entry.load()
    except Exception as error:  # of any kind: the module is not ours
        raise ValueError(f"{place} cannot be loaded: {type(error).__name__}: {error}") from error
    if missing := [name for name in NEEDED if not hasattr(family, name)]:
        raise ValueError(f"{place} is not a model family: it lacks {', '.join(missing)}")
    return family
