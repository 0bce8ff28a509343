"""Executors bring batches to the workers and results back. `step.Executor` is their interface."""

from collections import deque
from collections.abc import Callable
from typing import Any

from nanopage.step import Batch, BatchResult, Capacity


class LocalExecutor:
    """Runs one worker in this process. Messages are passed as objects.

    Args: make_worker: loads the model. Returns a Worker.
    """

    def __init__(self, make_worker: Callable[[], Any]):
        self._make_worker = make_worker
        self.worker: Any
        self._launched: deque[Any] = deque()

    def start(self) -> Capacity:
        self.worker = self._make_worker()
        del self._make_worker  # frees the vocabulary of a .gguf file, tens of megabytes
        return self.worker.capacity

    def submit(self, batch: Batch) -> None:
        self._launched.append(self.worker.launch(batch))

    def add_masks(self, masks: dict[int, bytes]) -> None:
        self.worker.runner.add_masks(self._launched[-1], masks)

    def result(self) -> BatchResult:
        return self._launched.popleft().result()

    def discard(self) -> None:
        self._launched.clear()

    def rest(self) -> None:
        self.worker.rest()

    def check(self) -> None:
        """Nothing to check: the worker is this process."""

    def compile(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        self.worker.compile(on_progress)

    def call(self, method: str, *arguments: Any) -> None:
        getattr(self.worker.wings.standby, method)(self.worker, *arguments)

    def shutdown(self) -> None:
        self._launched.clear()
