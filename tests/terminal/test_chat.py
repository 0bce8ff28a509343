"""chat.py: one answer through pipes, and conversations in a real pseudo-terminal."""

import json
import logging
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pexpect
import psutil
import pytest
from helpers import run_chat, tiny_model
from programs import forked
from test_terminal_text import Panic
from typer.testing import Result

import nanopage.device
from nanopage import LLM, SamplingParams
from nanopage.terminal.chat import about_default
from nanopage.terminal.program import exit_code
from nanopage.terminal.session import Session
from nanopage.terminal.signals import orderly_exit
from nanopage.terminal.text import held_log, say, say_log

ROOT = Path(__file__).parents[2]
ENV = os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "120"}
READY = re.escape("\x1b[?2004h")  # prompt_toolkit waits for input, pastes in brackets
FRAME = "\x1b[?2026h"  # what only rendered Markdown begins with
TALKS = ["--temperature", "1", "--seed", "1", "--max-tokens", "15000"]  # greedy replies run into a loop, and end
FOOTER = r"(?s)([\d,]+) tokens in \(([\d,]+) cached\), ([\d,]+) out, .*?context"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model that talks for a long time: it has no end-of-sequence token."""
    return tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=16384, eos_token_id=None)


def chat(model, *arguments, stdin: str | bytes = "") -> Result:
    """Run chat.py's command line in this process, where no stream is a terminal."""
    return run_chat("--model", model, "--eager", *arguments, stdin=stdin)


def chat_in_a_process(model, *arguments, stdin: str = "") -> subprocess.CompletedProcess:
    """Run chat.py as a user does."""
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
    piped = chat_in_a_process(model, *options, stdin="where is the cat?\n")
    assert piped.returncode == 0, piped.stderr
    assert piped.stdout.strip()
    assert "12 out" in piped.stderr
    assert "KV cache" not in piped.stderr
    given = chat(model, *options, "--verbose", "-p", "where is the cat?")
    assert given.stdout.replace("\r", "\n") == piped.stdout
    assert "KV cache" in given.stderr
    both = chat(model, *options, "-p", "where is", stdin="the cat?")
    assert both.exit_code == 0
    assert both.stdout != given.stdout


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
        (["-p", "hi", "you"], 2, "-p and another one: you"),
        (["-p", "hi", "--raw", "--system", "Be brief."], 2, "--system"),
        (["-p", "hi", "--continue"], 2, "--continue is for a conversation, and there is a prompt to answer"),
        (["--continue"], 2, "--continue is for a conversation, and stdin is not a terminal"),
        (["hi", "--tools", __file__], 2, "where you confirm each call, and there is a prompt"),
        (["--tools", __file__], 2, "where you confirm each call, and stdin is not a terminal"),
        (["--tools", "/no/file.py"], 2, "--tools: no file /no/file.py"),
        (["hi", "--tools", "/no/file.py"], 2, "--tools: no file /no/file.py"),
    ],
)
def test_what_cannot_work_is_named_on_stderr_with_an_exit_code(model, arguments, code, names):
    done = chat(model, *arguments)
    assert (done.exit_code, done.stdout) == (code, "")
    assert names in done.stderr


def test_a_reader_that_leaves_early_is_no_error(model):
    program = forked(ROOT / "chat.py", "--model", model, "-p", "hi", "--max-tokens", 3000, env=ENV)
    with subprocess.Popen(["chat.py"], preexec_fn=program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as done:
        assert done.stdout.read(10)
        done.stdout.close()
        said = done.stderr.read()
    assert done.returncode == 0, said
    assert b"Traceback" not in said


def test_a_conversation_streams_stops_on_ctrl_c_goes_on_and_ends_on_ctrl_d(model):
    arguments = [str(ROOT / "chat.py"), "--model", str(model), *TALKS]
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


def test_transcripts_of_single_answers(model):
    llm = LLM(str(model), device="cpu", enforce_eager=True)
    params = SamplingParams(temperature=0, max_tokens=12)
    options = ["--temperature", "0", "--max-tokens", "12"]
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "where is\n\nthe cat?"}
    (expected,) = llm.chat([user], params, use_tqdm=False)
    tokens_in = len(expected.prompt_token_ids)
    footer = f"cut at max_tokens 12\n{tokens_in} tokens in (0 cached), 12 out, N tok/s, TTFT N s, context 0%\n"
    done = chat(model, *options, "where", "is", stdin="the cat?\n")
    assert (done.exit_code, done.stdout_bytes.decode()) == (0, expected.outputs[0].text + "\n")
    assert re.sub(r"(?<=[ (])[\d,.]+(?= (s,|tok/s))", "N", done.stderr) == footer  # and nothing else

    (expected,) = llm.chat([system, user], params, use_tqdm=False)
    done = chat(model, *options, "--json", "--system", "Be brief.", "-p", "where is", stdin="the cat?")
    reply = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    rates = [reply.pop(name) for name in ("time_to_first_token", "prefill_rate", "decode_rate")]
    assert all(rate > 0 for rate in rates)
    assert reply == {
        "model": model.name,
        "text": expected.outputs[0].text,
        "finish_reason": "length",
        "num_prompt_tokens": len(expected.prompt_token_ids),
        "num_cached_tokens": 0,
        "num_output_tokens": 12,
        "error": None,
    }
    assert "tokens in" not in done.stderr  # the object has it


def test_a_base_model_needs_raw_and_says_so(model, tmp_path):
    shutil.copytree(model, tmp_path / "base")
    config = json.loads((tmp_path / "base" / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "base" / "tokenizer_config.json").write_text(json.dumps(config))
    done = chat(tmp_path / "base", "-p", "the cat")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "base has no chat template: it is a base model. --raw" in done.stderr
    done = chat(tmp_path / "base", "-p", "the cat", "--raw", "--temperature", "0", "--max-tokens", "12")
    llm = LLM(str(tmp_path / "base"), device="cpu", enforce_eager=True)
    (expected,) = llm.generate("the cat", SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    assert (done.exit_code, done.stdout_bytes.decode()) == (0, expected.outputs[0].text + "\n")


class Terminal:
    """chat.py in a pseudo-terminal of 140 columns."""

    def __init__(self, model, state, *arguments, **env):
        colors = {"TERM": "xterm-256color", "NO_COLOR": "", "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": str(state)}
        env = {name: value for name, value in ENV.items() if name != "COLUMNS"} | colors | env
        options = ["--model", model, "--eager", "--temperature", 0, *arguments]
        program = forked(ROOT / "chat.py", *options, env=env)
        self.child = pexpect.spawn("true", encoding="utf-8", timeout=60, dimensions=(24, 140), preexec_fn=program)
        self.child.delaybeforesend = None
        self.shown = ""  # since the last prompt

    def ask(self, text: str, *expected: str, enter: str = "\r") -> re.Match | None:
        """At the prompt, type `text`; wait for what is expected, in this order. Returns the last match."""
        self.child.expect(READY)
        self.child.send(text + enter)
        self.shown, match = "", None
        for pattern in expected:
            self.child.expect(pattern)
            self.shown += self.child.before + self.child.after
            match = self.child.match
        return match

    def exit_code(self) -> int:
        self.child.expect(pexpect.EOF)
        self.shown = self.child.before
        self.child.close()
        return self.child.exitstatus


def test_a_session_with_every_command(model, tmp_path):
    terminal = Terminal(model, tmp_path, "--max-tokens", "20")
    cached = []
    for i in range(3):
        match = terminal.ask(f"turn {i}", FOOTER)
        assert FRAME in terminal.shown
        assert not re.search("[\x00-\x07\x0e-\x1a\x1c-\x1f\x80-\x9f]", terminal.shown)  # a tiny model writes all bytes
        cached.append(int(match[2]))
    assert cached[0] == 0 < cached[1] < cached[2]

    terminal.ask("/hel\t", "p", enter="")  # is completed
    terminal.child.send("\r")
    terminal.child.expect(r"/regen +another reply")
    terminal.ask("/set tempe\t", "rature", enter="")
    terminal.child.send("0.5\r")
    terminal.child.expect(r"temperature = 0\.5")
    terminal.ask("/set temperature 500", r"temperature must be a number from 0 to 100, not 500")
    terminal.ask("/set temperature 0", "temperature = 0")
    terminal.ask("/system Be brief.", "system message set")
    terminal.ask("/show", "Be brief", "temperature", "/set lists all")
    terminal.ask("/hepl", r"no command /hepl. Did you mean /help\?")
    terminal.ask("/regen", "the reply will be the same", FOOTER)
    terminal.ask("/undo", "The earlier reply is back; 3 turn")
    terminal.ask("/undo", "The last turn is gone; 2 turn")
    terminal.ask("/continue", "go\\s+on|cut at|stopped", FOOTER)
    terminal.ask("//slash", FOOTER)
    terminal.ask("/stats", r"replies +6")
    terminal.ask(f"/save {tmp_path}/s.json", "saved to")
    terminal.ask("/clear", "is empty")
    match = terminal.ask("anew", FOOTER)
    assert int(match[1]) < 60
    terminal.ask(f"/load {tmp_path}/s.json", r"3 turn\(s\)")
    terminal.ask(f"/load {model}/config.json", "is not a session")
    match = terminal.ask("and on", FOOTER)
    assert int(match[1]) > 100
    terminal.ask("/bye", "The conversation is kept: chat.py --continue goes on with it")
    assert terminal.exit_code() == 0
    saved = json.loads((tmp_path / "s.json").read_text())
    assert [message["content"] for message in saved["messages"][::2]] == ["turn 0", "turn 1", "/slash"]
    assert saved["system"] == "Be brief."
    state = tmp_path / "nanopage"
    kept = sorted(state.glob("conversations/*.json"), key=lambda file: file.stat().st_mtime_ns)
    lengths = [len(json.loads(file.read_text())["messages"]) for file in kept]
    assert lengths == [6, 2, 8]  # /clear and /load begin others
    for file in (tmp_path / "s.json", state / "history", *kept):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert sorted(file.name for file in tmp_path.iterdir()) == ["nanopage", "s.json"]

    (tmp_path / "nanopage" / "history").chmod(0o644)
    again = Terminal(model, tmp_path, "--max-tokens", "5", "--continue")
    again.child.expect(r"4 turn\(s\) from " + kept[-1].name)
    again.ask("/set max_tokens", "max_tokens = 5")  # as it was asked for, not as it was kept
    again.ask("\x1b[A\x1b[A", "/bye", enter="")  # the last line of the session before
    again.child.send("\x03\x03")  # the first empties the line
    again.child.expect("Ctrl-D leaves, and so does another Ctrl-C")
    again.ask("\x03", enter="")
    assert again.exit_code() == 130
    assert "The conversation is kept: chat.py --continue goes on with it" in again.shown
    assert stat.S_IMODE((tmp_path / "nanopage" / "history").stat().st_mode) == 0o600


def test_a_paste_a_block_a_stopped_reply_and_a_resize(model, tmp_path):
    terminal = Terminal(model, tmp_path, *TALKS)
    terminal.child.setwinsize(24, 60)
    terminal.ask("talk", *[re.escape(FRAME)] * 3)
    terminal.child.setwinsize(12, 40)
    terminal.child.expect(re.escape(FRAME))
    terminal.child.setwinsize(40, 120)
    terminal.child.expect(re.escape(FRAME))
    terminal.child.send("typed ahead")
    terminal.child.sendintr()
    terminal.child.expect("stopped by Ctrl-C")
    assert "typed ahead" not in terminal.child.before
    terminal.ask("\x15/set max_tokens 5", "max_tokens = 5")  # what was typed ahead waits at the prompt, until Ctrl-U
    lines = [f"line {i} of a paste" for i in range(200)]
    match = terminal.ask("\x1b[200~" + "\r".join(lines) + "\x1b[201~", FOOTER)
    assert int(match[1].replace(",", "")) > 200 * 5
    assert match[2] != "0"
    terminal.ask('"""\rfirst\r/second\r"""', FOOTER)
    terminal.ask("", enter="")
    os.write(terminal.child.child_fd, b"caf\xe9\r")  # not UTF-8
    terminal.child.expect(FOOTER)
    terminal.ask("/stats", r"replies +4", r"KV blocks +0 in use")
    terminal.ask(f"/save {tmp_path}/s.json", "saved to")
    terminal.ask("\x04", enter="")
    assert terminal.exit_code() == 0
    messages = json.loads((tmp_path / "s.json").read_text())["messages"]
    assert [m["content"] for m in messages[::2]] == ["talk", "\n".join(lines), "first\n/second", "caf\ufffd"]
    assert messages[1]["content"]  # what came before Ctrl-C


def test_plain_text_where_no_color_is_asked_for(model, tmp_path):
    terminal = Terminal(model, tmp_path, "--max-tokens", "8", "the", "cat", NO_COLOR="1")
    assert terminal.exit_code() == 0
    assert "8 out" in terminal.shown
    assert FRAME not in terminal.shown
    assert not re.search("[\x00-\x07\x0e-\x1a\x1c-\x1f\x80-\x9f]", terminal.shown)


def test_a_single_answer_at_a_terminal_is_rendered_and_ctrl_c_is_130(model, tmp_path):
    terminal = Terminal(model, tmp_path, *TALKS, "talk")
    terminal.child.expect(re.escape(FRAME))
    terminal.child.sendintr()
    assert terminal.exit_code() == 130
    assert "stopped by Ctrl-C" in terminal.shown
    assert not (tmp_path / "nanopage").exists()  # no conversation, no history
    terminal = Terminal(model, tmp_path, "--json")
    assert terminal.exit_code() == 2
    assert "--json is for one answer" in terminal.shown


OWNED = "\x1b]0;owned\x07\x9b2J\x7f"  # sets the title and clears the screen


def test_nothing_from_a_model_or_a_file_commands_the_terminal(model, tmp_path):
    hostile = tmp_path / f"model{OWNED}"
    shutil.copytree(model, hostile)
    config = json.loads((hostile / "tokenizer_config.json").read_text())
    fails = "{% if 'fail' in messages[-1]['content'] %}{{ raise_exception('no" + OWNED + "') }}{% endif %}"
    config["chat_template"] += fails
    (hostile / "tokenizer_config.json").write_text(json.dumps(config))
    Session(SamplingParams(stop=[OWNED]), f"system{OWNED}", model=OWNED).save(tmp_path / f"s{OWNED}.json")
    terminal = Terminal(hostile, tmp_path, "--max-tokens", "8", "--verbose")
    terminal.child.expect("lists commands")
    shown = terminal.child.before
    terminal.ask(f"/load {tmp_path}/s\t", r"owned", enter="")
    terminal.child.send("\r")
    terminal.child.expect("They were with")
    shown += terminal.shown + terminal.child.before
    for typed, *expected in (
        ("fail", "the chat template failed: no"),
        ("/system", "system: system"),
        ("/show", r"system\S*]0;owned", "stop  +"),
        ("/set stop none", "stop = "),
        ("hello", FOOTER),
        ("/model", "float32 on cpu"),
    ):
        terminal.ask(typed, *expected)
        shown += terminal.shown
    terminal.ask("\x1b[A" * 7, "/load", enter="")  # the history has the name, too
    terminal.child.send("\x15\x04")
    assert terminal.exit_code() == 0
    shown += terminal.shown
    assert shown.count("owned") >= 8
    assert "\x1b]" not in shown
    assert not re.search("[\x00-\x06\x0e-\x1a\x1c-\x1f\x7f-\x9f]", shown)

    done = chat(hostile, "--json", "--max-tokens", "200", "--temperature", "1", "--seed", "1", "talk")
    assert done.exit_code == 0
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", done.stdout_bytes.decode())
    assert json.loads(done.stdout)["model"] == hostile.name


def test_keys_ctrl_c_and_ctrl_z_in_a_shell(model, tmp_path):
    """What is typed while the model loads or answers; Ctrl-C in lines that are not empty; Ctrl-Z, in a reply, too, and
    fg."""
    env = ENV | {"TERM": "xterm-256color", "NO_COLOR": "", "PROMPT_TOOLKIT_NO_CPR": "1"}
    env["XDG_STATE_HOME"] = str(tmp_path)
    child = pexpect.spawn("bash", ["--norc", "-i"], env=env, encoding="utf-8", timeout=60, dimensions=(24, 100))
    child.sendline("PS1='sh''ell '; bind 'set enable-bracketed-paste off'")
    child.expect("shell ")
    child.sendline(f"{sys.executable} {ROOT}/chat.py --model {model} --eager {' '.join(TALKS)}")
    child.expect("Loading")
    child.send("ahead")
    child.expect(READY)
    assert "ahead" not in child.before
    child.expect("ahead")
    for line in ("", "abc", "def"):  # Ctrl-C in a line with text does not count
        child.send(f"{line}\x03")
    time.sleep(0.5)
    assert child.isalive()
    child.send("\x1a")
    child.expect("Stopped")
    child.expect("shell ")
    child.sendline("echo between; fg")
    child.expect("between")
    child.expect(READY)  # the prompt is drawn again
    child.send("talk\r")
    child.expect(re.escape(FRAME))
    child.expect(re.escape(FRAME))
    child.send("to\x1a")
    child.expect("Stopped")
    child.expect("shell ")
    child.sendline("stty -a | grep -c ' echo '; fg")
    child.expect("\r\n1\r\n")
    child.expect(r"chat\.py.*\n")
    child.expect(re.escape(FRAME))
    child.send("morrow\x03")
    child.expect("stopped by Ctrl-C")
    child.expect(READY)
    child.expect("tomorrow")
    child.send("\x03\x04")
    child.expect("shell ")
    child.sendline("exit")
    child.expect(pexpect.EOF)
    child.close()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_with_its_exit_code(signum):
    before = signal.getsignal(signum)
    with pytest.raises(SystemExit, match=str(128 + signum)), orderly_exit():
        os.kill(os.getpid(), signum)
        time.sleep(60)
    assert signal.getsignal(signum) is before


def test_a_signal_at_the_prompt_restores_the_terminal_and_keeps_the_conversation(model, tmp_path):
    env = ENV | {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": str(tmp_path)}
    command = f"{sys.executable} {ROOT}/chat.py --model {model} --eager --temperature 0 --max-tokens 5"
    child = pexpect.spawn(
        "sh", ["-c", f"stty -a; {command}; echo code $?; stty -a"], env=env, encoding="utf-8", timeout=60
    )
    child.expect(READY)
    before = child.before[: child.before.index("Loading")]
    child.send("hello\r")
    child.expect(FOOTER)
    child.expect(READY)
    (program,) = psutil.Process(child.pid).children()
    program.send_signal(signal.SIGTERM)
    child.expect("code 143\r\n")
    child.expect(pexpect.EOF)
    modes = r" -?(?:echo|icanon|isig|icrnl)\b"
    assert re.findall(modes, child.before) == re.findall(modes, before)
    assert " echo" in re.findall(modes, before)
    child.close()
    (kept,) = (tmp_path / "nanopage" / "conversations").iterdir()
    assert json.loads(kept.read_text())["messages"][0]["content"] == "hello"


def test_without_a_history_nothing_is_written(model, tmp_path):
    terminal = Terminal(model, tmp_path, "--max-tokens", "5", "--plain", NANOPAGE_HISTORY="0")
    terminal.ask("hello", FOOTER)
    assert FRAME not in terminal.shown
    terminal.ask("\x04", enter="")
    assert terminal.exit_code() == 0
    assert list(tmp_path.iterdir()) == []
    terminal = Terminal(model, tmp_path, "--continue", NANOPAGE_HISTORY="0")
    assert terminal.exit_code() == 2
    assert "NANOPAGE_HISTORY=0 keeps no conversations" in terminal.shown
    terminal = Terminal(model, tmp_path, "--continue")
    assert terminal.exit_code() == 2
    assert "no conversation is kept" in terminal.shown


def shell(command: str) -> subprocess.CompletedProcess:
    command = command.replace("chat.py", f"{sys.executable} {ROOT}/chat.py --eager --max-tokens 5 --temperature 0", 1)
    return subprocess.run(["bash", "-c", command], env=ENV, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("command", "code", "out", "err"),
    [
        ("chat.py --model {} -p hi >&-", 1, "", "error: stdout is closed"),
        ("chat.py --model {} -p hi >/dev/full", 1, "", "No space left on device"),
        ("chat.py --model {} -p hi <&- 2>&-", 0, ".", ""),
        ("chat.py --model {} <&-", 2, "", "the prompt is empty"),
        ("chat.py --help >/dev/full", 1, "", "No space left on device"),
        ("chat.py --no-such-option 2>&-", 2, "", ""),
        ("chat.py --model /no/model -p hi 2>/dev/full", 1, "", ""),
    ],
)
def test_streams_that_are_closed_or_full_are_no_tracebacks(model, command, code, out, err):
    done = shell(command.format(model))
    assert done.returncode == code, done.stderr
    assert bool(done.stdout.strip()) == bool(out)
    assert re.search(err, done.stderr, re.DOTALL)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_what_is_not_utf8_is_said_and_answered(model):
    done = chat(model, "--max-tokens", "5", "-p", "na\udcefve", stdin=b"caf\xe9")
    assert done.exit_code == 0 and done.stdout.strip()
    assert re.search("stdin is not UTF-8.*prompt is not UTF-8", done.stderr, re.DOTALL)


INTERRUPTED = """
import builtins, os, runpy, signal, sys
real = builtins.__import__
def interrupted(name, *rest, **options):
    if name == module:
        os.kill(os.getpid(), signal.SIGINT)
    return real(name, *rest, **options)
builtins.__import__ = interrupted
signal.signal(signal.SIGINT, signal.default_int_handler)
_, module, program, *arguments = sys.argv
sys.argv[:] = [program, *arguments]
run = runpy.run_path if program.endswith(".py") else runpy.run_module
run(program, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("module", "program", "arguments"),
    [
        ("typer", "chat.py", ["hi"]),
        ("nanopage.terminal.chat", "chat.py", ["hi"]),
        ("typer", "bench.py", ["latency"]),
        ("nanopage.terminal.chat", "nanopage.__main__", ["chat", "hi"]),
        ("nanopage.server.options", "nanopage.__main__", ["serve"]),
    ],
)
def test_ctrl_c_while_a_program_starts_leaves_quietly(module, program, arguments):
    command = [sys.executable, "-c", INTERRUPTED, module, program, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (Panic("in Rust"), 1, "internal error: Panic: in Rust"),
        (KeyError("lost"), 1, "internal error: KeyError: 'lost'"),
        (MemoryError("no room"), 1, "error: no room"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 0, ""),
    ],
)
def test_every_exception_becomes_a_message_and_an_exit_code(error, code, said, capsys):
    def fail():
        raise error

    assert exit_code(fail, verbose=False) == code
    shown = " ".join(capsys.readouterr().err.split())
    assert said in shown
    assert ("--verbose for the traceback" in shown) == ("internal" in said)
    assert "Traceback" not in shown
    assert exit_code(fail, verbose=True) == code
    assert ("Traceback" in capsys.readouterr().err) == bool(said)


def test_messages_of_the_engine_wait_until_the_reply_is_over(capsys):
    logger = logging.getLogger("nanopage")
    handlers = logger.handlers
    try:
        for verbose, expected in ((False, ["within", "careful"]), (True, ["loaded", "within", "compiling", "careful"])):
            say_log(verbose)
            logger.info("loaded")
            with held_log():
                logger.info("compiling")
                logger.warning("careful")
                say("within")
            assert capsys.readouterr().err.split() == expected
    finally:
        logger.handlers = handlers


def test_the_default_model_is_said_to_be_small_and_a_larger_one_that_fits_is_named(monkeypatch):
    def named(free, dtype="bfloat16"):
        monkeypatch.setattr(nanopage.device, "free_bytes", lambda device: free)
        said = about_default("cpu", dtype)
        assert said.startswith("This is a small demonstration model, and often wrong.")
        assert max(map(len, said.splitlines())) < 80
        return re.findall(r"/model (\S+)$", said)

    assert [named(2e9), named(13e9), named(13e9, "float32"), named(1e9)] == [
        ["Qwen/Qwen2.5-0.5B-Instruct"], ["Qwen/Qwen3-4B-Instruct-2507"], ["Qwen/Qwen2.5-1.5B-Instruct"], [],
    ]  # fmt: skip
