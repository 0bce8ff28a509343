"""nanopage/terminal/prompt.py: triple quotes, completion, Ctrl-C, and a history that is private and survives odd input.

What the editor saves is tested with /edit, in test_terminal_conversation.py.
"""

import os
import signal
import stat
import threading

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.data_structures import Size
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from prompt_toolkit.output.vt100 import Vt100_Output
from screens import Reflowing

from nanopage.terminal.prompt import Prompt, _Completer, _private_file, is_open, unquoted
from nanopage.terminal.signals import orderly_exit

COMMANDS = {"/help": (), "/set": ("temperature", "top_k", "top_p"), "/save": None, "/system": ()}


def test_triple_quotes():
    for text in ('"""', '"""a', '"""a\n', '""""', '/system """a', '/system """a""" b'):
        assert is_open(text), text
    for text in ("a", '"""a"""', '"""\na\n"""\n', '/system """a"""', "/system a", '"a"', ""):
        assert not is_open(text), text
    assert unquoted(' """\n a\n\n"""') == (" a", True)
    assert unquoted(" a ") == (" a ", False)
    assert unquoted('""" ') == ('""" ', False)


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("/h", ["/help"]),
        ("/s", ["/set ", "/save ", "/system"]),
        ("/set to", ["/set top_k ", "/set top_p "]),
        ("/set top_k 5", []),
        ("/help x", []),
        ("/nothing x", []),
        ("hello /s", []),
        ("", []),
    ],
)
def test_tab_completes_commands_and_their_words(typed, completed):
    completions = _Completer(COMMANDS).get_completions(Document(typed), None)
    assert [typed[: len(typed) + c.start_position] + c.text for c in completions] == completed


def test_tab_completes_paths(tmp_path):
    (tmp_path / "session one.json").touch()
    (found,) = _Completer(COMMANDS).get_completions(Document(f"/save {tmp_path}/ses"), None)
    assert found.text == "sion one.json"


def test_the_history_is_private_and_one_write_an_entry(tmp_path):
    path = tmp_path / "state" / "history"
    path.parent.mkdir()
    path.touch(mode=0o644)
    history = _private_file(path)
    entries = ["one", "two\nlines\n\n+ of it", "日本 🙂"]
    for entry in entries:
        history.store_string(entry)
    history.store_string("caf\udce9")  # no UTF-8
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(FileHistory(str(path)).load_history_strings()) == ["caf?", *entries[::-1]]
    path.unlink()
    path.mkdir()
    history.store_string("a full disk costs no message")


def test_a_history_that_cannot_be_kept_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TERM", "xterm")
    assert "no history is kept" in Prompt(tmp_path / "file" / "history", COMMANDS).why_no_history


@pytest.fixture
def typist(monkeypatch):
    """A prompt, and a function that types into it."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("nanopage.terminal.prompt.create_output", lambda **options: DummyOutput())
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        yield Prompt(None, COMMANDS), pipe.send_text


def test_ctrl_c_empties_a_line_and_is_raised_in_an_empty_one(typist):
    prompt, send = typist
    send("\x03")
    with pytest.raises(KeyboardInterrupt):
        prompt.read()
    assert not prompt.typed
    send("abc\x03def\r")
    assert prompt.read() == "def"
    send("abc\x7f\x7f\x7f\x03")
    with pytest.raises(KeyboardInterrupt):
        prompt.read()
    assert prompt.typed  # though nothing of it is left
    send('"""\rtwo\rlines\x03\x03')
    with pytest.raises(KeyboardInterrupt):
        prompt.read()
    send("\x04")
    with pytest.raises(EOFError):
        prompt.read()


def test_without_a_history_file_none_is_written(typist, tmp_path, monkeypatch):
    prompt, send = typist
    monkeypatch.chdir(tmp_path)
    send("hello\r")
    assert (prompt.read(), prompt.why_no_history) == ("hello", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("when", ["the history is read", "the prompt waits"])
def test_sigterm_ends_the_prompt_whatever_its_event_loop_does(typist, tmp_path, monkeypatch, caplog, when):
    path = tmp_path / "history"
    _private_file(path).store_string("one")
    prompt = Prompt(path, COMMANDS)
    read = FileHistory.load_history_strings

    def load(self):
        if when == "the history is read":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        yield from read(self)

    monkeypatch.setattr(FileHistory, "load_history_strings", load)
    with pytest.raises(SystemExit, match="143"), orderly_exit():
        prompt.read()
    assert not caplog.records


def test_a_resize_at_the_prompt_leaves_no_row_behind(monkeypatch):
    """Where the terminal wraps the rows of the prompt anew."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("TMUX", "1")
    monkeypatch.setenv("PROMPT_TOOLKIT_NO_CPR", "1")
    screen, widths, shown = Reflowing(60, 24), [25, 11, 50], []
    output = Vt100_Output(screen, lambda: Size(rows=24, columns=screen.terminal.columns), term="xterm")
    monkeypatch.setattr("nanopage.terminal.prompt.create_output", lambda **options: output)
    line = "twenty words fit into it " * 4
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=output):
        prompt = Prompt(None, COMMANDS)
        app = prompt._session.app

        def resize():
            if widths:
                screen.resize(widths.pop(0))
                app._on_resize()  # what SIGWINCH does

        def after_render(app):
            if app.is_done or len(app.current_buffer.text) < len(line):
                return
            shown.append(screen.lines())
            if widths:
                app.loop.call_soon(resize)
            else:
                app.exit(result="")

        app.after_render += after_render
        pipe.send_text(line)
        prompt.read()
    assert widths == []
    for lines in shown:
        assert "".join(row[2:] for row in lines).replace(" ", "") == line.replace(" ", "")
        assert sum(row.startswith("> ") for row in lines) == 1
    assert len(shown[1]) > len(shown[0])
