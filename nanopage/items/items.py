"""Items: inputs that are no tokens (see `step.Item`). The engine knows only where they are and what they cost."""

from hashlib import sha256

import numpy as np

from nanopage.step import Item


def make_item(kind: str, position: int, length: int, payload: dict[str, np.ndarray], cost: int = 0) -> Item:
    """An item with the hash of its kind and payload. Args: as of `Item`."""
    digest = sha256(kind.encode())
    for name, array in sorted(payload.items()):
        digest.update(repr((name, array.dtype.str, array.shape)).encode())
        digest.update(np.ascontiguousarray(array).data)
    return Item(kind, position, length, digest.digest(), payload, cost)
