"""The progress bar of `LLM.generate`, `chat` and `beam_search`."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from nanopage.outputs import StepStats


@contextlib.contextmanager
def progress_bar(
    total: int, listeners: list[Callable[[StepStats], None]], lock: threading.RLock, show: bool = True
) -> Iterator[Callable[[], None]]:
    """Show on stderr how many of `total` requests have finished, and the output tokens per second of all requests.

    Args:
        listeners: the engine's. Until the bar is closed, one of them counts the tokens of every step.
        lock: must be held to change `listeners`.
        show: False shows nothing and adds no listener.

    Yields: a function to call once for each finished request.
    """
    if not show:
        yield lambda: None
        return
    num_finished = num_tokens = 0

    def add_step(stats: StepStats) -> None:
        nonlocal num_tokens
        num_tokens += stats.output_tokens

    def advance() -> None:
        nonlocal num_finished
        num_finished += 1
        elapsed = progress.tasks[task].elapsed
        speed = f"{num_tokens / elapsed:.0f} output tok/s" if elapsed else ""
        progress.update(task, completed=num_finished, speed=speed)

    columns = (TextColumn("Generating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total, speed="")
        with lock:
            listeners.append(add_step)
        try:
            yield advance
        finally:
            with lock:
                listeners.remove(add_step)
