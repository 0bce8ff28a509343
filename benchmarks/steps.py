"""How benchmarks watch an engine: the engine calls its listeners with the StepStats of each step."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from nanopage.outputs import StepStats


@contextlib.contextmanager
def listening(engine: Any, listener: Callable[[StepStats], None]) -> Iterator[None]:
    """Call `listener` at the end of each of the engine's steps, until the block ends."""
    engine.listeners.append(listener)
    try:
        yield
    finally:
        engine.listeners.remove(listener)
