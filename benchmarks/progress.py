"""A live line on stderr while requests run: how many are done, and the state after the engine's last step."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from benchmarks.steps import listening
from nanopage.outputs import StepStats


@dataclass
class State:
    """What the line shows."""

    label: str
    total: int  # requests
    done: int = 0
    stats: StepStats = field(default_factory=StepStats)  # of the last step
    preempted: int = 0  # requests preempted since the start; the counts below are since the start, too
    computed_tokens: int = 0  # of prompts
    cached_tokens: int = 0
    output_tokens: int = 0

    def add(self, stats: StepStats) -> None:
        """Count a step."""
        self.stats = stats
        self.done += stats.finished
        self.preempted += stats.preempted
        self.computed_tokens += stats.prefill_tokens
        self.cached_tokens += stats.cached_tokens
        self.output_tokens += stats.output_tokens

    def line(self, width: int, seconds: float) -> str:
        """A line of at most `width` characters, with the most important fields. `seconds`: since the start."""
        stats = self.stats
        fields = [
            self.label,
            f"{stats.running} running",
            f"{stats.waiting + stats.swapped} waiting",
            f"{self.output_tokens / max(seconds, 1e-3):.0f} tok/s",
            f"{int(seconds) // 60}:{int(seconds) % 60:02}",
            f"{self.preempted} preempted",
            f"{hit_rate(self.cached_tokens, self.computed_tokens):.0%} prefix hits",
            f"{stats.used_blocks} blocks",
        ]
        line = f"{self.done}/{self.total}"
        for text in fields:
            longer = f"{line}  {text}"
            if len(longer) > width:
                break
            line = longer
        return line


@contextlib.contextmanager
def progress(engine: Any, label: str, total: int) -> Iterator[None]:
    """Show a line about `total` requests while `engine` steps. Without a terminal, do nothing and add no listener."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    state, started = State(label, total), time.perf_counter()

    def draw() -> Text:
        # Use less than the width, because some terminals wrap in the last column.
        return Text(state.line(console.width - 1, time.perf_counter() - started), no_wrap=True, overflow="crop")

    # stdout may be a file.
    live = Live(console=console, get_renderable=draw, transient=True, refresh_per_second=4, redirect_stdout=False)
    with listening(engine, state.add), live:
        yield


def hit_rate(cached_tokens: int, computed_tokens: int) -> float:
    """The share of prompt tokens found in the prefix cache."""
    return cached_tokens / max(1, cached_tokens + computed_tokens)
