"""LLM.sleep, wake_up, is_sleeping and update_weights."""

from collections.abc import Iterable
from typing import Any

from nanopage.standby import engine as standby
from nanopage.standby.given import Weights


def sleep(llm: Any, level: int = 1) -> None:
    """Give memory back until `wake_up`: level 1 keeps the weights, 2 drops them. See standby/engine.py."""
    with llm._lock:
        standby.sleep(llm.engine, level)


def wake_up(llm: Any, tags: Iterable[str] | None = None) -> None:
    """Take back the memory of "weights" or "kv_cache", or of both. See standby/engine.py."""
    with llm._lock:
        standby.wake_up(llm.engine, tags)


def is_sleeping(llm: Any) -> bool:
    """Whether anything sleeps."""
    return bool(llm.engine.asleep)


def update_weights(llm: Any, weights: Weights) -> None:
    """Replace all weights of the model: a directory, a .safetensors file, or pairs (name, tensor). See
    standby/engine.py."""
    with llm._lock:
        standby.update_weights(llm.engine, weights)
