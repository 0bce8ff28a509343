"""The names that tensors of checkpoints have in a model, by regular expressions."""

import re
from collections.abc import Mapping

from nanopage.config.model import ModelConfig


def renamed(name: str, config: ModelConfig, names: Mapping[str, str | None]) -> str | None:
    """The name of a checkpoint's tensor in this model, or None if the tensor is not used.

    Args: names: what replaces each expression in a name, in this order. None: tensors with such names are not used.
    """
    for there, here in names.items():
        if here is not None:
            name = re.sub(there, here, name)
        elif re.search(there, name):
            return None
    return name
