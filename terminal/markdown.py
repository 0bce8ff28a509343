"""Markdown to a terminal while it is being written.

A block (a paragraph, a list, a table, a fenced piece of code) is printed once, when the next one has begun, and then
belongs to the scrollback. Only the block that is still growing is drawn over and over, at the end of the output.
"""

import itertools
import os
import re
import time
from typing import TextIO

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from rich.console import Console, RenderableType
from rich.markdown import Markdown
from rich.segment import Segment, SegmentLines
from rich.text import Text

UP, ERASE_BELOW = "\x1b[{}A", "\r\x1b[J"
# Rows that are drawn over must be single rows even where the terminal and rich disagree on how wide a glyph is.
WRAP_OFF, WRAP_ON = "\x1b[?7l", "\x1b[?7h"
# A frame is shown whole (synchronized output); terminals that do not know it ignore it.
BEGIN_FRAME, END_FRAME = "\x1b[?2026h", "\x1b[?2026l"
THINK, END_THINK = "<think>", "</think>"

# Without HTML and link definitions, which rich would not show, every block means by itself what it means in the text.
PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable("reference")
BLOCKS = MarkdownIt("commonmark", {"html": False}).enable("table").disable(["reference", "inline"])
INDENT = "\ufdd0"  # no character, by Unicode's word


def _keep_indents(state: StateCore) -> None:
    """Small models write code without a fence. Markdown drops the blanks that a line begins with."""
    for token in state.tokens:
        if token.type == "inline":
            token.content = re.sub("(?<=\n) +", lambda blanks: INDENT * len(blanks[0]), token.content)


PARSER.core.ruler.before("inline", "keep_indents", _keep_indents)


CONTINUE = ("bullet_list_open", "ordered_list_open", "code_block")  # these can go on after a blank line


class BlockSplitter:
    """Cuts a growing Markdown text into top-level blocks, the same ones however the text arrives.

    `rest` is the block that is not finished. A line counts once it is whole: the start of one can mean anything.
    """

    def __init__(self):
        self.rest = ""
        self._seen = 0  # of `rest`, up to the end of the last whole line

    def feed(self, text: str) -> list[str]:
        """Returns the blocks that have ended: a blank line closed them, or the next one has begun."""
        self.rest += text
        blocks = []
        while (end := self.rest.find("\n", self._seen) + 1) > 0:
            starts, ended = _blocks(self.rest[:end])
            if ended:
                starts.append(end)
            if len(starts) > 1:
                blocks += [self.rest[a:b] for a, b in itertools.pairwise(starts)]
                self.rest = self.rest[starts[-1] :]
                end -= starts[-1]
            self._seen = end
        return blocks

    def finish(self) -> list[str]:
        """No more text: what is left, as blocks."""
        starts = [*_blocks(self.rest)[0], len(self.rest)]
        blocks = [self.rest[a:b] for a, b in itertools.pairwise(starts)]
        self.rest, self._seen = "", 0
        return blocks


def _blocks(text: str) -> tuple[list[int], bool]:
    """Where the top-level blocks begin, and whether the last of them has ended with a blank last line."""
    offsets = [0, *itertools.accumulate(len(line) + 1 for line in text.split("\n"))]
    tokens = [token for token in BLOCKS.parse(text) if token.level == 0 and token.nesting >= 0]
    lines = [token.map for token in tokens if token.map]
    ended = bool(lines) and tokens[-1].type not in CONTINUE and offsets[lines[-1][1]] < len(text)
    return [offsets[first] for first, _ in lines], ended


class ReplyPrinter:
    """Shows one reply, which must be free of control characters, on a terminal as it comes; thoughts are dimmed.

    A resize is followed from the next frame on. A window made narrower may wrap the rows of the unfinished block anew;
    then some of them stay above it. Rather that than to erase what was finished.

    Args:
        file: a terminal.
        thinking: the reply begins within the model's thoughts: its template has written <think>.
        interval: least seconds between two frames.
    """

    def __init__(self, file: TextIO, thinking: bool = False, interval: float = 0.1):
        self.file, self.interval = file, interval
        self.console = Console(file=file, force_terminal=True, legacy_windows=False)
        self.blocks = BlockSplitter()
        self.thinking: bool | None = True if thinking else None  # None: too early to tell
        self._head = ""  # text of which it is not yet known whether it is thought, or a line of thought not yet whole
        self._rows = 0  # drawn rows of the unfinished block
        self._printed = False
        self._next_frame = 0.0

    def feed(self, delta: str) -> None:
        finished = self._take(delta)
        now = time.monotonic()
        if finished or now >= self._next_frame:
            self._draw(finished, live=True)
            # A frame that takes long (a large block, a slow machine) must not slow the model down.
            self._next_frame = time.monotonic() + max(self.interval, 10 * (time.monotonic() - now))

    def finish(self) -> None:
        """The reply is over, be it whole or not: print the rest."""
        finished: list[RenderableType] = []
        if self.thinking:
            finished += [Text(self._head.rstrip("\n"), style="dim")] if self._head.strip() else []
        elif self._head:
            finished += [_markdown(block) for block in self.blocks.feed(self._head)]
        self._head = ""
        self._draw(finished + [_markdown(block) for block in self.blocks.finish()], live=False)

    def _take(self, text: str) -> list[RenderableType]:
        """Take in new text. Returns what it finishes."""
        finished: list[RenderableType] = []
        if self.thinking is None:
            self._head += text
            start = self._head.lstrip()
            if THINK.startswith(start[: len(THINK)]) and len(start) < len(THINK):
                return []  # may still become the tag
            self.thinking = start.startswith(THINK)
            text, self._head = (start.removeprefix(THINK).lstrip("\n") if self.thinking else self._head), ""
        if self.thinking:
            thought, ends, text = (self._head + text).partition(END_THINK)
            paragraphs, self._head = _whole_paragraphs(thought) if not ends else ([thought], "")
            finished += [Text(p.strip("\n"), style="dim") for p in paragraphs if p.strip()]
            if not ends:
                return finished
            self.thinking = False
        return finished + [_markdown(block) for block in self.blocks.feed(text)]

    def _draw(self, finished: list[RenderableType], live: bool) -> None:
        """One frame, written at once: the unfinished block goes, what has finished is printed, the rest is drawn."""
        columns, rows = self._size()
        out = [BEGIN_FRAME, UP.format(self._rows) if self._rows else "", ERASE_BELOW]
        for renderable in finished:
            out += self._spaced(self._render(renderable, columns))
            self._printed = True
        self._rows = 0
        if live and (unfinished := self._unfinished(columns, rows)) is not None:
            # Its last rows, with room for the cursor below them: what is above the window can not be drawn over.
            lines = self._spaced(self._render(unfinished, columns - 1))[-max(1, rows - 2) :]
            self._rows = len(lines)
            out += [WRAP_OFF, *lines, WRAP_ON]
        self.file.write("".join([*out, END_FRAME]))
        self.file.flush()

    def _unfinished(self, columns: int, rows: int) -> RenderableType | None:
        text = self._head if self.thinking else self.blocks.rest
        if not text.strip():
            return None
        # Only so much source as the window could show: the work of a frame does not grow with the block.
        opening = re.match(r" {0,3}(```|~~~).*\n", text) if not self.thinking else None
        tail = "".join(text[-2 * columns * rows :].splitlines(keepends=True)[-rows:])
        if opening and len(tail) < len(text):
            tail = opening.group() + (tail if len(text) - len(tail) >= opening.end() else text[opening.end() :])
        return Text(tail.rstrip("\n"), style="dim") if self.thinking else _markdown(tail)

    def _spaced(self, lines: list[str]) -> list[str]:
        """Blocks are a blank line apart."""
        return ["\n", *lines] if self._printed and lines else lines

    def _render(self, renderable: RenderableType, columns: int) -> list[str]:
        """Its rows with their line ends, as the terminal wants them: neither blank at first or last, nor filled up."""
        options = self.console.options.update(width=max(columns, 10), height=None)
        lines = [_right_stripped(line) for line in self.console.render_lines(renderable, options, pad=False)]
        while lines and not lines[0]:
            del lines[0]
        while lines and not lines[-1]:
            del lines[-1]
        with self.console.capture() as capture:
            self.console.print(SegmentLines(lines, new_lines=True), end="", crop=False, soft_wrap=True)
        return capture.get().splitlines(keepends=True)

    def _size(self) -> tuple[int, int]:
        """Columns and rows of the window as it is now, whatever COLUMNS said when the shell began."""
        try:
            size = os.get_terminal_size(self.file.fileno())
        except (OSError, ValueError):
            return self.console.size
        return size.columns or 80, size.lines or 24


def _whole_paragraphs(text: str) -> tuple[list[str], str]:
    """The paragraphs that have ended, and the rest."""
    *whole, rest = re.split(r"\n\n+(?=[^\n])", text)
    return whole, rest


def _right_stripped(line: list[Segment]) -> list[Segment]:
    """A row without the blanks at its end, which would wrap when the window is made narrower."""
    line = list(line)
    while line and not line[-1].text.rstrip() and not (line[-1].style and line[-1].style.bgcolor):
        line.pop()
    if line and not (line[-1].style and line[-1].style.bgcolor):
        line[-1] = Segment(line[-1].text.rstrip(), line[-1].style)
    return line


def _markdown(text: str) -> Markdown:
    markdown = Markdown("", code_theme="ansi_dark", hyperlinks=False)
    markdown.parsed = PARSER.parse(text)
    for token in markdown.parsed:
        for child in token.children or []:
            child.content = child.content.replace(INDENT, " ")
            if child.type == "softbreak":  # verse, addresses, logs: a model's line ends are meant
                child.type = "hardbreak"
    return markdown
