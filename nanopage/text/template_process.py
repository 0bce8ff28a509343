"""The process that renders chat templates. `chat_template.py` runs this file as a script.

It reads requests from stdin and writes answers to stdout, each as one line of JSON. A request has "source",
"variables", and "required": the names of variables that the template must read. An answer has "text", "error" or
"unread", a required name that the template does not read; and "grown", which tells the parent to replace the process.

The kernel refuses the process memory beyond a limit, and ends it when a rendering takes too much CPU time. This bounds
every template, whatever it calls.

Templates see transformers' settings, filters and functions, and its variables except rare special tokens, so they
render alike. Jinja's sandbox keeps them away from Python's internals and from changing their inputs.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path

if __name__ == "__main__":
    sys.path += sys.argv[2:]  # where Jinja and MarkupSafe are: with -S, Python does not look in site-packages

from jinja2 import Environment, Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_ERROR = 500  # characters: a template can write error messages


def main(limits: dict) -> None:
    """Answer requests until the parent closes stdin or is gone.

    Args:
        limits: those of one rendering: "memory" in bytes beyond those of the idle process, "seconds" of CPU time,
            "characters" of output.
    """
    compile_template = lru_cache(maxsize=1)(partial(_compile, create_environment()))
    idle = _address_space()
    _limit_address_space(idle + limits["memory"])
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Python writes warnings about odd templates to stderr
    out_of_memory = _encode({"error": f"it needs more than {limits['memory'] >> 20} MiB", "grown": True})
    try:
        for request in _requests(limits["seconds"]):
            answer = _render(compile_template, request, limits["characters"])
            # The next rendering would lack the memory that this one has left behind.
            answer["grown"] = _address_space() - idle > limits["memory"] / 4
            sys.stdout.buffer.write(_encode(answer))
            sys.stdout.buffer.flush()
    except MemoryError:
        os.write(sys.stdout.fileno(), out_of_memory)


def create_environment() -> ImmutableSandboxedEnvironment:
    """Jinja as transformers sets it up."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


class GenerationTag(Extension):
    """{% generation %}...{% endgeneration %} marks what is trained on. Here, it is only a scope for variables."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser):
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # Jinja's own tojson escapes HTML, which would change what the model reads.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str):
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _requests(seconds: float) -> Iterator[dict]:
    while True:
        if hasattr(signal, "setitimer"):  # not on Windows
            signal.setitimer(signal.ITIMER_PROF, seconds)  # counts this process's CPU time, not its waiting
        if not (line := sys.stdin.buffer.readline()):
            return
        yield json.loads(line)


def _compile(environment: Environment, source: str) -> tuple[Template, set[str]]:
    """The template, and the names of the variables that it reads."""
    tree = environment.parse(source)
    names = meta.find_undeclared_variables(tree)
    return environment.from_string(tree), names


def _render(compile_template: Callable[[str], tuple[Template, set[str]]], request: dict, max_characters: int) -> dict:
    """{"text": ...}, {"error": ...} or {"unread": ...}. Raises MemoryError."""
    try:
        template, names = compile_template(request["source"])
        for name in request["required"]:
            if name not in names:
                return {"unread": name}
        text = template.render(request["variables"])
        text.encode()  # a lone surrogate is an error
    except MemoryError:
        raise
    except Exception as error:  # a template can raise anything Python can
        return {"error": _describe(error)}
    if len(text) > max_characters:
        return {"error": f"it wrote more than {max_characters:,} characters"}
    return {"text": text}


def _describe(error: Exception) -> str:
    try:
        text = str(error)
    except Exception:  # of an object that the template made
        text = ""
    text = text if len(text) <= MAX_ERROR else text[:MAX_ERROR] + "..."
    return text.encode(errors="backslashreplace").decode() or type(error).__name__


def _encode(answer: dict) -> bytes:
    return json.dumps(answer, ensure_ascii=False).encode() + b"\n"


def _address_space() -> int:
    """The bytes of address space in use, or 0 on systems other than Linux."""
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _limit_address_space(size: int) -> None:
    """Have the kernel refuse to map more than `size` bytes. Other systems than Linux do not enforce this limit."""
    if sys.platform != "linux":
        return
    import resource  # not on Windows

    with suppress(ValueError):  # a lower limit is already in force
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold the conversation


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
