"""nanopage/terminal/text.py: nothing from outside reaches the terminal as a command, and stderr may fail."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanopage.terminal import text
from nanopage.terminal.text import (
    LOGGER,
    describe_error,
    printable,
    say,
    say_error,
    say_log,
    say_table,
    terminal_reflows,
)

ROOT = Path(__file__).parents[2]
ESCAPES = "\x1b]0;owned\x07 \x1b[2J\x9b31m \x7f\x08\x00 \r\udc9b"


def is_safe(shown: str) -> bool:
    return not any((c < " " and c not in "\t\n") or "\x7f" <= c <= "\x9f" or "\ud800" <= c <= "\udfff" for c in shown)


def test_control_characters_become_replacement_characters_and_all_other_text_stays():
    assert printable(ESCAPES) == "\ufffd]0;owned\ufffd \ufffd[2J\ufffd31m \ufffd\ufffd\ufffd \ufffd"
    plain = "a\tb\nc é 日本 👨‍👩‍👧 \u200f \xa0 [bold] \\"
    assert printable(plain.replace("\n", "\r\n")) == plain


def test_whatever_is_said_is_printable(capsys):
    say(f"{ESCAPES} [bold] \\")
    say_error(f"{ESCAPES} [red]")
    say_table([(ESCAPES, "[b]cell[/b] \\")])
    shown = capsys.readouterr().err
    assert is_safe(shown)
    assert shown.count("owned") == 3
    for markup in ("[bold] \\", "error: ", "[red]", "[b]cell[/b] \\"):
        assert markup in shown


@pytest.mark.parametrize(("verbose", "shown"), [(False, ["told", "warned"]), (True, ["quiet", "told", "warned"])])
def test_what_is_marked_for_the_user_is_shown_without_verbose(verbose, shown, monkeypatch, capsys):
    monkeypatch.setattr(LOGGER, "handlers", [])
    say_log(verbose)
    LOGGER.info("quiet")
    LOGGER.info("told", extra={"for_user": True})
    LOGGER.warning("warned")
    assert capsys.readouterr().err.split() == shown


@pytest.mark.parametrize("file", sorted(ROOT.glob("nanopage/terminal/*.py")), ids=lambda file: file.name)
def test_only_text_py_writes_on_stderr(file):
    """So that nothing gets around `printable`."""
    names = {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
    if file.name != "text.py":
        assert not {"stderr"} & names
        assert "stderr.print" not in file.read_text()


def test_printable_is_imported_without_the_engine():
    script = """
import sys, nanopage.terminal.text
print(*sorted(name for name in sys.modules if name.split(".")[0] in ("nanopage", "torch")))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["nanopage", "nanopage.terminal", "nanopage.terminal.text"]


def test_a_full_disk_behind_stderr_loses_the_message_and_nothing_else():
    script = (
        "from nanopage.terminal.text import *; say('one'); say_table([('a', 'b')]); say_error('two'); print('answer')"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=full, text=True)
    assert (done.returncode, done.stdout) == (0, "answer\n")


class Panic(BaseException):
    """What pyo3 raises when Rust panics."""


def test_an_error_is_described_by_its_message_or_named_as_ours():
    def described(error: BaseException, verbose: bool = False) -> str:
        try:
            raise error
        except BaseException as caught:
            return describe_error(caught, verbose)

    assert described(ValueError("temperature must be")) == "temperature must be"
    for error in (KeyError("x"), Panic("x"), AssertionError("x"), ValueError()):
        said = described(error)
        assert said.startswith(f"internal error: {type(error).__name__}: ")
        assert said.endswith("--verbose for the traceback.")
    said = described(Panic("x"), verbose=True)
    assert "Traceback" in said
    assert "in described" in said
    assert "--verbose" not in said
    assert text.ERRORS


@pytest.mark.parametrize(
    ("env", "reflows"),
    [
        ({"TERM": "xterm-256color"}, False),
        ({"TERM": "screen-256color", "TMUX": "/tmp/tmux-1/default,1,0"}, True),
        ({"TERM": "screen", "STY": "1.pts", "VTE_VERSION": "7600"}, False),
        ({"TERM": "xterm-256color", "VTE_VERSION": "7600"}, True),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "vscode"}, True),
    ],
)
def test_terminals_that_wrap_anew_are_known_by_what_they_leave_in_the_environment(monkeypatch, env, reflows):
    monkeypatch.setattr(os, "environ", env)
    assert terminal_reflows() == reflows


def test_a_lack_of_memory_is_no_internal_error():
    assert describe_error(MemoryError(), verbose=False) == "there is too little memory"
