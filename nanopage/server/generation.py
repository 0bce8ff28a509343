"""The engine requests of one HTTP call: read as they come, aborted together. What calls for text have in common:
choices, their changes while they stream, usage, and beam searches in place of samples."""

import asyncio
import contextlib
import logging
import re
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nanopage.aio.async_llm import AsyncLLM, EngineDeadError, RequestStream
from nanopage.items.soft_prompts import PromptAdapterRequest
from nanopage.outputs import CompletionOutput, RequestOutput
from nanopage.params import BeamSearchParams, PoolingParams, SamplingParams
from nanopage.server.adapters import AnyServed
from nanopage.server.errors import ApiError
from nanopage.server.formats import FIELD
from nanopage.server.protocol import OF_PARAMS, PoolingBody, SamplingBody
from nanopage.text.prompts import PromptTooLongError

logger = logging.getLogger("nanopage")

# Fields of a body with a beam search: those without effect on which completions are the best, and values besides the
# default that ask for nothing.
WITHOUT_EFFECT = ("seed", "skip_special_tokens", "stop_in_reasoning")
NEUTRAL = {"temperature": (0, 1), "top_k": (0, -1)}


class Generation:
    """Requests that are in the engine. `aclose` aborts those that have not finished. Args: body: what was asked for."""

    def __init__(self, llm: AsyncLLM, body: SamplingBody | PoolingBody):
        self.llm, self.body = llm, body
        self.streams: list[RequestStream] = []  # one for each prompt
        # Gives an error the endpoint's names of the fields, if they are not those of `body`.
        self.rename: Callable[[ApiError], ApiError] = lambda error: error
        # Called with the last output of each request that has ended, before it is read.
        self.on_finish: Callable[[RequestOutput], None] | None = None
        self.tokens = Counter(prompt_tokens=0, completion_tokens=0)  # of requests whose last output has been read

    async def aclose(self) -> None:
        for stream in self.streams:
            await stream.aclose()

    async def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(index of the prompt, output), as they come. Raises: ApiError if a request could not be completed;
        EngineDeadError."""
        if len(self.streams) == 1:
            async for output in self.streams[0]:
                yield 0, self._check(output)
            return
        news: asyncio.Queue[tuple[int, RequestOutput | EngineDeadError]] = asyncio.Queue(len(self.streams))
        readers = [asyncio.create_task(_read(i, stream, news)) for i, stream in enumerate(self.streams)]
        try:
            unfinished = len(readers)
            while unfinished:
                index, item = await news.get()
                if isinstance(item, EngineDeadError):
                    raise item
                unfinished -= item.finished
                yield index, self._check(item)
        finally:
            for reader in readers:
                reader.cancel()
            for reader in readers:
                with contextlib.suppress(asyncio.CancelledError):
                    await reader

    def _check(self, output: RequestOutput) -> RequestOutput:
        if output.finished:
            num_output = sum(len(completion.token_ids) for completion in output.outputs)
            self.tokens.update(prompt_tokens=len(output.prompt_token_ids), completion_tokens=num_output)
        if output.finished and self.on_finish is not None:
            self.on_finish(output)
        if output.error is not None:
            if self.llm.engine.dead_error is not None:
                raise EngineDeadError(output.error)
            if re.match(FIELD, output.error):  # the client's grammar, not the engine
                raise self.rename(self.body.invalid(ValueError(output.error)))
            logger.error(f"request {output.request_id} failed: {output.error}")
            message = f"the request could not be completed: the server's log has the reason, for {output.request_id}"
            raise ApiError(500, message, code="request_failed")
        return output

    async def final(self) -> list[RequestOutput]:
        """The last output of each request, in the order of the prompts. Raises as iterating."""
        outputs: list[RequestOutput | None] = [None] * len(self.streams)
        async for index, output in self:
            outputs[index] = output
        return [output for output in outputs if output is not None]


async def start(
    llm: AsyncLLM,
    prompts: Sequence[dict],
    params: SamplingParams | BeamSearchParams | PoolingParams,
    body: SamplingBody | PoolingBody,
    entered: Callable[[], None],
    adapter: AnyServed | None = None,
) -> Generation:
    """Put a request for each prompt into the engine. If one is refused, the others are aborted.

    Args:
        prompts: dicts as the engine takes them.
        entered: called after each request.
        adapter: the adapter of all prompts.

    Raises: ApiError, EngineDeadError.
    """
    name = uuid.uuid4().hex
    generation = Generation(llm, body)
    try:
        for index, prompt in enumerate(prompts):
            if body.cache_salt is not None:
                prompt = prompt | {"cache_salt": body.cache_salt}
            options: dict[str, Any] = {"priority": body.priority}
            if isinstance(adapter, PromptAdapterRequest):
                prompt = prompt | {"prompt_adapter_request": adapter}
            else:
                options["lora_request"] = adapter
            stream = await llm.add_request(f"{name}-{index}", prompt, params, **options)
            generation.streams.append(stream)
            entered()
    except BaseException as error:
        await generation.aclose()
        if isinstance(error, PromptTooLongError):
            raise too_long(llm, error, body.prompt_field) from None
        if isinstance(error, ValueError | TypeError):
            raise body.invalid(error) from None
        raise
    return generation


def too_long(llm: AsyncLLM, error: PromptTooLongError, param: str) -> ApiError:
    """The error that clients look for to shorten a prompt."""
    message = f"This model's maximum context length is {llm.engine.max_model_len} tokens: {error}"
    return ApiError(400, message, param=param, code="context_length_exceeded")


def prompt_room(llm: AsyncLLM, body: SamplingBody, max_tokens: int | None) -> int | None:
    """How many of a prompt's last tokens `truncate_prompt_tokens` keeps. None: all.

    Args: max_tokens: of the reply, for which -1 leaves room.
    Raises: ApiError for a number that is out of bounds.
    """
    count, longest = body.truncate_prompt_tokens, llm.engine.max_model_len
    if count is None:
        return None
    if count != -1 and not 1 <= count <= longest:
        message = f"truncate_prompt_tokens={count} must be -1, or in [1, {longest}]: the model takes {longest} tokens"
        raise ApiError(400, message, param="truncate_prompt_tokens")
    return count if count > 0 else longest - min(max_tokens or 1, longest - 1)


async def _read(index: int, stream: RequestStream, news: asyncio.Queue) -> None:
    try:
        async for output in stream:
            await news.put((index, output))
    except EngineDeadError as error:
        await news.put((index, error))


@dataclass(slots=True)
class Change:
    """What is new in one choice."""

    index: int  # of the choice: prompt * n + completion
    output: RequestOutput
    completion: CompletionOutput  # its `delta` is the text
    num_seen: int  # output tokens in earlier changes


async def changes(generation: Generation, n: int, copies: int) -> AsyncIterator[Change]:
    """The changes of all choices as they come. The last one of a choice has a `finish_reason`.

    Args:
        n: the number of completions of a prompt.
        copies: the number of choices that each completion stands for.
    """
    num_seen: defaultdict[int, int] = defaultdict(int)  # of each completion
    finished = set()
    async for prompt, output in generation:
        for completion in output.outputs:
            number = prompt * n + completion.index
            if number in finished or not (completion.delta or completion.finish_reason):
                continue
            for copy in range(copies):
                yield Change(number * copies + copy, output, completion, num_seen[number])
            num_seen[number] = len(completion.token_ids)
            if completion.finish_reason is not None:
                finished.add(number)


def usage(outputs: Iterable[RequestOutput], copies: int = 1, num_dropped: int = 0) -> dict:
    """The tokens of a call. A prompt counts once, whatever the number of its completions.

    Args: num_dropped: output tokens of each completion that the client did not ask for.
    """
    outputs = list(outputs)
    num_prompt = sum(len(output.prompt_token_ids) + len(output.encoder_prompt_token_ids or ()) for output in outputs)
    num_output = sum(len(c.token_ids) - num_dropped for output in outputs for c in output.outputs) * copies
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def read_search(body: SamplingBody, params: SamplingParams, max_model_len: int) -> BeamSearchParams | None:
    """The search that a body asks for. None: it asks for samples.

    Args: params: the body's.
    Raises: ApiError for a field that a search does not have, or that is out of range.
    """
    if not body.use_beam_search:
        if body.length_penalty != 1:
            raise ApiError(400, "length_penalty needs use_beam_search=true", param="length_penalty")
        return None
    plain = SamplingParams()
    for name in (*OF_PARAMS, "best_of", "logprobs", "prompt_logprobs", "stream"):
        value = getattr(body, name)
        is_plain = name in WITHOUT_EFFECT or value in (None, [], {}) or value is False
        if not (is_plain or value in NEUTRAL.get(name, ()) or value == getattr(plain, name, None)):
            raise ApiError(400, f"{name} and use_beam_search exclude each other", param=name)
    if params.structured_outputs is not None:
        message = "use_beam_search: completions with a form, or with calls that must follow a schema, are sampled"
        raise ApiError(400, message, param="use_beam_search")
    try:
        kept: dict = {"length_penalty": body.length_penalty, "skip_special_tokens": params.skip_special_tokens}
        return BeamSearchParams(body.n, max_tokens=params.max_tokens or max_model_len, **kept)
    except (ValueError, TypeError) as error:
        raise body.invalid(error) from None
