"""The live view of a measured engine: in the terminal (`--view`), and recorded (`--record`)."""

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from benchmarks.steps import listening
from nanopage.outputs import StepStats
from nanopage.terminal.blocks import draw
from nanopage.view.frames import Frames, Recorder
from nanopage.view.picture import Picture

SECONDS = 2.0  # over which the rate is taken


@contextlib.contextmanager
def recording(engine: Any, model: str, file: Path | None) -> Iterator[None]:
    """Record the engine's steps to `file`, if there is one."""
    if file is None:
        yield
        return
    with open(file, "wb") as lines, listening(engine, Recorder(engine, lines, model)):
        yield


@contextlib.contextmanager
def viewed(engine: Any, model: str) -> Iterator[None]:
    """Show the live view on the terminal of stderr while the engine steps."""
    console = Console(stderr=True)
    frames, picture = Frames(engine, model), Picture()
    recent: deque[tuple[float, int]] = deque(maxlen=1000)
    picture.apply(frames.key())

    def after_step(stats: StepStats) -> None:
        picture.apply(frames.step(stats))
        recent.append((time.perf_counter(), stats.output_tokens))

    def render() -> RenderableType:
        now = time.perf_counter()
        while recent and now - recent[0][0] > SECONDS:
            recent.popleft()
        rate = sum(tokens for _, tokens in recent) / max(1e-3, now - recent[0][0]) if recent else 0.0
        return draw(picture, console.width - 1, console.height - 2, rate)

    live = Live(console=console, get_renderable=render, auto_refresh=False, screen=True, redirect_stdout=False)
    shown = 0.0

    def show(stats: StepStats) -> None:
        nonlocal shown
        if (now := time.perf_counter()) - shown > 0.1:  # on this thread: the picture must not change meanwhile
            shown = now
            live.refresh()

    with live, listening(engine, after_step), listening(engine, show):
        yield
