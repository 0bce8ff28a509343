"""terminal/prompt.py: blocks in triple quotes, completion, and a history that is private and survives odd input."""

import stat

import pytest
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory

from terminal.prompt import Prompt, _Completer, _private_file, is_open, unquoted

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


def test_a_history_that_can_not_be_kept_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TERM", "xterm")
    assert "no history is kept" in Prompt(tmp_path / "file" / "history", COMMANDS).why_no_history
