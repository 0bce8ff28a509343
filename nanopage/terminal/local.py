"""A model in this process: as the chat needs it, and how it is loaded."""

import dataclasses
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, cast

from nanopage import LLM
from nanopage.device import resolve_device
from nanopage.grammar.tool_formats import find_format
from nanopage.grammar.tool_pieces import Content
from nanopage.grammar.tool_reply import ReplyReader
from nanopage.inputs import Prompt
from nanopage.outputs import CompletionOutput, RequestOutput, StepStats
from nanopage.params import SamplingParams
from nanopage.step import Capacity
from nanopage.terminal.images import check_sight, sees_images
from nanopage.terminal.reply import MOST_TOKENS, NO_TEMPLATE, SPINNER_DELAY, Reply, Request, Stopped
from nanopage.terminal.signals import Interrupt
from nanopage.terminal.spinner import spinner
from nanopage.text.detokenizer import REPLACEMENT
from nanopage.text.image_parts import take_images
from nanopage.text.reasoning import THINK, knows_reasoning, last_mark
from nanopage.text.tokenizer import Tokenizer
from nanopage.text.tool_prompt import render_chat
from nanopage.view.explain import explain
from nanopage.view.frames import Frames
from nanopage.view.picture import Picture
from nanopage.weights import loader

CHUNK = 256  # tokens of a prompt that a CPU reads between two checks for Ctrl-C


class LocalModel:
    """An LLM as a Model."""

    def __init__(self, llm: LLM):
        self.llm, self.num_requests = llm, 0
        self.max_model_len: int | None = llm.engine.max_model_len
        self.sees_images: bool | None = sees_images(llm.engine.model_config)
        self.capacity: Capacity | None = llm.engine.capacity
        self.where = f"{self.capacity.dtype} on {self.capacity.device}"

    def check(self, params: SamplingParams) -> None:
        self.llm.engine.input_processor.make_request("check", {"prompt_token_ids": [0]}, params)

    def count(self, request: Request) -> int:
        return count_tokens(self.llm, self._encode(request))

    def stream(self, request: Request, interrupt: Interrupt) -> "LocalStream":
        self.num_requests += 1
        return LocalStream(self.llm, request, self._encode(request), interrupt)

    def begun(self, text: str, ids: list[int], params: SamplingParams) -> tuple[str, list[int]]:
        tokenizer = self.llm.get_tokenizer()
        if not ids:
            return text, tokenizer.encode(text, add_special_tokens=False)
        for cut in range(4):  # a model completes a character from its bytes
            kept = ids[: len(ids) - cut]
            if not tokenizer.decode(kept[-8:]).endswith(REPLACEMENT):
                break
        else:
            return text, ids  # bytes that are no character at all
        text = text.removesuffix(REPLACEMENT) if cut else text
        # At Ctrl-C, the end may have been hidden still, as the possible beginning of a stop string.
        decoded = tokenizer.decode(kept, params.skip_special_tokens)
        return decoded if decoded.startswith(text) else text, kept

    def figures(self) -> list[tuple[str, str]]:
        blocks = self.llm.engine.scheduler.block_manager
        used = blocks.num_blocks - blocks.num_free_blocks
        text = f"{used:,} in use, {blocks.num_cached_blocks:,} cached, {blocks.num_blocks:,} in all, "
        return [("KV blocks", f"{text}of {blocks.block_size} tokens")]

    def picture(self) -> Picture:
        picture, engine = Picture(), self.llm.engine
        why = [["", None, text] for text in explain(engine, lambda _: str(self.num_requests))]
        picture.apply(Frames(engine, engine.model_path.name).key() | {"why": why})
        return picture

    def _encode(self, request: Request) -> dict[str, Any]:
        """The prompt and the reply's beginning, as a prompt of the engine. Raises: ValueError, TypeError."""
        encode = self.llm.engine.input_processor.prompts.encode
        if isinstance(request.prompt, str):
            return {"prompt_token_ids": [*encode(request.prompt), *request.begun_ids]}
        messages, images = take_images(request.prompt)
        text = render_chat(self.llm.get_tokenizer(), messages, request.tools)
        ids = {"prompt_token_ids": [*encode(text, add_special_tokens=False), *request.begun_ids]}
        return ids | ({"multi_modal_data": {"image": [image.pixels for image in images]}} if images else {})


def count_tokens(llm: LLM, prompt: dict[str, Any]) -> int:
    """How many tokens a prompt has, with those of its images."""
    if "multi_modal_data" in prompt:
        return len(llm.engine.input_processor.prompts.read(cast(Prompt, prompt)).token_ids)
    return len(prompt["prompt_token_ids"])


class LocalStream:
    """One reply of an LLM, as a Stream. Args: prompt: of the engine, with the reply's beginning."""

    def __init__(self, llm: LLM, request: Request, prompt: dict[str, Any], interrupt: Interrupt):
        self._llm, self._interrupt, self._num_tokens = llm, interrupt, count_tokens(llm, prompt)
        self._output: RequestOutput | None = None
        self._reader: ReplyReader | None = None
        params, tokenizer = request.params, llm.get_tokenizer()
        template = tokenizer.template_for(bool(request.tools))
        if request.tools and request.reads_calls:
            tool_format = find_format(template or "")
            # Thoughts are content: the printer shows them in its own way.
            self._reader = ReplyReader(tool_format, [tool["function"]["name"] for tool in request.tools])
            params = dataclasses.replace(params, skip_special_tokens=False)  # they may be marks of calls
        ids = prompt["prompt_token_ids"]
        asked = ids[: len(ids) - len(request.begun_ids)]
        self.thinking = last_mark(tokenizer, asked, tail=8) == THINK  # some templates write the opening tag
        goes_on = last_mark(tokenizer, ids, tail=8) == THINK
        thinks = goes_on or knows_reasoning(template)
        reasoning = {"reasoning": goes_on if thinks else None}  # no stop string is searched for in reasoning
        stream = llm.stream(cast(Prompt, prompt | reasoning), params)
        self._outputs = cast(Generator[RequestOutput], stream)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for output in self._after_reading():
            self._output, completion = output, output.outputs[0]
            yield completion.delta, self._shown(completion)

    def close(self) -> None:
        self._outputs.close()

    def reply(self) -> Reply | None:
        if self._output is None:
            return None
        output, completion, reader = self._output, self._output.outputs[0], self._reader
        prompt, metrics, times = output.prompt_token_ids, output.metrics, output.metrics.token_times
        prefill_rate = decode_rate = None
        if times and metrics.first_scheduled_time is not None:
            prefill_seconds = times[0] - metrics.first_scheduled_time
            prefill_rate = (len(prompt) - output.num_cached_tokens) / prefill_seconds if prefill_seconds else None
            decode_seconds = times[-1] - times[0]
            decode_rate = (len(completion.token_ids) - 1) / decode_seconds if decode_seconds else None
        calls = []
        if reader is not None and reader.format is not None and completion.finish_reason == "stop":
            calls = [(reader.format.make_id(), call) for call in reader.whole.calls]
        return Reply(
            text=completion.text,
            finish_reason=completion.finish_reason or "",
            num_prompt_tokens=len(prompt),
            num_cached_tokens=output.num_cached_tokens,
            num_output_tokens=len(completion.token_ids),
            time_to_first_token=metrics.time_to_first_token,
            prefill_rate=prefill_rate,
            decode_rate=decode_rate,
            error=output.error,
            token_ids=prompt + completion.token_ids,
            content=reader.whole.content if reader is not None else "",
            calls=calls,
        )

    def _shown(self, completion: CompletionOutput) -> str:
        """The new text of a reply, without calls of tools."""
        if self._reader is None:
            return completion.delta
        pieces = self._reader.feed(completion.delta)
        if completion.finish_reason is not None:
            pieces += self._reader.end()
        return "".join(piece.text for piece in pieces if isinstance(piece, Content))

    def _after_reading(self) -> Iterator[RequestOutput]:
        """The outputs. Before the first output, a line shows how much of the prompt has been read."""
        read, num_tokens, interrupt, listeners = 0, self._num_tokens, self._interrupt, self._llm.engine.listeners

        def after_step(stats: StepStats) -> None:
            nonlocal read
            read += stats.cached_tokens + stats.prefill_tokens
            if interrupt.signum is None:
                update(f"reading {read:,} of {num_tokens:,} tokens")
            elif not stats.output_tokens:
                raise Stopped

        with spinner(f"reading {num_tokens:,} tokens", SPINNER_DELAY) as update:
            interrupt.notice = lambda: update("stopping... press Ctrl-C again to stop now")
            listeners.append(after_step)
            try:
                first = next(self._outputs)
            finally:
                listeners.remove(after_step)
                interrupt.notice = lambda: None
        yield first
        yield from self._outputs


def load_model(
    path: Path,
    name: str,
    options: dict,
    raw: bool,
    tools: bool,
    sight: bool,
    on_progress: Callable[[int, int], None],
) -> tuple[LocalModel, SamplingParams]:
    """Load a model. Returns it and its settings.

    Args:
        options: of the engine, by name.
        raw, tools, sight: whether it goes without a chat template, is to call tools, and is to see images.
        on_progress: as in LLM.

    Raises: ValueError if the model sees no images, before it loads; if it has no chat template, or calls of tools that
        nanopage does not read; what LLM raises.
    """
    if sight:
        check_sight(sees_images(loader.read_config(path)), name)
    chunk = {"max_num_batched_tokens": CHUNK} if resolve_device(options["device"]).type == "cpu" else {}
    llm = LLM(str(path), on_progress=on_progress, **options, **chunk)
    if not raw and llm.get_tokenizer().chat_template is None:
        raise ValueError(f"{name} {NO_TEMPLATE}")
    if tools:
        find_format(llm.get_tokenizer().template_for(True) or "")
    params = llm.get_default_sampling_params()
    if params == SamplingParams():  # the model changes nothing: greedy decoding is best for small models
        params = SamplingParams(temperature=0)
    return LocalModel(llm), dataclasses.replace(params, max_tokens=MOST_TOKENS)


def check_model(path: Path, raw: bool, sight: bool) -> None:
    """Raises: ValueError, OSError if a model's files show that it cannot be loaded, or cannot go on with images."""
    checkpoint = loader.open_checkpoint(path)
    config = loader.read_config(checkpoint)
    if sight:
        check_sight(sees_images(config), f"the conversation has images, and {path}")
    if Tokenizer(checkpoint).chat_template is None and not raw:
        raise ValueError(f"{path} has no chat template: it is a base model, and needs --raw")
