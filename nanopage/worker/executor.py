"""Executors bring batches to the workers and results back. `step.Executor` is their interface."""

from collections import deque
from collections.abc import Callable

from nanopage.config.model import ModelConfig
from nanopage.config.options import EngineConfig
from nanopage.step import Batch, BatchResult, Capacity
from nanopage.weights.loader import Checkpoint
from nanopage.worker.model_runner import Launched
from nanopage.worker.worker import Worker


class LocalExecutor:
    """Runs one worker in this process. Messages are passed as objects.

    Args:
        checkpoint: the weights of the model that `model_config` describes.
        on_progress: called while weights load, with the number of weights read so far and the total.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        checkpoint: Checkpoint,
        on_progress: Callable[[int, int], None] | None = None,
    ):
        self._arguments = config, model_config, checkpoint, on_progress
        self.worker: Worker
        self._launched: deque[Launched] = deque()

    def start(self) -> Capacity:
        self.worker = Worker(*self._arguments)
        del self._arguments  # frees the vocabulary of a .gguf file, tens of megabytes
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
        """The worker is this process."""

    def compile(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        self.worker.compile(on_progress)

    def shutdown(self) -> None:
        self._launched.clear()
