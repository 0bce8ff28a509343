"""The installed command `nanopage`, which answers as chat.py does."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pexpect
import pytest
from helpers import run_chat, tiny_model
from programs import ROOT, forked

SCRIPT = Path(sysconfig.get_path("scripts")) / "nanopage"
ENV = os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "120"}
READY = re.escape("\x1b[?2004h")  # prompt_toolkit waits for input
CHAT = {  # the name it goes by -> how it is called
    "chat.py": [sys.executable, str(ROOT / "chat.py")],
    "nanopage chat": [str(SCRIPT), "chat"],
    "python -m nanopage chat": [sys.executable, "-m", "nanopage", "chat"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model that talks for a long time: its end-of-sequence token is very unlikely."""
    return tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=16384, eos_token_id=299)


@pytest.fixture(scope="module", autouse=True)
def _is_installed():
    assert SCRIPT.exists(), f"no {SCRIPT}: run pip install -e ."


def run(command: list[str], cwd: Path = ROOT, stdin: str = "") -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=cwd, env=ENV, input=stdin, capture_output=True, text=True, timeout=120)


def test_the_command_lists_its_subcommands_and_refuses_others():
    for command in ([str(SCRIPT)], [sys.executable, "-m", "nanopage"]):
        done = run([*command, "--help"])
        assert (done.returncode, done.stderr) == (0, "")
        assert re.search(r"\n  chat +Talk to a model in the terminal\.\n", done.stdout)
        assert run(command).returncode == 2
        done = run([*command, "chta"])
        assert (done.returncode, done.stdout) == (2, "")
        assert "No such command 'chta'" in done.stderr
    assert run([str(SCRIPT), "--help"]).stdout.startswith("Usage: nanopage [OPTIONS] COMMAND")


def test_the_command_has_its_version_and_completes_without_torch():
    code = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None  # an import of them raises ImportError
sys.argv = ["nanopage", *sys.argv[1:]]
from nanopage.__main__ import main
sys.exit(main())
"""
    run = [sys.executable, "-c", code]
    done = subprocess.run([*run, "--version"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"nanopage [\d.]+ \(torch \S+, transformers \S+, Python [\d.]+\)\n", done.stdout)
    env = {"_NANOPAGE_COMPLETE": "complete_bash", "COMP_CWORD": "2", "COMP_WORDS": "nanopage chat --max-"}
    done = subprocess.run(run, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["--max-tokens", "--max-model-len"]
    env = {"_NANOPAGE_COMPLETE": "source_zsh"}  # what --show-completion prints
    done = subprocess.run(run, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert "#compdef nanopage" in done.stdout


@pytest.fixture
def traps(tmp_path):
    """A directory with files that end a program which imports them."""
    for name in ("nanopage", "typer", "torch", "rich", "json"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the current directory was run')\n")
    assert "was run" in run([sys.executable, "-c", "import torch"], tmp_path).stderr
    return tmp_path


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["-p", "hi", "you"], 2)])
def test_chat_is_the_same_program_however_it_is_called(arguments, code, traps):
    """In a directory whose files have the names of modules; Python imports those itself if it is called with -m."""
    seen = set()
    for name, command in CHAT.items():
        done = run([*command, *arguments], ROOT if "-m" in command else traps)
        assert done.returncode == code, done.stderr
        shown = done.stdout + done.stderr
        assert ("Usage: " in shown) == (f"Usage: {name} [OPTIONS]" in shown) and shown
        seen.add(shown.replace(name, "NAME"))
    assert len(seen) == 1, seen


def test_the_command_answers_as_chat_py_does(model, traps):
    options = ["--model", str(model), "--eager", "--temperature", "0", "--max-tokens", "12"]
    done = run([str(SCRIPT), "chat", *options, "where is"], traps, "the cat?")
    expected = run_chat(*options, "where is", stdin="the cat?")
    assert (done.returncode, done.stdout) == (0, expected.stdout.replace("\r", "\n")) and done.stdout
    figures = r"[\d,.]+(?= (s,|tok/s))"
    assert re.sub(figures, "N", done.stderr) == re.sub(figures, "N", expected.stderr)


@pytest.mark.parametrize(
    ("command", "code", "err"),
    [
        ("chat --model {} -p hi >&-", 1, "error: stdout is closed"),
        ("--help >/dev/full", 1, "No space left on device"),
    ],
)
def test_streams_that_are_closed_or_full_are_no_tracebacks(model, command, code, err):
    command = f"{SCRIPT} {command.format(model)}"
    done = subprocess.run(
        ["bash", "-c", command], env=ENV, capture_output=True, text=True, errors="replace", timeout=120
    )
    assert done.returncode == code, done.stderr
    assert err in done.stderr
    assert "Traceback" not in done.stderr


def in_a_terminal(model, state, *arguments):
    """`nanopage chat` in a pseudo-terminal, with its conversations in the directory `state`."""
    options = ["chat", "--model", model, "--eager", "--temperature", 0, *arguments]
    env = ENV | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": str(state)}
    program = forked(SCRIPT, *options, env=env)
    return pexpect.spawn("true", encoding="utf-8", timeout=60, dimensions=(24, 120), preexec_fn=program)


def exit_code(child) -> int:
    child.expect(pexpect.EOF)
    child.close()
    return child.exitstatus


def test_a_conversation_says_how_the_program_goes_on_with_it(model, tmp_path):
    child = in_a_terminal(model, tmp_path, "--max-tokens", "5")
    child.expect(READY)
    child.send("where is the cat?\r")
    child.expect("tokens in")
    child.expect(READY)
    child.send("\x04")
    child.expect("The conversation is kept: nanopage chat --continue goes on with it")
    assert exit_code(child) == 0
