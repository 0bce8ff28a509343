"""Generates one reply, shows it as it comes, stops it on Ctrl-C or if it repeats itself, and measures it."""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Generator, Iterator, Sequence
from typing import Any, cast

from nanopage.grammar.tool_pieces import Content
from nanopage.grammar.tool_reply import ReplyReader
from nanopage.inputs import Prompt
from nanopage.llm import LLM
from nanopage.outputs import CompletionOutput, RequestOutput, StepStats
from nanopage.params import SamplingParams
from nanopage.terminal.guard import LoopGuard
from nanopage.terminal.log import held_log
from nanopage.terminal.signals import Interrupt
from nanopage.terminal.spinner import spinner
from nanopage.terminal.text import printable
from nanopage.text.image_parts import take_images
from nanopage.text.reasoning import THINK, knows_reasoning, last_mark
from nanopage.text.tool_prompt import render_chat

COLUMNS = 80  # the footer's greatest width
SPINNER_DELAY = 0.2  # seconds


@dataclasses.dataclass
class Reply:
    """The result of a request.

    `finish_reason` is "stop", "length" (`max_tokens` or the context is used up), "abort" (a signal ended it),
    "repetition" (it repeated itself) or "error" (`error` says which). Times are in seconds and rates in tokens per
    second. They are None if there were too few tokens. `num_prompt_tokens` includes `num_cached_tokens`, whose K and V
    were in the prefix cache.
    """

    text: str
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    time_to_first_token: float | None
    prefill_rate: float | None
    decode_rate: float | None
    token_ids: list[int]  # prompt and output
    error: str | None = None

    @classmethod
    def of(cls, output: RequestOutput, loops: bool) -> "Reply":
        metrics, completion, prompt = output.metrics, output.outputs[0], output.prompt_token_ids
        prefill_rate = decode_rate = None
        times = metrics.token_times
        if times and metrics.first_scheduled_time is not None:
            prefill_seconds = times[0] - metrics.first_scheduled_time
            prefill_rate = (len(prompt) - output.num_cached_tokens) / prefill_seconds if prefill_seconds else None
            decode_seconds = times[-1] - times[0]
            decode_rate = (len(completion.token_ids) - 1) / decode_seconds if decode_seconds else None
        return cls(
            completion.text,
            completion.finish_reason or ("repetition" if loops else "abort"),
            len(prompt),
            output.num_cached_tokens,
            len(completion.token_ids),
            metrics.time_to_first_token,
            prefill_rate,
            decode_rate,
            prompt + completion.token_ids,
            output.error,
        )

    def footer(self, max_model_len: int) -> str:
        """The figures in a line of at most 80 columns. The least important figures are left out first."""
        used = len(self.token_ids) / max_model_len
        parts = [f"{self.num_prompt_tokens:,} tokens in ({self.num_cached_tokens:,} cached)"]
        parts += [f"{self.num_output_tokens:,} out"]
        parts += [f"{self.decode_rate:,.1f} tok/s"] if self.decode_rate else []
        parts += [f"TTFT {self.time_to_first_token:.2f} s"] if self.time_to_first_token is not None else []
        parts += [f"context {used:.0%}"]
        while len(", ".join(parts)) > COLUMNS:
            del parts[-2]
        return ", ".join(parts)

    def ending(self, max_tokens: int | None) -> str:
        """Why the reply is not whole; empty if it is."""
        if self.finish_reason == "length":
            full = self.num_output_tokens != max_tokens
            return "cut: the context is full" if full else f"cut at max_tokens {max_tokens}"
        endings = {"abort": "stopped by Ctrl-C", "repetition": "stopped: repeating itself"}
        endings["error"] = f"ended by an error: {self.error}"
        return endings.get(self.finish_reason, "")


class _StoppedWhileReading(Exception):
    """Raised by a listener, to stop reading the prompt."""


def shows_markdown(plain: bool) -> bool:
    """Whether to render Markdown: stdout is a terminal that can, without `plain` or NO_COLOR (https://no-color.org)."""
    smart = os.environ.get("TERM", "dumb") != "dumb"
    return not plain and not os.environ.get("NO_COLOR") and smart and sys.stdout.isatty()


def encode(llm: LLM, prompt: str | list[dict], tools: list[dict] | None = None) -> dict[str, Any]:
    """A text, or a conversation through the chat template, as a prompt of the engine. Raises ValueError, TypeError.

    Args: tools: the tools that the model may call.
    """
    encode = llm.engine.input_processor.prompts.encode
    if isinstance(prompt, str):
        return {"prompt_token_ids": encode(prompt)}
    messages, images = take_images(prompt)
    text = render_chat(llm.get_tokenizer(), messages, tools)
    ids = {"prompt_token_ids": encode(text, add_special_tokens=False)}
    return ids | ({"multi_modal_data": {"image": images}} if images else {})


def count_tokens(llm: LLM, prompt: dict[str, Any]) -> int:
    """How many tokens a prompt has, with those of its images."""
    if "multi_modal_data" in prompt:
        return len(llm.engine.input_processor.prompts.read(cast(Prompt, prompt)).token_ids)
    return len(prompt["prompt_token_ids"])


def generate(
    llm: LLM,
    prompt: dict[str, Any],
    params: SamplingParams,
    interrupt: Interrupt,
    plain: bool = False,
    show: bool = True,
    begun: str = "",
    begun_ids: Sequence[int] = (),
    reader: ReplyReader | None = None,
) -> Reply | None:
    """Stream one reply to stdout. `interrupt` ends it, frees its blocks and keeps its text. None if nothing came.

    Args:
        prompt: of `encode`.
        show: False writes nothing to stdout.
        begun, begun_ids: the beginning of the reply, which was shown before, as text and as tokens.
        reader: finds the calls of tools, which are not shown.

    Raises: ValueError, TypeError for a prompt that cannot be answered, before anything is shown.
    """
    ids, tokenizer = [*prompt["prompt_token_ids"], *begun_ids], llm.get_tokenizer()
    thinking = last_mark(tokenizer, ids, tail=8) == THINK
    thinks = thinking or knows_reasoning(tokenizer.template_for(reader is not None))
    reasoning = {"reasoning": thinking if thinks else None}  # no stop string is searched for in reasoning
    whole = cast(Prompt, prompt | {"prompt_token_ids": ids} | reasoning)
    stream = cast(Generator[RequestOutput], llm.stream(whole, params))
    printer, output, loops, guard = None, None, False, LoopGuard()
    markdown, on_terminal = shows_markdown(plain), sys.stdout.isatty()
    with held_log(), contextlib.closing(stream):
        try:
            for output in _after_reading(llm, stream, count_tokens(llm, prompt) + len(begun_ids), interrupt):
                completion = output.outputs[0]
                delta = _shown(completion, reader)
                delta = printable(delta) if on_terminal else delta
                if show and markdown:
                    if printer is None:
                        printer = _printer(llm, prompt["prompt_token_ids"], begun)
                        interrupt.resumed = printer.go_on_below
                    printer.feed(delta)
                elif show:
                    print(delta, end="", flush=True)
                if interrupt.signum is not None:
                    break
                if loops := guard.feed(completion.delta) and completion.finish_reason is None:
                    break
        except (KeyboardInterrupt, _StoppedWhileReading):  # the second Ctrl-C does not wait for the step to end
            pass
        interrupt.over = True
        if printer is not None:
            printer.finish()
        elif show:
            print(flush=True)
    return None if output is None else Reply.of(output, loops)


def _shown(completion: CompletionOutput, reader: ReplyReader | None) -> str:
    """The new text of a reply, without calls of tools."""
    if reader is None:
        return completion.delta
    pieces = reader.feed(completion.delta)
    if completion.finish_reason is not None:
        pieces += reader.end()
    return "".join(piece.text for piece in pieces if isinstance(piece, Content))


def _after_reading(
    llm: LLM, stream: Iterator[RequestOutput], num_tokens: int, interrupt: Interrupt
) -> Iterator[RequestOutput]:
    """The outputs of `stream`. Before the first output, a line shows how much of the prompt has been read."""
    read = 0

    def after_step(stats: StepStats) -> None:
        nonlocal read
        read += stats.cached_tokens + stats.prefill_tokens
        if interrupt.signum is None:
            update(f"reading {read:,} of {num_tokens:,} tokens")
        elif not stats.output_tokens:
            raise _StoppedWhileReading

    with spinner(f"reading {num_tokens:,} tokens", SPINNER_DELAY) as update:
        interrupt.notice = lambda: update("stopping... press Ctrl-C again to stop now")
        llm.engine.listeners.append(after_step)
        try:
            first = next(stream)
        finally:
            llm.engine.listeners.remove(after_step)
            interrupt.notice = lambda: None
    yield first
    yield from stream


def _printer(llm: LLM, prompt_token_ids: list[int], begun: str):
    from nanopage.terminal.markdown import ReplyPrinter  # not needed where plain text is

    # Some templates write the opening tag themselves.
    printer = ReplyPrinter(sys.stdout, thinking=last_mark(llm.get_tokenizer(), prompt_token_ids, tail=8) == THINK)
    printer.skip(printable(begun))
    return printer
