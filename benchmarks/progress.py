"""A live line on stderr while requests run: how many are done, and what the engine's last step left behind."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

INTERVAL = 0.25  # seconds between two states of the line: drawing takes time from the engine


@contextlib.contextmanager
def progress(engine: Any, label: str, total: int) -> Iterator[None]:
    """Show a bar of `total` requests while `engine` steps. Without a terminal the engine is not even watched."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        refresh_per_second=4,
        redirect_stdout=False,  # stdout may be a file
    )
    task = bar.add_task(label, total=total, state="")
    step = engine.step
    started = shown = time.perf_counter()
    done = preempted = computed = cached = output_tokens = 0

    def watched_step():
        nonlocal shown, done, preempted, computed, cached, output_tokens
        outputs, stats = step(), engine.last_step
        done += sum(output.finished for output in outputs)
        preempted += stats.preempted
        computed += stats.prefill_tokens
        cached += stats.cached_tokens
        output_tokens += stats.output_tokens
        now = time.perf_counter()
        if now - shown >= INTERVAL:
            shown = now
            bar.update(task, completed=done, state=(
                f"{stats.running} running, {stats.waiting + stats.swapped} waiting, {preempted} preempted, "
                f"{stats.used_blocks} blocks, {hit_rate(cached, computed):.0%} prefix hits, "
                f"{output_tokens / (now - started):.0f} tok/s"
            ))  # fmt: skip
        return outputs

    engine.step = watched_step
    try:
        with bar:
            yield
    finally:
        engine.step = step


def hit_rate(cached_tokens: int, computed_tokens: int) -> float:
    """The share of prompt tokens found in the prefix cache."""
    return cached_tokens / max(1, cached_tokens + computed_tokens)
