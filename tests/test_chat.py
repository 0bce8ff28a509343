"""chat.py: one-shot through pipes, and a conversation in a real pseudo-terminal."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest
from helpers import tiny_model

ROOT = Path(__file__).parent.parent
ENV = os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "120"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model that talks for a long time: its end-of-sequence token is very unlikely."""
    return tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=16384, eos_token_id=299)


def chat(model, *arguments, stdin: str = "") -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / "chat.py"), "--model", str(model), "--eager", *arguments],
        env=ENV,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_pipe_is_answered_on_stdout_and_everything_else_goes_to_stderr(model):
    options = ["--temperature", "0", "--max-tokens", "12"]
    piped = chat(model, *options, stdin="where is the cat?\n")
    assert piped.returncode == 0, piped.stderr
    assert piped.stdout.strip()
    assert "12 out" in piped.stderr
    assert "KV cache" in piped.stderr
    given = chat(model, *options, "-p", "where is the cat?")
    assert given.stdout == piped.stdout
    both = chat(model, *options, "-p", "where is", stdin="the cat?")
    assert both.returncode == 0
    assert both.stdout != piped.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "names"),
    [
        (["-p", "  "], 2, "empty"),
        (["-p", "hi", "--temperature", "-1"], 1, "temperature"),
        (["-p", "hi", "--top-p", "2"], 1, "top_p"),
        (["-p", "hi", "--dtype", "int3"], 1, "int3"),
        (["-p", "hi", "--quantization", "int3"], 1, "quantization='int3'"),
        (["-p", "hi", "--max-model-len", "99999"], 1, "max_model_len=99999"),
        (["-p", "hi", "--model", "/no/such/model"], 1, "/no/such/model"),
        (["-p", "word " * 20000], 1, "max_model_len"),
    ],
)
def test_what_can_not_work_is_named_on_stderr_with_an_exit_code(model, arguments, code, names):
    done = chat(model, *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert names in done.stderr


def test_a_reader_that_leaves_early_is_no_error(model):
    command = f"{sys.executable} {ROOT / 'chat.py'} --model {model} -p hi --max-tokens 3000 | head -c 10"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        env=ENV,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_a_conversation_streams_stops_on_ctrl_c_goes_on_and_ends_on_ctrl_d(model):
    arguments = [str(ROOT / "chat.py"), "--model", str(model), "--temperature", "0", "--max-tokens", "15000"]
    child = pexpect.spawn(
        sys.executable,
        arguments,
        env=ENV,
        encoding="utf-8",
        timeout=60,
        dimensions=(40, 200),
        # A test run that was started in the background hands down an ignored Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    child.expect("> ")
    child.sendline("where is the cat?")
    child.expect("cat\\?\r\n")  # the terminal's echo
    child.expect(r"\S{3}")  # it has begun
    child.sendintr()
    child.expect("stopped by Ctrl-C")
    child.expect("> ")
    child.sendintr()  # idle: a hint, no exit
    child.expect("Ctrl-D leaves")
    child.expect("> ")
    child.sendline("and the dog?")
    child.expect("dog\\?\r\n")
    child.expect(r"\S{3}")
    child.sendintr()
    child.expect(r"(\d+) tokens in \((\d+) cached\)")
    tokens_in, cached = map(int, child.match.groups())
    assert 0 < cached < tokens_in  # the turns before were not computed again
    child.expect("> ")
    child.sendline("word " * 100 + "end")
    child.expect("end\r\n")
    child.expect(r"\S{3}")
    child.sendintr()
    child.expect("> ")
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert not re.search("Traceback", child.before or "")
