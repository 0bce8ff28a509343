"""The input line: history across sessions, pasted and triple-quoted blocks, completion of commands."""

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input.typeahead import store_typeahead
from prompt_toolkit.input.vt100_parser import Vt100Parser
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.key_binding.key_processor import KeyPress
from prompt_toolkit.output import create_output
from prompt_toolkit.renderer import Renderer
from prompt_toolkit.utils import is_dumb_terminal

from nanopage.terminal.signals import orderly_exit_of, wait_for_input
from nanopage.terminal.text import terminal_reflows

QUOTES = '"""'


class Prompt:
    """Reads messages from the terminal. Ctrl-Z suspends the program.

    `typed` says whether anything was typed since the last call of `read` began. It is always true on a dumb terminal,
    which cannot move the cursor and does not report keys.

    Args:
        history: the file to keep messages in, made readable by the user alone; None, or a dumb terminal, keeps none.
        commands: name -> the words that its argument can be, or None if the argument is a path.
    """

    def __init__(self, history: Path | None, commands: Mapping[str, Iterable[str] | None]):
        self.why_no_history = ""
        self._ahead = ""  # text typed before a dumb terminal's prompt
        self.dumb = self.typed = is_dumb_terminal()
        self._session: PromptSession[str] | None = None
        if self.dumb:
            return
        kept: History = InMemoryHistory()
        try:
            kept = kept if history is None else _private_file(history)
        except OSError as error:
            self.why_no_history = f"no history is kept: {error}"
        self._session = PromptSession(
            "> ",
            history=kept,
            completer=_Completer(commands),
            complete_while_typing=False,
            multiline=Condition(lambda: is_open(get_app().current_buffer.text)),  # Enter goes on to the next line
            prompt_continuation="  ",
            key_bindings=_ctrl_c(),
            enable_suspend=True,
            output=create_output(always_prefer_tty=True),
        )
        self._session.default_buffer.on_text_changed += self._notice
        if terminal_reflows():
            app, style = self._session.app, self._session.app.renderer.style
            app.renderer = _Renderer(style, app.output, cpr_not_supported_callback=app.cpr_not_supported_callback)

    def type_ahead(self, typed: bytes) -> None:
        """Begin the next line or lines with text that was typed before the prompt appeared."""
        text = typed.decode("utf-8", "surrogateescape")
        if self._session is None:
            self._ahead += text
            return
        keys: list[KeyPress] = []
        parser = Vt100Parser(keys.append)
        parser.feed(text)
        parser.flush()
        store_typeahead(self._session.app.input, keys)

    def read(self) -> str:
        """The next message, or command, as it was typed.

        Raises: EOFError on Ctrl-D; KeyboardInterrupt on Ctrl-C in an empty line. Elsewhere Ctrl-C empties the line,
            but on a dumb terminal it raises in any line.
        """
        if self._session is None:
            text = self._line("> ")
            while is_open(text):
                text += "\n" + self._line("  ")
        else:
            self.typed = False
            with orderly_exit_of(self._session.app) as began:
                text = self._session.prompt(pre_run=began)
        # A terminal can send bytes that are not UTF-8, which a model cannot read.
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def _line(self, prompt: str) -> str:
        """A line on a dumb terminal."""
        line, ended, rest = self._ahead.partition("\n")
        self._ahead = rest
        if ended:
            print(f"{prompt}{line}")
            return line
        print(f"{prompt}{line}", end="", flush=True)
        wait_for_input()
        return line + input()

    def _notice(self, buffer) -> None:
        self.typed = True


class _Renderer(Renderer):
    """Erases the prompt correctly after the terminal has become narrower and has rewrapped the prompt's rows.
    prompt_toolkit by itself goes up only as many rows as it has drawn."""

    def erase(self, leave_alternate_screen: bool = True) -> None:
        self.output.cursor_up(self._wrapped_rows())
        super().erase(leave_alternate_screen)

    def _wrapped_rows(self) -> int:
        """Rows above the cursor that the terminal has added by rewrapping."""
        screen, columns, cursor = self.last_rendered_screen, self.output.get_size().columns, self._cursor_pos
        if screen is None:
            return 0
        widths = [max(screen.data_buffer[y], default=0) for y in range(cursor.y)]
        return sum(width // columns for width in widths) + cursor.x // columns


def _ctrl_c() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("c-c", filter=has_focus(DEFAULT_BUFFER))
    @keys.add("<sigint>")
    def _(event):
        if event.app.current_buffer.text:
            event.app.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return keys


def edit(text: str) -> str | None:
    """Have the user change `text` in $VISUAL or $EDITOR, else vi. Returns the saved text; None if nothing was saved.
    Raises: ValueError if there is no such editor, or it fails."""
    command = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with tempfile.TemporaryDirectory(prefix="nanopage-") as directory:  # readable by the user alone
        file = Path(directory) / "message.md"
        file.write_text(text, encoding="utf-8")
        before = file.stat().st_mtime_ns
        previous = signal.signal(signal.SIGINT, lambda signum, frame: None)  # Ctrl-C is for the editor
        try:
            code = subprocess.run([*shlex.split(command), str(file)]).returncode
        except OSError as error:
            raise ValueError(f"{command} cannot be run: {error.strerror}; set VISUAL or EDITOR") from None
        finally:
            signal.signal(signal.SIGINT, previous)
        if code:
            raise ValueError(f"{command} failed with exit code {code}: nothing is sent")
        if not file.exists() or file.stat().st_mtime_ns == before:
            return None
        return file.read_bytes().decode("utf-8", "replace").rstrip("\n")


def is_open(text: str) -> bool:
    """Whether a triple-quoted block, of a message or of a command's argument, is not closed yet."""
    start = text.lstrip()
    if start.startswith("/") and not start.startswith("//"):
        start = start.partition(" ")[2].lstrip()
    return start.startswith(QUOTES) and not (len(start) >= 6 and start.rstrip().endswith(QUOTES))


def unquoted(text: str) -> tuple[str, bool]:
    """(the text without triple quotes around it, whether there were any)."""
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
        """Store in one write, so that two conversations at once do not mix their lines."""
        entry = f"\n# {datetime.now()}\n" + "".join(f"+{line}\n" for line in string.split("\n"))
        # A disk that is full must not cost the message.
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
