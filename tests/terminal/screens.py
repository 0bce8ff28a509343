"""Emulated terminals."""

import io

import pyte


class Screen(io.StringIO):
    """A file whose text is on the screen of an emulated terminal."""

    def __init__(self, columns: int = 60, rows: int = 24):
        super().__init__()
        self.terminal = pyte.HistoryScreen(columns, rows, history=10_000, ratio=0.5)
        self.stream = pyte.Stream(self.terminal)

    def write(self, text: str) -> int:
        self.stream.feed(text.replace("\n", "\r\n"))
        return super().write(text)

    def lines(self) -> list[str]:
        """Scrollback and window, without the blanks at the end."""
        scrolled = ["".join(line[i].data for i in range(self.terminal.columns)) for line in self.terminal.history.top]
        return "\n".join(line.rstrip() for line in [*scrolled, *self.terminal.display]).rstrip().split("\n")


class Reflowing(Screen):
    """A terminal that wraps its rows anew when its width changes, as most do."""

    def resize(self, columns: int) -> None:
        terminal, rows = self.terminal, self.lines()
        x, y = terminal.cursor.x, len(terminal.history.top) + terminal.cursor.y
        rows += [""] * (y + 1 - len(rows))
        above = sum(max(1, -(-len(row) // columns)) for row in rows[:y])
        wrapped = [row[i : i + columns] for row in rows for i in range(0, max(1, len(row)), columns)]
        terminal.resize(terminal.lines, columns)
        terminal.reset()
        self.stream.feed("\r\n".join(wrapped))
        terminal.cursor_position(above + x // columns - len(terminal.history.top) + 1, x % columns + 1)
