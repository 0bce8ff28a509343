"""Draws an engine while it runs, for the notebooks: a column for each step, with the tokens that it computes of each
request, and the owner of each block after it."""

import time
from xml.sax.saxutils import escape

from IPython.display import SVG, display

from nanopage import LLMEngine
from nanopage.outputs import StepStats
from nanopage.view.explain import make_sentences

PAUSE = 0.2  # seconds after each step, so that it can be watched
SIDE, LEFT, TOP, NUM_COLUMNS = 18, 70, 34, 40  # sizes in pixels; how many steps a drawing has room for
COLORS = ["#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#8a8a2f"]
INK, LINE, PALE, WHITE = "#24292f", "#8c959f", "#d0d7de", "#ffffff"

Cell = tuple[str, str]  # fill, text


class Watch:
    """A drawing below the cell, which grows with each step of an engine, from now on. The prefix cache is emptied.

    Attributes:
        steps: of each step, the cells of requests and of blocks, by their labels.
    """

    def __init__(self, engine: LLMEngine):
        self.engine, self.steps, self._told = engine, list[dict[str, Cell]](), list[str]()
        self._colors: dict[str, str] = {}  # request -> color, in order of arrival
        self._last: dict[str | None, str] = {}  # request -> the kind of its last sentence
        engine.reset_prefix_cache()
        self._shown = display(self._draw(), display_id=True)
        engine.listeners[:] = [self]

    def __call__(self, stats: StepStats) -> None:
        """Draw a step that has ended, as a listener of the engine."""
        for event in stats.events:
            if event.kind == "added":
                self._color(event.request_id)
        self.steps.append(self._computed() | self._blocks())
        for kind, name, sentence in make_sentences(self.engine):
            waits_still = kind == self._last.get(name) == "wait"
            if kind not in ("add", "run", "finish") and not waits_still:
                self._told.append(f"step {len(self.steps)}: {sentence}")
            self._last[name] = kind
        self._shown.update(self._draw())
        time.sleep(PAUSE)

    def why(self) -> None:
        """Print what the scheduler has decided, and why. Of a request that waits, only the first reason."""
        print(*self._told, sep="\n")

    def _color(self, name: str) -> str:
        return self._colors.setdefault(name, COLORS[len(self._colors) % len(COLORS)])

    def _computed(self) -> dict[str, Cell]:
        """The tokens that the step has computed of each request."""
        schedule, counts = self.engine.last.scheduled, dict[str, int]()
        if schedule is not None:
            for seq, count in zip(schedule.sequences, schedule.batch.counts, strict=True):
                counts[seq.group.request_id] = counts.get(seq.group.request_id, 0) + count
        return {name: (self._color(name), f"{count}") for name, count in counts.items()}

    def _blocks(self) -> dict[str, Cell]:
        """The owner of each block, or how many requests share it, or that it is cached (c)."""
        manager, owners = self.engine.scheduler.block_manager, dict[int, list[str]]()
        cells = {f"block {block}": (PALE, "c") for block in manager.prefixes.cached}
        for group in self.engine.scheduler.running:
            for block in (block for seq in group.live for block in manager.block_tables[seq.seq_id]):
                owners.setdefault(block, []).append(group.request_id)
        for block, names in owners.items():
            cells[f"block {block}"] = (self._color(names[0]), "" if len(names) == 1 else f"×{len(names)}")
        return cells

    def _draw(self) -> SVG:
        """The drawing so far. The first steps are left out if there are too many."""
        first = max(0, len(self.steps) - NUM_COLUMNS)
        blocks = [f"block {block}" for block in range(self.engine.scheduler.block_manager.num_blocks)]
        width, y, shapes = LEFT + NUM_COLUMNS * SIDE + 4, TOP, list[str]()
        for title, labels in (("tokens computed in each step", [*self._colors]), ("who has each block", blocks)):
            shapes.append(text(LEFT, y - 20, title, "start"))
            for x in range(first, len(self.steps), 5):
                shapes.append(text(LEFT + (x - first + 0.5) * SIDE, y - 5, f"{x + 1}", size=9))
            shapes.append(box(LEFT, y, NUM_COLUMNS * SIDE, len(labels) * SIDE, WHITE))
            for label in labels:
                shapes.append(text(LEFT - 6, y + 13, label, "end", 11))
                for x, step in enumerate(self.steps[first:]):
                    if label in step:
                        fill, words = step[label]
                        shapes.append(box(LEFT + x * SIDE, y, SIDE, SIDE, fill))
                        if words:
                            ink = INK if fill == PALE else WHITE
                            shapes.append(text(LEFT + (x + 0.5) * SIDE, y + 13, words, size=10, ink=ink))
                y += SIDE
            y += TOP + 6
        ground = f'<rect width="{width}" height="{y}" fill="{WHITE}"/>'
        size = f'width="{width}" height="{y}" font-family="sans-serif"'
        return SVG("\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', ground, *shapes, "</svg>"]))


def text(x: float, y: float, words: str, anchor: str = "middle", size: int = 12, ink: str = INK) -> str:
    """Words whose baseline is at y."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{ink}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    """A rectangle with its upper left corner at (x, y)."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width}" height="{height}" fill="{fill}" stroke="{LINE}"/>'
