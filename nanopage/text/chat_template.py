"""Chat templates: Jinja from a model's directory, written by anybody.

Many of Jinja's filters can fill the memory or run for hours, so a separate process renders templates, with limits on
memory, time and output. `template_process.py` is that process, and says what templates see.
"""

import importlib.util
import json
import reprlib
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

# Limits of one rendering
MAX_MEMORY = 256 << 20  # bytes beyond those of the idle process; enforced only on Linux
MAX_CPU_SECONDS = 2.0  # not enforced on Windows
MAX_SECONDS = 30.0  # until the answer comes; enforced everywhere
MAX_CHARACTERS = 8_000_000  # of output

PROGRAM = Path(__file__).with_name("template_process.py").absolute()


class TemplateRenderer:
    """Renders chat templates in a separate process.

    The first rendering starts the process, and the next ones reuse it. A template that exceeds a limit ends it, and the
    next rendering starts another. The process ends with this object, and with the program, even if that is killed.
    Threads may share a renderer, which renders one conversation at a time.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end_process: weakref.finalize | None = None

    def render(
        self, source: str, messages: list[dict], add_generation_prompt: bool, special_tokens: dict[str, str]
    ) -> str:
        """The conversation as the model was trained to see it.

        Args:
            source: the template.
            messages: dicts with "role" and "content", both strings.
            add_generation_prompt: end with the opening of the assistant's reply.
            special_tokens: their texts by their names in the template, such as "bos_token".

        Raises:
            TypeError: an argument of the wrong type.
            ValueError: messages of the wrong form, or a template that fails, does what the sandbox forbids or exceeds
                a limit.
            RuntimeError: the process cannot be started.
        """
        if not isinstance(source, str):
            raise TypeError(f"chat_template must be a string of Jinja source, not {_shorten(source)}")
        if not isinstance(add_generation_prompt, bool):
            raise TypeError(f"add_generation_prompt must be True or False, not {_shorten(add_generation_prompt)}")
        check_messages(messages)
        variables = {
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **special_tokens,
        }
        request = json.dumps({"source": source, "variables": variables}, ensure_ascii=False)
        with self._lock:
            answer = self._ask(request.encode(errors="surrogatepass") + b"\n")
        if "error" in answer:
            raise ValueError(f"the chat template failed: {answer['error']}")
        return answer["text"]

    def _ask(self, request: bytes) -> dict:
        process = self._process
        # After os.fork(), the copy of this program starts a process of its own: poll() reports an end there, too.
        if process is None or process.poll() is not None:
            process = self._start()
        start = time.monotonic()
        timer = threading.Timer(MAX_SECONDS, process.kill)
        timer.start()
        try:
            line = _exchange(process, request)
        except BaseException:  # such as Ctrl-C: the next rendering must not read this one's answer
            self._stop()
            raise
        finally:
            timer.cancel()
        if not line.endswith(b"\n"):
            self._stop()
            return {"error": _why_it_ended(process.returncode, time.monotonic() - start)}
        answer = json.loads(line)
        if answer["grown"]:
            self._stop()
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        self._stop()
        limits = {"memory": MAX_MEMORY, "seconds": MAX_CPU_SECONDS, "characters": MAX_CHARACTERS}
        # -I and -S: run no code from the current directory, PYTHONPATH or site-packages.
        # A new session: Ctrl-C in a terminal must not end the process.
        command = [sys.executable, "-I", "-S", str(PROGRAM), json.dumps(limits)]
        command += [_location("jinja2"), _location("markupsafe")]
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        except OSError as error:
            raise RuntimeError(f"cannot start the process that renders chat templates: {error}") from error
        self._process, self._end_process = process, weakref.finalize(self, _end, process)
        return process

    def _stop(self) -> None:
        if self._end_process is not None:
            self._end_process()
        self._process = self._end_process = None


def check_messages(messages: list[dict]) -> None:
    """Raises ValueError or TypeError naming what is wrong with a conversation."""
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of at least one {'role': ..., 'content': ...}")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise TypeError(f"messages[{i}] must be a dict, not {_shorten(message)}")
        for name in ("role", "content"):
            _check_text(message.get(name), f"messages[{i}][{name!r}]")
        if unknown := message.keys() - {"role", "content"}:
            names = ", ".join(sorted(map(_shorten, unknown)))
            raise ValueError(f"messages[{i}] has fields that are not supported: {names:.200}")


def _check_text(text, name: str) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a string, not {_shorten(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} has a lone surrogate at character {error.start}, which cannot be encoded") from None


def _shorten(value) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return type(value).__name__


def _exchange(process: subprocess.Popen[bytes], request: bytes) -> bytes:
    """The answer to a request: one line, incomplete if the process ends."""
    stdin, stdout = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
    with suppress(BrokenPipeError):
        stdin.write(request)
        stdin.flush()
    return stdout.readline(6 * MAX_CHARACTERS + 10_000)  # JSON writes a character as at most six bytes


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(BrokenPipeError), process:  # closes the pipes and waits
        process.kill()


def _why_it_ended(status: int, seconds: float) -> str:
    if -status == getattr(signal, "SIGPROF", None):
        return f"it took more than {MAX_CPU_SECONDS:g} s of CPU time"
    if seconds >= MAX_SECONDS:
        return f"it took more than {MAX_SECONDS:g} s"
    return f"its process ended with status {status}"  # a negative status is that of a signal


def _location(package: str) -> str:
    """The directory that contains a package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"chat templates need {package}, which is not installed")
    return str(Path(spec.origin).absolute().parents[1])
