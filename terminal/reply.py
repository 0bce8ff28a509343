"""One reply: generated, shown as it comes, stopped by Ctrl-C, and measured."""

import contextlib
import dataclasses
import os
import re
import signal
import sys
from collections.abc import Generator, Iterator
from typing import cast

from rich.console import Console

from nanopage.llm import LLM
from nanopage.request import RequestOutput, SamplingParams

stderr = Console(stderr=True)
# What a model writes must not move the cursor, set the title or reach the clipboard.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclasses.dataclass
class Reply:
    """What came of a request. `finish_reason` is "stop", "length", or "abort" if Ctrl-C ended it. Times in seconds, and
    rates in tokens a second; None where there were too few tokens to tell. `num_prompt_tokens` includes
    `num_cached_tokens`, whose K and V were in the prefix cache."""

    text: str
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    time_to_first_token: float | None
    prefill_rate: float | None
    decode_rate: float | None
    token_ids: list[int]  # prompt and output

    @classmethod
    def of(cls, output: RequestOutput) -> "Reply":
        metrics, completion, prompt = output.metrics, output.outputs[0], output.prompt_token_ids
        prefill_rate = decode_rate = None
        times = metrics.token_times
        if times and metrics.first_scheduled_time is not None:
            prefill_seconds = times[0] - metrics.first_scheduled_time
            prefill_rate = (len(prompt) - output.num_cached_tokens) / prefill_seconds if prefill_seconds else None
            decode_seconds = times[-1] - times[0]
            decode_rate = (len(times) - 1) / decode_seconds if decode_seconds else None
        return cls(
            completion.text,
            completion.finish_reason or "abort",
            len(prompt),
            output.num_cached_tokens,
            len(completion.token_ids),
            metrics.time_to_first_token,
            prefill_rate,
            decode_rate,
            prompt + completion.token_ids,
        )

    def footer(self) -> str:
        parts = [f"{self.num_prompt_tokens} tokens in ({self.num_cached_tokens} cached)"]
        parts += [f"{self.num_output_tokens} out"]
        parts += [f"TTFT {self.time_to_first_token:.2f} s"] if self.time_to_first_token is not None else []
        parts += [f"prefill {self.prefill_rate:,.0f} tok/s"] if self.prefill_rate else []
        parts += [f"decode {self.decode_rate:.1f} tok/s"] if self.decode_rate else []
        return ", ".join([*parts, "stopped by Ctrl-C" if self.finish_reason == "abort" else self.finish_reason])


def shows_markdown(plain: bool) -> bool:
    """Whether stdout is for eyes that want Markdown rendered (https://no-color.org)."""
    smart = os.environ.get("TERM", "dumb") != "dumb"
    return not plain and not os.environ.get("NO_COLOR") and smart and sys.stdout.isatty()


def generate(
    llm: LLM, prompt: str | list[dict], params: SamplingParams, plain: bool = False, show: bool = True
) -> Reply | None:
    """Stream one reply to stdout. Ctrl-C ends it, frees its blocks and keeps what came. None if nothing came.

    Raises: ValueError, TypeError for a prompt that can not be answered, before anything is shown.
    """
    stream = cast(Generator[RequestOutput], llm.stream(prompt, params))
    printer, output = None, None
    markdown, on_terminal = shows_markdown(plain), sys.stdout.isatty()
    with interruptible() as interrupted, contextlib.closing(stream):
        try:
            for output in stream:
                delta = output.outputs[0].delta
                if on_terminal:
                    delta = CONTROL.sub("\ufffd", delta.replace("\r", ""))
                if show and markdown:
                    printer = printer or _printer(llm, output.prompt_token_ids)
                    printer.feed(delta)
                elif show:
                    print(delta, end="", flush=True)
                if interrupted():
                    break
        except KeyboardInterrupt:  # the second Ctrl-C does not wait for the step to end
            pass
    if printer is not None:
        printer.finish()
    elif show:
        print(flush=True)
    return None if output is None else Reply.of(output)


def _printer(llm: LLM, prompt_token_ids: list[int]):
    from terminal.markdown import THINK, ReplyPrinter  # not needed where plain text is

    # Some templates write the opening tag themselves.
    end = llm.get_tokenizer().decode(prompt_token_ids[-8:], skip_special_tokens=False)
    return ReplyPrinter(sys.stdout, thinking=end.rstrip().endswith(THINK))


@contextlib.contextmanager
def interruptible() -> Iterator:
    """Ctrl-C sets a flag instead of raising in the middle of a step; a second one raises. Yields the flag's reader."""
    count = 0

    def handler(signum, frame):
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, handler)
    try:
        with unechoed():
            yield lambda: count > 0
    finally:
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def unechoed() -> Iterator[None]:
    """Keys that are pressed while a reply is being drawn wait for the next prompt and are not shown in the reply."""
    foreground = False
    with contextlib.suppress(ImportError, OSError, ValueError, AttributeError):  # not Unix, or no terminal
        import termios

        foreground = os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()  # else setting it up would stop the process
    if not foreground:
        yield
        return

    def leave(signum, frame):  # or the shell that follows would be left without echo
        raise SystemExit(128 + signum)

    before = termios.tcgetattr(sys.stdin)
    silent = [*before]
    silent[3] &= ~termios.ECHO
    previous = signal.signal(signal.SIGTERM, leave)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
        signal.signal(signal.SIGTERM, previous)
