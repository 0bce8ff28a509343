"""The line a message is typed on: history across sessions, pasted and triple-quoted blocks, completion of commands."""

import contextlib
import os
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.output import create_output
from prompt_toolkit.utils import is_dumb_terminal

QUOTES = '"""'


class Prompt:
    """Reads messages from the terminal.

    Args:
        history: the file to keep them in, made readable by the user alone; none is kept on a dumb terminal.
        commands: name -> the words its argument can be, or None where that is a path.
    """

    def __init__(self, history: Path, commands: Mapping[str, Iterable[str] | None]):
        self.why_no_history = ""
        self._session: PromptSession[str] | None = None
        if is_dumb_terminal():  # it can not move the cursor
            return
        kept: History = InMemoryHistory()
        try:
            kept = _private_file(history)
        except OSError as error:
            self.why_no_history = f"no history is kept: {error}"
        self._session = PromptSession(
            "> ",
            history=kept,
            completer=_Completer(commands),
            complete_while_typing=False,
            multiline=Condition(lambda: is_open(get_app().current_buffer.text)),  # Enter goes on to the next line
            prompt_continuation="  ",
            output=create_output(always_prefer_tty=True),
        )

    def read(self) -> str:
        """The next message, or command, as it was typed. Raises EOFError on Ctrl-D, KeyboardInterrupt on Ctrl-C."""
        if self._session is None:
            text = input("> ")
            while is_open(text):
                text += "\n" + input("  ")
        else:
            text = self._session.prompt()
        # A terminal can send bytes that are no UTF-8; a model can not read them.
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def is_open(text: str) -> bool:
    """Whether a triple-quoted block, of a message or of a command's argument, still wants its end."""
    start = text.lstrip()
    if start.startswith("/") and not start.startswith("//"):
        start = start.partition(" ")[2].lstrip()
    return start.startswith(QUOTES) and not (len(start) >= 6 and start.rstrip().endswith(QUOTES))


def unquoted(text: str) -> tuple[str, bool]:
    """The text without triple quotes around it, if there are any, and whether there were."""
    block = text.strip()
    if len(block) >= 6 and block.startswith(QUOTES) and block.endswith(QUOTES):
        return block[3:-3].strip("\n"), True
    return text, False


def _private_file(path: Path) -> History:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    path.chmod(0o600)  # whatever it was before
    return _History(str(path))


class _History(FileHistory):
    def store_string(self, string: str) -> None:
        """In one write, so that two conversations at once do not mix their lines."""
        entry = f"\n# {datetime.now()}\n" + "".join(f"+{line}\n" for line in string.split("\n"))
        # A message is not lost for want of a place in the history.
        with contextlib.suppress(OSError), open(self.filename, "ab", buffering=0) as file:
            file.write(entry.encode("utf-8", "replace"))


class _Completer(Completer):
    def __init__(self, commands: Mapping[str, Iterable[str] | None]):
        self.commands = commands

    def get_completions(self, document: Document, complete_event):
        command, space, argument = document.text_before_cursor.partition(" ")
        if not command.startswith("/") or "\n" in document.text:
            return
        words: Iterable[str] | None = self.commands
        if space:
            words, command = self.commands.get(command, ()), argument
        if words is None:
            yield from PathCompleter(expanduser=True).get_completions(Document(argument), complete_event)
            return
        for word in words:
            if word.startswith(command):
                more = space or self.commands[word] != ()  # an argument, or the setting's value
                yield Completion(word + " " * bool(more), -len(command))
