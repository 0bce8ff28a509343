"""LLM: the offline API. Methods and arguments have vLLM's names where vLLM's LLM has them (docs/vllm.md).

from nanopage import LLM, SamplingParams

llm = LLM()
for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=50)):
    print(output.outputs[0].text)
"""

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, cast

from nanopage import build
from nanopage.checks.vllm_options import CALL, accept, accept_engine
from nanopage.config.options import EngineConfig
from nanopage.engine.engine import LLMEngine
from nanopage.engine.output_processor import Request
from nanopage.inputs import AnyAdapter, AnyParams, LoRARequest, Prompt, list_prompts, match_parameters
from nanopage.outputs import GenerationError, GenerationInterrupted, RequestOutput
from nanopage.params import RequestOutputKind, SamplingParams
from nanopage.text.tool_prompt import make_prompt
from nanopage.vllm import methods
from nanopage.vllm.engine_args import option_names
from nanopage.vllm.metrics import Metric, Metrics
from nanopage.vllm.profiler import Profiler
from nanopage.vllm.progress import progress_bar


class LLM:
    """A model ready to generate. Several threads may use it at once; their requests are batched together.

    Args:
        model: a Hugging Face directory, a .gguf file, a hub id, or None for SmolLM2-135M-Instruct.
        on_progress: called while weights load, with the number of weights read so far and the total.
        profiler_config: where `start_profile` writes (see `Profiler`).
        options: options of `EngineConfig`, by name. Options of vLLM that change nothing, such as
            data_parallel_size=1, are accepted (see checks/vllm_options.py).

    Raises:
        TypeError: an option that does not exist.
        ValueError: an option of vLLM with a value that nanopage does not support.
        Others: as `build_engine`.
    """

    # Methods that wings add, attached by build.py.
    beam_search, read_replies = build.beam_search, build.read_replies
    encode, embed, classify, score = build.encode, build.embed, build.classify, build.score
    sleep, wake_up, is_sleeping = build.sleep, build.wake_up, build.is_sleeping
    update_weights = build.update_weights
    # Methods that only programs for vLLM need.
    get_tokenizer = methods.get_tokenizer
    get_default_sampling_params = methods.get_default_sampling_params
    start_profile, stop_profile = methods.start_profile, methods.stop_profile

    def __init__(
        self,
        model: str | None = None,
        *,
        on_progress: Callable[[int, int], None] | None = None,
        profiler_config: dict | None = None,
        **options,
    ):
        self.profiler = Profiler(profiler_config)
        options = accept_engine("LLM()", options | {"model": model}, option_names())
        self.engine: LLMEngine = build.build_engine(EngineConfig(**options), on_progress, "LLM")
        self.ids = itertools.count()  # of requests
        self._metrics = Metrics(self.engine)
        self._lock = threading.RLock()  # guards the engine and the inboxes
        # request_id -> the inbox for its outputs. A reader (a call of generate, a stream) has one inbox.
        self._inboxes: dict[str, deque[RequestOutput]] = {}

    def generate(
        self,
        prompts: Prompt | list[Prompt] | None = None,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        *,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        use_tqdm: bool = True,
        lora_request: AnyAdapter = None,
        prompt_adapter_request: Any = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: dict | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all of them batched together.

        Args:
            prompts: one prompt or a list: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}.
            sampling_params: for all, or one for each prompt; None uses `get_default_sampling_params`.
            prompt_token_ids: the token ids of one prompt or of each prompt in a list; `prompts` are then their texts.
            use_tqdm: show a progress bar on stderr.
            lora_request: an adapter for all prompts, or one or None for each; needs enable_lora.
            prompt_adapter_request: PromptAdapterRequest, a soft prompt, in the same way; needs enable_prompt_adapter.
            tokenization_kwargs: accepted for vLLM's scripts; must be None or {}.
            priority: an integer for all prompts, or one for each, with scheduling_policy="priority"; lower goes first.

        Returns: one finished RequestOutput for each prompt, in order. If a request could not be completed, its `error`
            says why.

        Raises:
            ValueError, TypeError: an invalid prompt or parameter; nothing has run then.
            GenerationInterrupted, GenerationError: with the outputs so far.
        """
        accept("generate()", {"tokenization_kwargs": tokenization_kwargs}, (), CALL)
        if prompts is None and prompt_token_ids is None:
            raise TypeError("generate() needs prompts")
        listed = build.with_prompt_adapters(list_prompts(prompts, prompt_token_ids), prompt_adapter_request)
        return self.run(self.make_requests(listed, sampling_params, priority, lora_request), use_tqdm)

    def make_requests(
        self,
        prompts: list[Prompt],
        params: AnyParams | Sequence[AnyParams] | None,
        priority: int | Sequence[int] | None = None,
        lora_request: AnyAdapter = None,
        kind: type[AnyParams] = SamplingParams,
    ) -> list[Request]:
        """Make a request of each prompt, without submitting it. Errors name the prompt."""
        requests: list[Request] = []
        params = self.get_default_sampling_params() if params is None else params
        for i, arguments in enumerate(match_parameters(prompts, params, priority, lora_request, kind)):
            try:
                requests.append(self.engine.input_processor.make_request(str(next(self.ids)), *arguments))
            except (ValueError, TypeError) as error:
                raise type(error)(f"prompts[{i}]: {error}" if len(prompts) > 1 else str(error)) from None
        return requests

    def run(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        """Run requests to their end. Returns their final outputs, in order."""
        if not isinstance(use_tqdm, bool):
            raise TypeError(f"use_tqdm must be True or False, not {use_tqdm!r}")
        for request in requests:
            if isinstance(request.params, SamplingParams):
                request.params.output_kind = RequestOutputKind.FINAL_ONLY
        finished: dict[str, RequestOutput] = {}
        left: list[RequestOutput] = []
        try:
            with (
                progress_bar(len(requests), self.engine.listeners, self._lock, use_tqdm) as advance,
                contextlib.closing(self._outputs(requests, left)) as outputs,
            ):
                for output in outputs:
                    finished[output.request_id] = output
                    advance()
        except KeyboardInterrupt:
            raise GenerationInterrupted(_so_far(requests, [*finished.values(), *left])) from None
        except Exception as error:
            raise GenerationError(str(error), _so_far(requests, [*finished.values(), *left])) from error
        return [finished[request.group.request_id] for request in requests]

    def _outputs(self, requests: list[Request], left: list[RequestOutput] | None = None) -> Generator[RequestOutput]:
        """Submit requests and yield their outputs as they come. If the reader leaves, abort what is unfinished.

        Args: left: gets the outputs that the reader has not read, and the outputs of aborted requests.
        """
        unfinished = {request.group.request_id for request in requests}
        inbox: deque[RequestOutput] = deque()
        try:
            with self._lock:
                for request in requests:
                    self._inboxes[request.group.request_id] = inbox
                    self.engine.submit(request)
                    self._metrics.count(request)
            while unfinished:
                with self._lock:
                    if not inbox:
                        self._step()
                while inbox:
                    output = inbox[0]
                    if output.finished:
                        unfinished.discard(output.request_id)
                        del self._inboxes[output.request_id]
                    yield output
                    inbox.popleft()  # now the reader has it
        finally:
            with self._lock:
                left = [] if left is None else left
                left += inbox
                for request_id in unfinished:
                    self._inboxes.pop(request_id, None)
                    if (aborted := self.engine.abort(request_id)) is not None:
                        self._metrics.count(aborted)
                        left.append(aborted)

    def _step(self) -> None:
        """Run one step and hand its outputs to their readers. The caller holds the lock."""
        for output in self.engine.step():
            if output.finished:
                self._metrics.count(output)
            if (inbox := self._inboxes.get(output.request_id)) is not None:
                inbox.append(output)
            else:  # its reader was interrupted before it could abort the request
                self.engine.abort(output.request_id)

    def stream(
        self,
        prompt: Prompt | list[dict],
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: Any = None,
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, or reply to one conversation. Yields a RequestOutput after every token; with `best_of`
        more than `n`, or with RequestOutputKind.FINAL_ONLY, only one at the end.

        `output.outputs[0].delta` is the new text; the deltas add up to the final text. Closing the iterator, or
        leaving its loop, aborts the request. A request that fails ends with an output that has `error`.

        Raises: ValueError or TypeError for a bad argument, before anything runs; what the engine raises.
        """
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            prompt = self._chat_prompt(cast(list[dict], prompt))
        prompts = build.with_prompt_adapters([cast(Prompt, prompt)], prompt_adapter_request)
        return self._outputs(self.make_requests(prompts, sampling_params, lora_request=lora_request))

    def chat(
        self,
        messages: list[dict] | list[list[dict]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: AnyAdapter = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict] | None = None,
        chat_template_kwargs: dict | None = None,
        mm_processor_kwargs: dict | None = None,
        tokenization_kwargs: dict | None = None,
        prompt_adapter_request: Any = None,
    ) -> list[RequestOutput]:
        """Reply to one conversation, or to a list of them, through the model's chat template.

        Args:
            messages: {"role": ..., "content": ...} in order (see `normalize_messages` in chat_template.py).
            sampling_params, use_tqdm, lora_request, priority, prompt_adapter_request: as `generate`.
            chat_template: Jinja source to use instead of the model's, or the name of one of the model's templates.
            chat_template_content_format: "auto" or "string".
            add_generation_prompt: end the prompt with the opening of the assistant's reply.
            continue_final_message: have the model go on with the last message; needs add_generation_prompt=False.
            tools: JSON schemas of the functions that the model may call. Calls come as text, in the model's own form:
                `read_replies` finds them. A model whose template has no tools gets the schemas as text.
            chat_template_kwargs: more variables for the template, such as {"enable_thinking": False}.
            mm_processor_kwargs, tokenization_kwargs: accepted for vLLM's scripts; must be None or {}.

        Returns: as `generate`; `RequestOutput.prompt` is the text that the template made.
        """
        kwargs = {"mm_processor_kwargs": mm_processor_kwargs, "tokenization_kwargs": tokenization_kwargs}
        accept("chat()", kwargs | {"chat_template_content_format": chat_template_content_format}, (), CALL)
        several = isinstance(messages, list) and bool(messages) and isinstance(messages[0], list)
        conversations = cast(list[list[dict]], messages if several else [messages])
        template = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
        }
        prompts: list[Prompt] = [self._chat_prompt(conversation, **template) for conversation in conversations]
        prompts = build.with_prompt_adapters(prompts, prompt_adapter_request)
        return self.run(self.make_requests(prompts, sampling_params, priority, lora_request), use_tqdm)

    def count_tokens(self, messages: list[dict]) -> int:
        """The number of prompt tokens of a conversation."""
        return len(self.engine.input_processor.prompts.read(self._chat_prompt(messages)).token_ids)

    def _chat_prompt(self, messages: list[dict], **template: Any) -> dict:
        """The prompt of a conversation. `template`: further arguments of `Tokenizer.render_chat`."""
        reader = self.engine.input_processor.prompts
        tokenizer = reader.require_tokenizer("a conversation", "prompt_token_ids to generate()")
        return make_prompt(tokenizer, reader.encode, messages, **template)

    @property
    def llm_engine(self) -> LLMEngine:
        """vLLM's name for `engine`."""
        return self.engine

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Running requests go on. Returns True: this always succeeds."""
        with self._lock:
            self.engine.reset_prefix_cache()
        return True

    def get_metrics(self) -> list[Metric]:
        """The metrics so far, under vLLM's names (see vllm/metrics.py)."""
        with self._lock:
            return self._metrics.snapshot()


def _so_far(requests: list[Request], outputs: list[RequestOutput]) -> list[RequestOutput | None]:
    """The output of each request; None where nothing was produced."""
    outputs = [output for output in outputs if output.error or any(c.token_ids for c in output.outputs)]
    by_id = {output.request_id: output for output in outputs}
    return [by_id.get(request.group.request_id) for request in requests]
