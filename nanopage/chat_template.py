"""Chat templates: Jinja from a model's directory, written by anybody, run in a sandbox.

Templates see what transformers shows them (its settings, variables, filters and functions), so they render alike. On
top of Jinja's sandbox (no underscore attributes, nothing mutable) there is a budget on loops, calls, sizes and output,
so that a careless or hostile template is stopped where it would hang the engine or fill its memory. It is a fence, not
a wall: templates of sworn enemies belong in a process with limits of its own.
"""

import functools
import json
import re
import reprlib
from datetime import datetime

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 100_000  # loop iterations and calls in one rendering
MAX_SIZE = 1_000_000  # characters or items of anything an operator or a call makes, beyond those of the messages
MAX_BITS = 1_000  # of a product of integers
# In a format: a width or precision of 10,000 and more, or one to be filled in.
WIDE_PERCENT = re.compile(r"%(\([^)]*\))?[-+ #0-9.]*(\d{5}|\*)")
WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(\d{5}|\{)")


def render(source: str, messages: list[dict], add_generation_prompt: bool, special_tokens: dict[str, str]) -> str:
    """The conversation as the model was trained to see it.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: messages of the wrong form, or a template that fails or does what the sandbox forbids.
    """
    if not isinstance(source, str):
        raise TypeError(f"chat_template must be a string of Jinja source, not {_shorten(source)}")
    if not isinstance(add_generation_prompt, bool):
        raise TypeError(f"add_generation_prompt must be True or False, not {_shorten(add_generation_prompt)}")
    check_messages(messages)
    try:
        size = sum(len(message["content"]) for message in messages)
        template = TemplateSandbox(MAX_SIZE + 4 * size).from_string(source)
        return template.render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special_tokens,
        )
    except Exception as error:  # a template can raise anything Python can
        raise ValueError(f"the chat template failed: {str(error) or type(error).__name__}") from error


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


class GenerationTag(Extension):
    """{% generation %}...{% endgeneration %} marks the assistant's words for training; here it is just its contents."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class CountedNodes(NodeTransformer):
    """Sends what loops run over, and what `~` joins, through the sandbox's own filters."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        joined = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(joined, "joined", [], [], None, None, lineno=node.lineno)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment of one rendering, in which nothing may grow beyond `max_size`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, max_size: int = MAX_SIZE):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag])
        self.filters |= {"tojson": _tojson, "counted": self.counted, "joined": self.joined, "format": self.format}
        self.filters = {name: self._checked(function) for name, function in self.filters.items()}
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self._steps, self._max_size = 0, max_size

    def _parse(self, source, name, filename):
        return CountedNodes().visit(super()._parse(source, name, filename))

    def _step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise SecurityError(f"more than {MAX_STEPS:,} steps")

    def _check_size(self, size: int) -> None:
        if size > self._max_size:
            raise SecurityError(f"something grows beyond {self._max_size:,}")

    def _check_arguments(self, *arguments) -> None:
        for argument in arguments:
            if isinstance(argument, int):
                self._check_size(argument)

    def _checked(self, function):
        @functools.wraps(function)
        def checked(*args, **kwargs):
            self._step()
            self._check_arguments(*args, *kwargs.values())
            return function(*args, **kwargs)

        return checked

    def concat(self, texts) -> str:
        """The output of the template, of a macro or of a set block."""
        parts, size = [], 0
        for text in texts:
            size += len(text)
            self._check_size(size)
            parts.append(text)
        return "".join(parts)

    def counted(self, items):
        for item in items:
            self._step()
            yield item

    def joined(self, values) -> str:
        texts = [str(value) for value in values]
        self._check_size(sum(map(len, texts)))
        return "".join(texts)

    def format(self, text, *args, **kwargs) -> str:
        return self.call_binop(None, "%", str(text), kwargs or args)

    def call(self, context, function, *args, **kwargs):
        self._step()
        if isinstance(function, LoopContext):  # a recursive loop
            args = (self.counted(args[0]), *args[1:])
        self._check_arguments(*args, *kwargs.values())
        method = getattr(function, "__wrapped__", function)  # Jinja wraps str.format
        if isinstance(getattr(method, "__self__", None), str) and method.__name__ in ("format", "format_map"):
            _check_format(WIDE_BRACES, method.__self__.replace("{{", "").replace("}}", ""))
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context, operator, left, right):
        if operator == "**":
            raise SecurityError("** is not allowed")
        if operator == "%" and isinstance(left, str):
            _check_format(WIDE_PERCENT, left.replace("%%", ""))
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if hasattr(sequence, "__len__") and isinstance(times, int):
                    self._check_size(len(sequence) * times)
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS:
                raise SecurityError("a number grows too large")
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self._check_size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)


def _check_format(wide: re.Pattern, text: str) -> None:
    if wide.search(text):
        raise SecurityError("a format is too wide")


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # Jinja's own tojson escapes HTML, which would change what the model reads.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str):
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
