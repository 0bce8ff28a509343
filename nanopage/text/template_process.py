"""The program that renders chat templates, in a process of its own (see limited_process.py).

A request has "source", "variables", and "required": the names of variables that the template must read. An answer has
"text", "error" or "unread", a required name that the template does not read.

Templates see the settings, filters, functions and variables of transformers, except rare special tokens. So they render
as in transformers. Jinja's sandbox keeps them away from Python's internals and from changing their inputs.
"""

import json
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache, partial

from jinja2 import Environment, Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_ERROR = 500  # characters: a template can write error messages


def make_answer(setup: dict) -> Callable[[dict], dict]:
    """Args: setup: "characters", the most that a template may write."""
    compile_template = lru_cache(maxsize=1)(partial(_compile, create_environment()))
    return lambda request: _render(compile_template, request, setup["characters"])


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
