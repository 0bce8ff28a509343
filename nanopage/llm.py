"""LLM: the offline API. Names and shapes are those of vLLM's class of the same name.

from nanopage import LLM, SamplingParams

llm = LLM()
for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=50)):
    print(output.outputs[0].text)
"""

import contextlib
import dataclasses
import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from nanopage.config import EngineConfig
from nanopage.engine.engine import LLMEngine
from nanopage.engine.input_processor import Prompt, Request
from nanopage.request import BeamSearchParams, RequestOutput, SamplingParams, StepStats

AnyParams = SamplingParams | BeamSearchParams


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C during `generate`, `chat` or `beam_search`.

    `outputs` has an entry for each prompt, in order: its RequestOutput, with what it had produced (`finish_reason` is
    "abort" where it had not ended), or None if it had produced nothing.
    """

    def __init__(self, outputs: list[RequestOutput | None]):
        super().__init__()
        self.outputs = outputs


class GenerationError(RuntimeError):
    """An error that is not that of a single request ended `generate`, `chat` or `beam_search`. `outputs` as in
    GenerationInterrupted."""

    def __init__(self, message: str, outputs: list[RequestOutput | None]):
        super().__init__(message)
        self.outputs = outputs


class LLM:
    """A model ready to generate. Several threads may use it at once; their requests are batched together.

    Args:
        model: a Hugging Face directory, a .gguf file, a hub id, or None for SmolLM2-135M-Instruct.
        on_progress: called while weights load, with the number of those that have been read and of all.
        options: those of `EngineConfig`, by name.

    Raises: TypeError for an option that does not exist, and what LLMEngine raises.
    """

    def __init__(self, model: str | None = None, *, on_progress: Callable[[int, int], None] | None = None, **options):
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        if unknown := options.keys() - known:
            raise TypeError(
                f"LLM() has no option {', '.join(sorted(unknown))}; its options: {', '.join(sorted(known))}"
            )
        self.engine = LLMEngine(EngineConfig(model=model, **options), on_progress)
        self._ids = itertools.count()
        self._lock = threading.RLock()  # of the engine and the inboxes
        # request_id -> where its outputs go. Each reader (a call of generate, a stream) has an inbox for its requests.
        self._inboxes: dict[str, deque[RequestOutput]] = {}

    def get_tokenizer(self):
        """None if the model has none, which only load_format="dummy" allows."""
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends; used where no SamplingParams are given."""
        return dataclasses.replace(self.engine.default_sampling_params)

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: list[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all of them batched together.

        Args:
            prompts: one or a list of: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}.
            sampling_params: for all, or one for each prompt; None uses `get_default_sampling_params`.
            use_tqdm: show a progress bar on stderr.
            priority: one for each prompt, lower goes first, with scheduling_policy="priority".

        Returns: one finished RequestOutput for each prompt, in order. The `error` of one that could not be completed
            says why.

        Raises:
            ValueError, TypeError: a prompt or parameter that is not usable; nothing has run then.
            GenerationInterrupted, GenerationError: with the outputs so far.
        """
        return self._run(self._requests(_list_of_prompts(prompts), sampling_params, priority), use_tqdm)

    def beam_search(
        self, prompts: Prompt | list[Prompt], params: BeamSearchParams | list[BeamSearchParams], use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Search the likeliest completions of prompts, all of them batched together.

        Args: as `generate`.

        Returns: one RequestOutput for each prompt, in order; its `outputs` are the `width` best completions, best
            first, with `score` and `cumulative_logprob`. An end-of-sequence token is part of `token_ids`.

        Raises: as `generate`.
        """
        if params is None:
            raise TypeError("params must be BeamSearchParams, not None")
        return self._run(self._requests(_list_of_prompts(prompts), params, kind=BeamSearchParams), use_tqdm)

    def chat(
        self,
        messages: list[dict] | list[list[dict]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Reply to one conversation, or to a list of them, through the model's chat template.

        Args: as `generate`, with conversations of {"role": ..., "content": ...}; `chat_template` is Jinja source.
        """
        several = isinstance(messages, list) and bool(messages) and isinstance(messages[0], list)
        conversations = cast(list[list[dict]], messages if several else [messages])
        prompts: list[Prompt] = [self._chat_prompt(c, chat_template, add_generation_prompt) for c in conversations]
        return self._run(self._requests(prompts, sampling_params), use_tqdm)

    def stream(
        self, prompt: Prompt | list[dict], sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, or reply to one conversation, yielding a RequestOutput after every token (with `best_of`
        more than `n`, one at the end).

        `output.outputs[0].delta` is the new text; the deltas add up to the final text. Closing the iterator, or
        leaving its loop, aborts the request. Raises as `generate`, before anything runs.
        """
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            prompt = self._chat_prompt(cast(list[dict], prompt))
        (request,) = self._requests([cast(Prompt, prompt)], sampling_params)
        return self._outputs([request])

    def count_tokens(self, messages: list[dict]) -> int:
        """How many prompt tokens a conversation makes."""
        return len(self._chat_prompt(messages)["prompt_token_ids"])

    def _chat_prompt(
        self, messages: list[dict], chat_template: str | None = None, add_generation_prompt: bool = True
    ) -> dict:
        tokenizer = self.engine.input_processor.require_tokenizer("a conversation", "prompt_token_ids to generate()")
        text = tokenizer.apply_chat_template(messages, chat_template, add_generation_prompt)
        # The template writes the special tokens itself; the request carries ids so that none is added twice.
        return {"prompt_token_ids": self.engine.input_processor.encode(text, add_special_tokens=False)}

    def _requests(
        self,
        prompts: list[Prompt],
        sampling_params: AnyParams | Sequence[AnyParams] | None,
        priority: list[int] | None = None,
        kind: type[AnyParams] = SamplingParams,
    ) -> list[Request]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if not isinstance(sampling_params, list | tuple):
            sampling_params = [cast(AnyParams, sampling_params)] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(f"{len(sampling_params)} sampling_params for {len(prompts)} prompts")
        for params in sampling_params:
            if not isinstance(params, kind):
                raise TypeError(f"sampling_params must be {kind.__name__}, not {params!r}")
        priority = [0] * len(prompts) if priority is None else priority
        if not isinstance(priority, list | tuple):
            raise TypeError(f"priority must be a list, one integer for each prompt, not {priority!r}")
        if len(priority) != len(prompts):
            raise ValueError(f"{len(priority)} values of priority for {len(prompts)} prompts")
        requests: list[Request] = []
        for i, (prompt, params, place) in enumerate(zip(prompts, sampling_params, priority, strict=True)):
            try:
                requests.append(self.engine.make_request(str(next(self._ids)), prompt, params, place))
            except (ValueError, TypeError) as error:
                raise type(error)(f"prompts[{i}]: {error}" if len(prompts) > 1 else str(error)) from None
        return requests

    def _run(self, requests: list[Request], show_progress: bool) -> list[RequestOutput]:
        latest: dict[str, RequestOutput] = {}
        num_tokens = num_finished = 0

        def after_step(stats: StepStats) -> None:
            nonlocal num_tokens
            num_tokens += stats.output_tokens

        try:
            with (
                Progress(
                    TextColumn("Generating"),
                    BarColumn(),
                    MofNCompleteColumn(),
                    TextColumn("{task.fields[speed]}"),
                    TimeElapsedColumn(),
                    console=Console(stderr=True),
                    disable=not show_progress,
                ) as progress,
                self._listening(after_step),
                contextlib.closing(self._outputs(requests)) as outputs,
            ):
                task = progress.add_task("", total=len(requests), speed="")
                for output in outputs:
                    latest[output.request_id] = output
                    num_finished += output.finished
                    elapsed = progress.tasks[task].elapsed
                    speed = f"{num_tokens / elapsed:.0f} output tok/s" if elapsed else ""
                    progress.update(task, completed=num_finished, speed=speed)
        except KeyboardInterrupt:
            raise GenerationInterrupted(_so_far(requests, latest)) from None
        except Exception as error:
            raise GenerationError(str(error), _so_far(requests, latest)) from error
        return [latest[request.group.request_id] for request in requests]

    def _outputs(self, requests: list[Request]) -> Generator[RequestOutput]:
        """Submit requests and yield their outputs as they come. If the reader leaves, abort what is unfinished."""
        unfinished = {request.group.request_id for request in requests}
        inbox: deque[RequestOutput] = deque()
        try:
            with self._lock:
                for request in requests:
                    self._inboxes[request.group.request_id] = inbox
                    self.engine.submit(request)
            while unfinished:
                with self._lock:
                    if not inbox:
                        self._step()
                while inbox:
                    output = inbox.popleft()
                    if output.finished:
                        unfinished.discard(output.request_id)
                        del self._inboxes[output.request_id]
                    yield output
        finally:
            with self._lock:
                for request_id in unfinished:
                    self.engine.abort(request_id)
                    self._inboxes.pop(request_id, None)

    @contextlib.contextmanager
    def _listening(self, listener: Callable[[StepStats], None]) -> Iterator[None]:
        """Call `listener` with the StepStats of every step, whoever makes it."""
        with self._lock:
            self.engine.listeners.append(listener)
        try:
            yield
        finally:
            with self._lock:
                self.engine.listeners.remove(listener)

    def _step(self) -> None:
        for output in self.engine.step():
            if (inbox := self._inboxes.get(output.request_id)) is not None:
                inbox.append(output)
            else:  # its reader was interrupted before it could abort the request
                self.engine.abort(output.request_id)


def _so_far(requests: list[Request], latest: dict[str, RequestOutput]) -> list[RequestOutput | None]:
    """What each request has produced, the unfinished ones marked as aborted."""
    outputs: list[RequestOutput | None] = []
    for request in requests:
        output = latest.get(request.group.request_id)
        if output is not None and not output.finished:
            completions = [
                dataclasses.replace(completion, finish_reason=completion.finish_reason or "abort")
                for completion in output.outputs
            ]
            output = dataclasses.replace(output, outputs=completions, finished=True)
        outputs.append(output)
    return outputs


def _list_of_prompts(prompts: Prompt | list[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | dict) or (isinstance(prompts, list) and prompts and isinstance(prompts[0], int)):
        prompts = [cast(Prompt, prompts)]
    if not isinstance(prompts, list | tuple):
        raise TypeError(f"prompts must be a prompt or a list of prompts, not {prompts!r}")
    return cast(list[Prompt], prompts)
