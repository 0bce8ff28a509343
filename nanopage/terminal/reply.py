"""Has a model answer: shows the reply as it comes, stops it on Ctrl-C or if it repeats itself, and measures it."""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from nanopage.params import SamplingParams
from nanopage.terminal.guard import LoopGuard
from nanopage.terminal.signals import Interrupt
from nanopage.terminal.text import held_log, printable

if TYPE_CHECKING:
    from nanopage.grammar.tool_pieces import ToolCall
    from nanopage.step import Capacity
    from nanopage.view.picture import Picture

COLUMNS = 80  # the footer's greatest width
SPINNER_DELAY = 0.2  # seconds
MOST_TOKENS = 1024  # of a reply, unless the user says otherwise: small models do not always find an end
NO_TEMPLATE = "has no chat template: it is a base model. --raw lets it go on with your text"
NOT_FIGURES = ("token_ids", "content", "calls")


@dataclasses.dataclass
class Reply:
    """The result of a request.

    `finish_reason` is "stop", "length" (`max_tokens` or the context is used up), "abort" (a signal ended it),
    "repetition" (it repeated itself), "error" (`error` says which) or a server's own. Times are in seconds and rates in
    tokens per second. They are None if there were too few tokens. Counts are None if a server does not tell them.
    `num_prompt_tokens` includes `num_cached_tokens`, whose K and V were in the prefix cache.
    """

    text: str
    finish_reason: str
    num_prompt_tokens: int | None
    num_cached_tokens: int | None
    num_output_tokens: int | None
    time_to_first_token: float | None
    prefill_rate: float | None
    decode_rate: float | None
    error: str | None = None
    token_ids: list[int] = dataclasses.field(default_factory=list)  # prompt and output; empty if a server has them
    content: str = ""  # `text` without `calls`, if calls are read
    calls: list[tuple[str, "ToolCall"]] = dataclasses.field(default_factory=list)  # with their ids

    @property
    def num_tokens(self) -> int:
        """What the prompt and the reply take of the context."""
        return (self.num_prompt_tokens or 0) + (self.num_output_tokens or 0)

    def figures(self) -> dict:
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in NOT_FIGURES}

    def footer(self, max_model_len: int | None) -> str:
        """The figures in a line of at most 80 columns. The least important figures are left out first."""
        parts = []
        if self.num_prompt_tokens is not None:
            cached = "" if self.num_cached_tokens is None else f" ({self.num_cached_tokens:,} cached)"
            parts = [f"{self.num_prompt_tokens:,} tokens in{cached}", f"{self.num_output_tokens or 0:,} out"]
        parts += [f"{self.decode_rate:,.1f} tok/s"] if self.decode_rate else []
        parts += [f"TTFT {self.time_to_first_token:.2f} s"] if self.time_to_first_token is not None else []
        if max_model_len is not None and self.num_prompt_tokens is not None:
            parts += [f"context {self.num_tokens / max_model_len:.0%}"]
        while len(", ".join(parts)) > COLUMNS:
            del parts[-2]
        return ", ".join(parts)

    def ending(self, max_tokens: int | None) -> str:
        """Why the reply is not whole; empty if it is."""
        if self.finish_reason == "length":
            full = self.num_output_tokens is not None and self.num_output_tokens != max_tokens
            return "cut: the context is full" if full else f"cut at max_tokens {max_tokens}"
        endings = {"stop": "", "abort": "stopped by Ctrl-C", "repetition": "stopped: repeating itself"}
        endings["error"] = f"ended by an error: {self.error}"
        return endings.get(self.finish_reason, f"ended by the server: {self.finish_reason}")


@dataclasses.dataclass
class Request:
    """What a model is to answer."""

    prompt: str | list[dict]  # a text to go on with, or a conversation, whose images are parts with ReadImages
    params: SamplingParams
    given: frozenset[str] = frozenset()  # names of settings that the user has set, even if to the default
    tools: list[dict] | None = None  # which the model is told about, as chat templates take them
    reads_calls: bool = False  # whether to find calls of these tools in the reply; they are not shown
    begun: str = ""  # the beginning of the reply, which was shown before
    begun_ids: Sequence[int] = ()  # its tokens; without them, the text counts


class Stream(Protocol):
    """A reply on its way. `thinking`: whether it begins within reasoning whose opening mark the prompt has."""

    thinking: bool

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """(new text, the part of it to show), as they come. Raises: Stopped; and errors, if nothing has come."""

    def close(self) -> None:
        """End the request."""

    def reply(self) -> Reply | None:
        """The reply so far; None if nothing has come. An empty `finish_reason` means that it was not finished."""


class Model(Protocol):
    """What the chat needs of a model: of one in this process (local.py), or of a server's (remote.py)."""

    max_model_len: int | None  # the most tokens of prompt and reply; None if a server does not tell
    sees_images: bool | None  # None if a server does not tell
    where: str  # what computes the model, for the user
    capacity: "Capacity | None"  # of the engine; None if it is a server's

    def check(self, params: SamplingParams) -> None:
        """Raises: ValueError for settings that this model refuses."""

    def count(self, request: Request) -> int | None:
        """The tokens of a prompt and of the reply's beginning; None if a server does not tell."""

    def stream(self, request: Request, interrupt: Interrupt) -> Stream:
        """Begin to answer. Raises: ValueError, TypeError for what cannot be answered."""

    def begun(self, text: str, ids: list[int], params: SamplingParams) -> tuple[str, list[int]]:
        """A reply to go on with, and its tokens, up to the last whole character.

        Args: ids: the tokens of the reply; empty if they are not known.
        Raises: ValueError if it cannot.
        """

    def figures(self) -> list[tuple[str, str]]:
        """More rows for /stats."""

    def picture(self) -> "Picture":
        """The KV blocks. Raises: ValueError, OSError if they cannot be seen."""


class Stopped(Exception):
    """Raised by a stream that a signal has stopped."""


def shows_markdown(plain: bool) -> bool:
    """Whether to render Markdown: stdout is a terminal that can, without `plain` or NO_COLOR (https://no-color.org)."""
    smart = os.environ.get("TERM", "dumb") != "dumb"
    return not plain and not os.environ.get("NO_COLOR") and smart and sys.stdout.isatty()


def show_again(text: str, plain: bool) -> None:
    """Show a reply of an earlier conversation on stdout, as it was shown then."""
    text = printable(text)
    if not shows_markdown(plain):
        print(text, flush=True)
        return
    from nanopage.text.reasoning import END_THINK, THINK

    printer = _printer(THINK not in text and END_THINK in text)
    printer.feed(text)
    printer.finish()


def generate(
    model: Model, request: Request, interrupt: Interrupt, plain: bool = False, show: bool = True
) -> Reply | None:
    """Stream one reply to stdout. `interrupt` ends it and keeps its text. Returns None if nothing came.

    Args: show: False writes nothing to stdout.
    Raises: what `Model.stream` and the stream raise, before anything is shown.
    """
    stream = model.stream(request, interrupt)
    printer, loops, guard = None, False, LoopGuard()
    markdown, on_terminal = shows_markdown(plain), sys.stdout.isatty()
    with held_log(), contextlib.closing(stream):
        try:
            for delta, shown in stream:
                shown = printable(shown) if on_terminal else shown
                if show and markdown:
                    if printer is None:
                        printer = _printer(stream.thinking, request.begun)
                        interrupt.resumed = printer.go_on_below
                    printer.feed(shown)
                elif show:
                    print(shown, end="", flush=True)
                if interrupt.signum is not None:
                    break
                if loops := guard.feed(delta):
                    break
        except (KeyboardInterrupt, Stopped):  # the second Ctrl-C does not wait for the step to end
            pass
        interrupt.over = True
        if printer is not None:
            printer.finish()
        elif show:
            print(flush=True)
    if (reply := stream.reply()) is not None:
        reply.finish_reason = reply.finish_reason or ("repetition" if loops else "abort")
    return reply


def _printer(thinking: bool, begun: str = ""):
    from nanopage.terminal.markdown import ReplyPrinter  # not needed where plain text is

    printer = ReplyPrinter(sys.stdout, thinking=thinking)
    printer.skip(printable(begun))
    return printer
