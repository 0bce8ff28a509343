"""Record a session of chat.py, as an emulated terminal of 80 x 24 shows it.

python -m benchmarks.chat_session benchmarks/results/chat-session.txt
python -m benchmarks.chat_session docs/chat.svg

A .svg file gets a picture of a short session. Any other file gets the text of a long session. A script types into a
shell in a pseudo-terminal. Lines in (parentheses) say what it does besides typing, or how many lines are left out.
`pip install -e '.[test]'` installs its dependencies.
"""

import datetime
import io
import json
import os
import string
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pexpect
import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

from benchmarks.machine import cpu_name, versions
from nanopage.weights import hub

ROOT = Path(__file__).parent.parent
COLUMNS, ROWS = 80, 24
TIMEOUT = 300  # seconds
CTRL_C, CTRL_D, CTRL_Z = "\x03", "\x04", "\x1a"
CUT_AFTER = 10  # lines at the beginning and at the end of a reply that is too long to show


class Recorder:
    """A shell in an emulated terminal, which rewraps its rows after a resize, and a transcript of what it showed."""

    def __init__(self, state: str):
        env = os.environ | {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": state}
        env |= {"TMUX": "emulated", "EDITOR": "sed -i 's/.*/What is the capital of Italy?/'"}
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        for name in ("NO_COLOR", "COLUMNS", "LINES"):
            env.pop(name, None)
        self.child = pexpect.spawn("bash", ["--norc", "-i"], env=env, dimensions=(ROWS, COLUMNS), cwd=str(ROOT))
        self.transcript: list[str] = []
        self.clear("")
        self.type("PS1='$ '; bind 'set enable-bracketed-paste off'; clear\r")
        self.wait(lambda: self.lines() == ["$"])
        self.clear("$ ")

    def clear(self, shown: str) -> None:
        self.screen = pyte.HistoryScreen(COLUMNS, ROWS, history=10_000, ratio=0.5)
        self.stream = pyte.ByteStream(self.screen)
        self.stream.feed(shown.encode())

    def lines(self) -> list[str]:
        top = ["".join(line[i].data for i in range(self.screen.columns)) for line in self.screen.history.top]
        return "\n".join(line.rstrip() for line in [*top, *self.screen.display]).rstrip().split("\n")

    def type(self, keys: str) -> None:
        self.child.send(keys)

    def read(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                self.stream.feed(self.child.read_nonblocking(65536, timeout=left))
            except pexpect.TIMEOUT:
                return

    def wait(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + TIMEOUT
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError("\n".join(self.lines()))
            self.read(0.05)

    def see(self, text: str) -> str:
        """Wait for a line with `text`. Returns it."""
        self.wait(lambda: any(text in line for line in self.lines()))
        return next(line for line in self.lines() if text in line)

    def note(self, text: str) -> None:
        self.transcript.append(f"({text})")

    def resize(self, columns: int) -> None:
        rows = [line[i : i + columns] for line in self.lines() for i in range(0, max(1, len(line)), columns)]
        self.screen.resize(ROWS, columns)
        self.screen.reset()
        self.stream.feed("\r\n".join([*rows, ""]).encode())
        self.child.setwinsize(ROWS, columns)

    def end(self, prompt: str = ">", cut: bool = False) -> None:
        """Wait for the prompt, and add the shown lines to the transcript."""
        self.wait(lambda: len(self.lines()) > 1 and self.lines()[-1].strip() == prompt)
        shown = self.lines()[:-1]
        if cut and len(shown) > 2 * CUT_AFTER:
            left_out = len(shown) - 2 * CUT_AFTER
            shown[CUT_AFTER:-CUT_AFTER] = [f"(... {left_out} lines ...)"]
        self.transcript += shown
        self.clear(f"{prompt} ")

    def ask(self, text: str, prompt: str = ">", cut: bool = False) -> None:
        self.type(f"{text}\r")
        self.end(prompt, cut)


def record(recorder: Recorder) -> None:
    r = recorder
    r.type("python chat.py --seed 1\r")
    r.see("Loading")
    r.note('"Hi! " is typed while the model loads; it waits for the prompt, and the rest is typed there')
    r.type("Hi! ")
    r.see("> Hi!")
    r.ask("What is the capital of France?")
    r.note("abc Ctrl-C def Ctrl-C: the line is empty again; then Ctrl-C in the empty line")
    r.ask(f"abc{CTRL_C}def{CTRL_C}{CTRL_C}")
    r.ask("/set repetition_penalty")
    r.ask("Give me three tips for learning Python as bullets, a short code example and a small table.")
    r.ask("Write a Python function that adds two numbers.")
    r.ask("List three fruits and their colours as a Markdown table.", cut=True)
    r.ask("/set max_tokens=30")
    r.ask("Tell me about Paris.")
    r.ask("/continue")
    r.ask("/set max_tokens default")
    r.ask("/set stop_token_ids [99999]")

    r.note("Ctrl-C in the middle of /regen")
    r.type("/regen\r")
    r.wait(lambda: sum(map(len, r.lines())) > 150)
    r.type(CTRL_C)
    r.end()
    r.ask("/undo")

    r.note("a paste of 3,600 words; while it is read, one line shows")
    r.type("\x1b[200~" + "the quick brown fox jumps over the lazy dog " * 400 + "\x1b[201~\r")
    line = r.see(" of ")
    r.type(CTRL_C)
    stopping = r.see("stopping")
    r.wait(lambda: r.lines()[-1] == ">")
    after = [line for line in r.lines() if line.startswith("Stopped")]
    r.transcript += [line, "(Ctrl-C, and at once)", stopping, *after, ""]
    r.clear("> ")

    r.note("what small models do, without the sampling that is recommended")
    r.ask("/set temperature 0")
    r.ask("/set repetition_penalty 1")
    r.ask("Write a very long poem about the sea.", cut=True)
    r.ask("/set temperature default")
    r.ask("/set repetition_penalty default")

    r.note("the window is made 50 columns wide, and 80 again, while the reply is written")
    r.type("Describe the Moon in three long paragraphs.\r")
    r.wait(lambda: sum(map(len, r.lines())) > 150)
    r.resize(50)
    r.read(0.5)
    r.resize(COLUMNS)
    r.end()

    r.note("Ctrl-Z")
    r.type(CTRL_Z)
    r.end("$")
    r.type("fg\r")
    r.end()
    r.note("an editor that writes a question")
    r.ask("/edit")
    r.ask("/model default")
    r.note("Ctrl-D")
    r.type(CTRL_D)
    r.end("$")
    r.ask("python chat.py --continue")
    r.ask("What was my last question?")
    r.ask("/stats")
    r.ask("/clear")
    r.ask("/load")
    r.ask("/bye", "$")


def draw(recorder: Recorder) -> str:
    """A picture of a short session, as SVG."""
    r = recorder
    r.type("python chat.py --seed 1\r")
    r.see("/help lists commands")
    r.type("What is the capital of France?\r")
    r.see("TTFT")
    r.type("Thank you! What should I see there?\r")
    r.wait(lambda: sum("TTFT" in line for line in r.lines()) == 2 and r.lines()[-1].strip() == ">")
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for y in range(len(r.lines())):
        line = Text()
        cells = [r.screen.buffer[y][x] for x in range(COLUMNS)]
        for (color, bold, italic), run in groupby(cells, lambda cell: (cell.fg, cell.bold, cell.italics)):
            named = {"brown": "yellow"}.get(color, color).replace("bright", "bright_")  # pyte's names to rich's
            is_rgb = len(color) == 6 and set(color) <= set(string.hexdigits)
            style = Style(color=f"#{color}" if is_rgb else named, bold=bold, italic=italic)
            line.append("".join(cell.data for cell in run), style)
        line.rstrip()
        console.print(line, no_wrap=True)
    r.type(CTRL_D)
    return console.export_svg(title="nanopage")


def recommended() -> str:
    """The default model's sampling settings."""
    config = json.loads((hub.default_model() / "generation_config.json").read_text())
    names = ("temperature", "top_p", "repetition_penalty")
    return ", ".join(f"{name} {config[name]}" for name in names if name in config) or "no sampling settings"


def main(file: Path) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as state:
        recorder = Recorder(state)
        if file.suffix == ".svg":
            file.write_text(draw(recorder), encoding="utf-8")
            return
        record(recorder)
    header = (
        f"What a terminal of {COLUMNS} x {ROWS} showed of chat.py at {commit.stdout.strip()}, "
        f"{datetime.date.today()}, typed by a script (python -m benchmarks.chat_session). {cpu_name()}, {versions()}. "
        f"The model recommends {recommended()}."
    )
    lines = [*textwrap.wrap(header, COLUMNS), "", *recorder.transcript]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
