"""Renders Markdown to a terminal while it is being written.

A block (a paragraph, a list, a table) is printed once, when a blank line has closed it or the next block has begun. A
line of fenced code outside lists and quotations is printed as soon as it is whole. Printed text belongs to the
scrollback. Only the end of the output, which still grows, is redrawn.
"""

import dataclasses
import itertools
import os
import re
import time
from typing import ClassVar, TextIO

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markdown import CodeBlock, Markdown
from rich.segment import Segment, Segments
from rich.syntax import Syntax
from rich.text import Text

from nanopage.terminal.text import terminal_reflows
from nanopage.text.reasoning import END_THINK, THINK

UP, ERASE_BELOW = "\x1b[{}A", "\r\x1b[J"
# Redrawn rows must be single rows even if the terminal and rich disagree on the width of a glyph.
WRAP_OFF, WRAP_ON = "\x1b[?7l", "\x1b[?7h"
STYLE = re.compile("\x1b\\[[0-9;]*m")
# A frame is shown whole (synchronized output); terminals that do not know it ignore it.
BEGIN_FRAME, END_FRAME = "\x1b[?2026h", "\x1b[?2026l"
CONTEXT = 30  # the least lines of code to look at for highlighting the next line

# Without HTML and link definitions, which rich would not show, the meaning of a block does not depend on other blocks.
PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable("reference")
BLOCKS = MarkdownIt("commonmark", {"html": False}).enable("table").disable(["reference", "inline"])
INDENT = "\ufdd0"  # a noncharacter in Unicode


def _keep_indents(state: StateCore) -> None:
    """Keep the blanks at the beginning of a line, which Markdown drops: small models write code without a fence."""
    for token in state.tokens:
        if token.type == "inline":
            token.content = re.sub("(?<=\n) +", lambda blanks: INDENT * len(blanks[0]), token.content)


PARSER.core.ruler.before("inline", "keep_indents", _keep_indents)


FENCE = re.compile(r"(?:[ \t]*\n)* {0,3}(```|~~~)")
CONTINUE = ("bullet_list_open", "ordered_list_open", "code_block")  # these can go on after a blank line


class BlockSplitter:
    """Cuts a growing Markdown text into top-level blocks, the same ones however the text arrives. `rest` is the
    unfinished block. Only whole lines are read, because the beginning of a line can become anything."""

    def __init__(self):
        self.rest = ""
        self.fence: Token | None = None  # the fence that the whole lines of `rest` begin with
        self._seen = 0  # characters of `rest` up to the end of its last whole line

    def feed(self, text: str) -> list[str]:
        """Add text. Returns the blocks that have ended: a blank line closed them, or the next block has begun."""
        self.rest += text
        blocks, seen = [], self._seen
        while (end := self.rest.find("\n", self._seen) + 1) > 0:
            starts, ended = _blocks(self.rest[:end])
            if ended:
                starts.append(end)
            if len(starts) > 1:
                blocks += [self.rest[a:b] for a, b in itertools.pairwise(starts)]
                self.rest = self.rest[starts[-1] :]
                end -= starts[-1]
            self._seen = end
        if blocks or self._seen != seen:
            tokens = BLOCKS.parse(self.rest[: self._seen]) if FENCE.match(self.rest) else []
            self.fence = tokens[0] if tokens and tokens[0].type == "fence" else None
        return blocks

    def partial_line(self) -> str:
        """The last line of `rest`, if it is not whole yet."""
        return self.rest[self._seen :]

    def finish(self) -> list[str]:
        """End the text. Returns what is left, as blocks."""
        starts = [*_blocks(self.rest)[0], len(self.rest)]
        blocks = [self.rest[a:b] for a, b in itertools.pairwise(starts)]
        self.rest, self.fence, self._seen = "", None, 0
        return blocks


def _blocks(text: str) -> tuple[list[int], bool]:
    """Where the top-level blocks begin, and whether the last one has ended with a blank line."""
    offsets = [0, *itertools.accumulate(len(line) + 1 for line in text.split("\n"))]
    tokens = [token for token in BLOCKS.parse(text) if token.level == 0 and token.nesting >= 0]
    lines = [token.map for token in tokens if token.map]
    ended = bool(lines) and tokens[-1].type not in CONTINUE and offsets[lines[-1][1]] < len(text)
    return [offsets[first] for first, _ in lines], ended


@dataclasses.dataclass
class _Code:
    """The lines of a block of code, from line `start` on."""

    lines: list[str]
    start: int
    language: str


class ReplyPrinter:
    """Shows one reply, which must be free of control characters, on a terminal as it comes; thoughts are dimmed.

    The lines of fenced code outside lists and quotations are printed one by one: neither padded nor wrapped.

    The first frame after a resize uses the new size. If the terminal is known to rewrap rows, the rows of the
    unfinished block are counted again. Rows that a smaller window has pushed into the scrollback stay there.

    Args:
        file: a terminal.
        thinking: whether the reply begins within the model's thoughts, because its template has written <think>.
        interval: the least number of seconds between two frames.
        reflows: whether the terminal rewraps rows when it is made narrower.
    """

    def __init__(self, file: TextIO, thinking: bool = False, interval: float = 0.1, reflows: bool | None = None):
        self.file, self.interval = file, interval
        self.reflows = terminal_reflows() if reflows is None else reflows
        self.console = Console(file=file, force_terminal=True, legacy_windows=False)
        self.blocks = BlockSplitter()
        self.thinking: bool | None = True if thinking else None  # None: too early to tell
        self._head = ""  # text that may still turn out to be thought, or an unfinished line of thought
        self._finished: list[RenderableType | _Code] = []  # for the next frame to print
        self._code_printed = 0  # printed lines of the unfinished fenced code
        self._drawn: list[str] = []  # each drawn row of the unfinished block, without styles
        self._above = ""  # the part of it that was drawn before other programs wrote on the terminal
        self._printed = False
        self._next_frame = 0.0

    def skip(self, text: str) -> None:
        """Take in text that was shown before. Only its unfinished last block is drawn again."""
        self._take(text)

    def go_on_below(self) -> None:
        """Show further text below the cursor, because other programs have written on the terminal."""
        self._above += "".join(self._drawn)
        self._drawn = []

    def feed(self, delta: str) -> None:
        self._finished += self._take(delta)
        now = time.monotonic()
        if now >= self._next_frame:
            self._draw(live=True)
            # A frame that takes long (a large block, a slow machine) must not slow the model down.
            self._next_frame = time.monotonic() + max(self.interval, 10 * (time.monotonic() - now))

    def finish(self) -> None:
        """End the reply, complete or not, and print the rest."""
        if self.thinking:
            self._finished += [Text(self._head.rstrip("\n"), style="dim")] if self._head.strip() else []
        elif self._head:
            self._finished += self._blocks(self.blocks.feed(self._head))
        self._head = ""
        self._finished += self._blocks(self.blocks.finish())
        self._draw(live=False)

    def _take(self, text: str) -> list[RenderableType | _Code]:
        """Take in new text. Returns the pieces that it finishes."""
        finished: list[RenderableType | _Code] = []
        if self.thinking is None:
            self._head += text
            start = self._head.lstrip()
            if THINK.startswith(start[: len(THINK)]) and len(start) < len(THINK):
                return []  # may still become the tag
            self.thinking = start.startswith(THINK)
            text, self._head = (start.removeprefix(THINK).lstrip("\n") if self.thinking else self._head), ""
        if self.thinking:
            thought, ends, text = (self._head + text).partition(END_THINK)
            # The paragraphs that have ended, and the rest.
            *paragraphs, self._head = [thought, ""] if ends else re.split(r"\n\n+(?=[^\n])", thought)
            finished += [Text(p.strip("\n"), style="dim") for p in paragraphs if p.strip()]
            if not ends:
                return finished
            self.thinking = False
        finished += self._blocks(self.blocks.feed(text))
        if self.blocks.fence:
            finished += self._new_lines(self.blocks.fence)
        return finished

    def _blocks(self, blocks: list[str]) -> list[RenderableType | _Code]:
        """The parts of finished blocks that are still to be printed. For code, these are the lines not printed yet."""
        pieces: list[RenderableType | _Code] = []
        for block in blocks:
            tokens = BLOCKS.parse(block)
            if tokens and tokens[0].type in ("fence", "code_block"):
                pieces += self._new_lines(tokens[0])
                self._code_printed = 0
            else:
                pieces.append(_markdown(block))
        return pieces

    def _new_lines(self, token: Token) -> list[RenderableType | _Code]:
        code = _Code(_code_lines(token.content), self._code_printed, _language(token))
        self._code_printed = max(self._code_printed, len(code.lines))
        return [code] if code.start < len(code.lines) else []

    def _draw(self, live: bool) -> None:
        """Write a frame at once: erase the unfinished block, print what has finished, and draw the rest."""
        columns, rows = self._size()
        # The rows that the unfinished block takes on the screen now
        above = sum(max(1, -(-cell_len(row) // columns)) if self.reflows else 1 for row in self._drawn)
        out = [BEGIN_FRAME, UP.format(above) if above else "", ERASE_BELOW]
        for piece in _joined(self._finished):
            begun = isinstance(piece, _Code) and piece.start > 0
            lines = self._render_code(piece) if isinstance(piece, _Code) else self._render(piece, columns)
            out += self._rest(lines) if begun or self._above else self._spaced(lines)
            self._above, self._printed = "", True
        self._finished, self._drawn = [], []
        if live:
            # Draw only its last rows, with a row for the cursor below: rows above the window cannot be redrawn.
            lines = self._unfinished(columns - 1, rows)[-max(1, rows - 2) :]
            self._drawn = [STYLE.sub("", line).rstrip("\n") for line in lines]
            out += [WRAP_OFF, *lines, WRAP_ON] if lines else []
        self.file.write("".join([*out, END_FRAME]))
        self.file.flush()

    def _unfinished(self, columns: int, rows: int) -> list[str]:
        """The rows of the unfinished block."""
        if self.blocks.fence:
            return self._unfinished_line(self.blocks.fence, columns)
        text = self._head if self.thinking else self.blocks.rest
        if not text.strip():
            return []
        # Render only as much source as the window can show, so the work of a frame does not grow with the block.
        tail = "".join(text[-2 * columns * rows :].splitlines(keepends=True)[-rows:])
        lines = self._render(Text(tail.rstrip("\n"), style="dim") if self.thinking else _markdown(tail), columns)
        return self._rest(lines) if self._above else self._spaced(lines)

    def _unfinished_line(self, fence: Token, columns: int) -> list[str]:
        """The rows of the last line of code, which is not whole yet."""
        last = self.blocks.partial_line()
        if not last.strip() or not last.strip(fence.markup[0] + " "):  # maybe the end of the code
            return []
        lines = [*fence.content.splitlines(), last]
        while not lines[0].strip():
            del lines[0]
        (line,) = _highlighted(_Code(lines, len(lines) - 1, _language(fence)))
        rows = [self._ansi([*row.render(self.console)]) + "\n" for row in line.wrap(self.console, columns, tab_size=8)]
        return self._rest(rows) if self._code_printed or self._above else self._spaced(rows)

    def _rest(self, lines: list[str]) -> list[str]:
        """The rows of a block that are not yet shown above. If those above have changed, whole rows from there on."""
        if not self._above:
            return lines
        above = "".join(self._above.split())
        for number, line in enumerate(lines):
            text = "".join(STYLE.sub("", line).split())
            if text.startswith(above) and text != above:
                return [_cut(line, len(above)), *lines[number + 1 :]]
            if not above.startswith(text):
                return lines[number:]
            above = above.removeprefix(text)
        return []

    def _spaced(self, lines: list[str]) -> list[str]:
        """Put a blank line between blocks."""
        return ["\n", *lines] if self._printed and lines else lines

    def _render(self, renderable: RenderableType, columns: int) -> list[str]:
        """Its rows with the terminal's line ends, without padding, and without blank first and last rows."""
        options = self.console.options.update(width=max(columns, 10), height=None)
        lines = [_right_stripped(line) for line in self.console.render_lines(renderable, options, pad=False)]
        while lines and not lines[0]:
            del lines[0]
        while lines and not lines[-1]:
            del lines[-1]
        return [self._ansi(line) + "\n" for line in lines]

    def _render_code(self, code: _Code) -> list[str]:
        """Its lines as they are, however long: the terminal wraps them, and copies them whole."""
        return [self._ansi(list(line.render(self.console))) + "\n" for line in _highlighted(code)]

    def _ansi(self, segments: list[Segment]) -> str:
        with self.console.capture() as capture:
            self.console.print(Segments(segments), end="", crop=False, soft_wrap=True)
        return capture.get()

    def _size(self) -> tuple[int, int]:
        """Columns and rows of the window now. Ignores COLUMNS, which may be out of date."""
        try:
            size = os.get_terminal_size(self.file.fileno())
        except (OSError, ValueError):
            return self.console.size
        return size.columns or 80, size.lines or 24


def _cut(line: str, count: int) -> str:
    """Cut off the first `count` characters of a row that are not blank, and the blanks after them. Styles stay."""
    kept, begun = [], count == 0
    for piece in re.split(f"({STYLE.pattern})", line):
        while not begun and piece and not STYLE.fullmatch(piece) and (count or piece[0] == " "):
            count -= not piece[0].isspace()
            piece = piece[1:]
        begun = begun or bool(piece and not STYLE.fullmatch(piece))
        kept.append(piece)
    return "".join(kept)


def _joined(pieces: list[RenderableType | _Code]) -> list[RenderableType | _Code]:
    """The same pieces, with consecutive lines of code joined into one."""
    joined: list[RenderableType | _Code] = []
    for piece in pieces:
        if isinstance(piece, _Code) and piece.start and joined and isinstance(joined[-1], _Code):
            joined[-1] = _Code(piece.lines, joined[-1].start, piece.language)
        else:
            joined.append(piece)
    return joined


def _code_lines(content: str) -> list[str]:
    """The lines of code, without blank lines at the beginning and end."""
    lines = content.split("\n")
    while lines and not lines[-1].strip():
        del lines[-1]
    while lines and not lines[0].strip():
        del lines[0]
    return lines


def _language(token: Token) -> str:
    return (token.info.split() or ["text"])[0]


def _highlighted(code: _Code) -> list[Text]:
    """The lines from `code.start` on. Lines far before it are not read, so each line costs the same."""
    context = max(0, code.start // CONTEXT - 1) * CONTEXT
    syntax = Syntax("", code.language, theme="ansi_dark", tab_size=0)
    text = syntax.highlight("\n".join(code.lines[context:]))
    lines = text.split("\n", allow_blank=True)[: len(code.lines) - context]
    return list(lines[code.start - context :])


def _right_stripped(line: list[Segment]) -> list[Segment]:
    """A row without the blanks at its end, which would wrap when the window is made narrower."""
    line = list(line)
    while line and not line[-1].text.rstrip() and not (line[-1].style and line[-1].style.bgcolor):
        line.pop()
    if line and not (line[-1].style and line[-1].style.bgcolor):
        line[-1] = Segment(line[-1].text.rstrip(), line[-1].style)
    return line


class _NestedCode(CodeBlock):
    """Code in a list or a quotation: its rows stand where the list puts them, and have no padding of their own."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Syntax(str(self.text).rstrip(), self.lexer_name, theme=self.theme, word_wrap=True)


class _Markdown(Markdown):
    elements: ClassVar[dict] = {**Markdown.elements, "fence": _NestedCode, "code_block": _NestedCode}


def _markdown(text: str) -> Markdown:
    markdown = _Markdown("", code_theme="ansi_dark", hyperlinks=False)
    markdown.parsed = PARSER.parse(text)
    for token in markdown.parsed:
        for child in token.children or []:
            child.content = child.content.replace(INDENT, " ")
            if child.type == "softbreak":  # verse, addresses, logs: models mean their line ends
                child.type = "hardbreak"
    return markdown
