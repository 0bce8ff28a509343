"""POST /v1/completions."""

import base64
import binascii
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from nanopage.inputs import list_prompts
from nanopage.outputs import CompletionOutput, Logprob, RequestOutput
from nanopage.params import SamplingParams
from nanopage.server.errors import ApiError
from nanopage.server.generation import Generation, changes, prompt_room, read_search, start, too_long, usage
from nanopage.server.logprobs import TextOffsets, completion_logprobs, prompt_logprobs
from nanopage.server.protocol import DEFAULT_MAX_TOKENS, CompletionBody
from nanopage.server.state import ServerState
from nanopage.text.prompts import PromptTooLongError

if TYPE_CHECKING:
    from torch import Tensor

MAX_PROMPTS = 1024  # in one call
MAX_CHOICES = 4096  # prompts * n
# Special tokens around the text before and after a gap, in Qwen's and in StarCoder's tokenizers.
FILL_IN_THE_MIDDLE = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
)


@dataclass(frozen=True)
class EncodedEmbeds:
    """A prompt of `prompt_embeds` that is not decoded yet: base64 of a safetensors file with one tensor, never of a
    pickle. Its size is limited by that of a body (middleware.py)."""

    text: str
    hidden_size: int

    def __len__(self) -> int:
        """An estimate of its tokens: two bytes for each number."""
        return len(self.text) * 3 // 4 // (2 * self.hidden_size) + 1

    def decode(self) -> "Tensor":
        """The tensor, of any shape and dtype: the engine checks it. Raises: ValueError."""
        from safetensors.torch import load  # imports torch

        try:
            tensors = load(base64.b64decode(self.text, validate=True))
        except binascii.Error as error:
            raise ValueError(f"prompt_embeds is not base64: {error}") from None
        except (SafetensorError, KeyError, ValueError, RuntimeError) as error:  # KeyError: a dtype that torch lacks
            raise ValueError(f"prompt_embeds is not a safetensors file: {str(error)[:200]}") from None
        if len(tensors) != 1:
            raise ValueError(f"prompt_embeds has {len(tensors)} tensors: give one")
        return next(iter(tensors.values()))


class Completions:
    """One call: its choices as a reply or as chunks. Arguments and errors: as Chat."""

    def __init__(self, state: ServerState, body: CompletionBody):
        llm = state.require()
        body.check()
        for name in ("echo", "truncate_prompt_tokens"):
            if getattr(body, name) and body.suffix is not None:
                raise ApiError(400, f"{name} and suffix exclude each other", param="suffix")
            if getattr(body, name) and llm.engine.model_config.encoded_positions:
                message = f"{name}: the output of an encoder-decoder model does not go on from a prompt"
                raise ApiError(400, message, param=name)
        self.llm, self.body, self.model = llm, body, state.model_name(body.model)
        self.adapter = state.adapters.requests.get(self.model)
        self.id, self.created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        self.prompts = self._read_prompts()
        if len(self.prompts) * max(body.n, body.best_of or 1) > MAX_CHOICES:
            message = f"{len(self.prompts)} prompts, each n or best_of times, are more than {MAX_CHOICES}"
            raise ApiError(400, message, param="n")
        self.only_scores = body.echo and body.limit == 0
        if self.only_scores:  # the engine computes at least one token
            body = body.model_copy(update={"max_tokens": 1, "max_completion_tokens": None, "min_tokens": 0})
        default = llm.engine.default_sampling_params
        self.params: SamplingParams = body.sampling_params(default, DEFAULT_MAX_TOKENS, body.logprobs)
        if body.logprobs is not None:
            tokens = min(self.params.max_tokens or llm.engine.max_model_len, llm.engine.max_model_len)
            body.check_logprobs(body.n * len(self.prompts), tokens, body.logprobs)
        if body.echo and body.logprobs is not None:
            self.params.prompt_logprobs = max(body.logprobs, body.prompt_logprobs or 0)
            # An estimate for text: most tokens have several characters, and rare characters several tokens.
            prompt_tokens = sum(map(len, self.prompts))
            body.check_logprobs(body.n, prompt_tokens, body.logprobs)
        if body.prompt_logprobs is not None:
            body.check_logprobs(body.n, sum(map(len, self.prompts)), body.prompt_logprobs, "prompt_logprobs")
        self.search = read_search(body, self.params, llm.engine.max_model_len)
        self.num_computed = self.params.n if self.search is None else body.n  # completions of a prompt
        self.copies = body.n // self.num_computed
        self.offsets: dict[int, TextOffsets] = {}  # of each choice
        self.outputs: dict[int, RequestOutput] = {}  # each prompt's latest output

    def _read_prompts(self) -> list[str | list[int] | EncodedEmbeds]:
        body, embeds = self.body, self.body.prompt_embeds
        if embeds is None and body.prompt is not None:
            return [*read_prompts(body.prompt)]
        if embeds is None or body.prompt not in (None, ""):  # the OpenAI SDK always sends a prompt
            raise ApiError(400, "give either prompt or prompt_embeds", param="prompt")
        for name in ("echo", "suffix", "truncate_prompt_tokens"):
            if getattr(body, name):
                raise ApiError(400, f"{name} needs a prompt of text, not prompt_embeds", param=name)
        if "prompt_embeds" not in self.llm.engine.input_processor.prompts.item_readers:
            raise ApiError(400, "prompt_embeds needs --enable-prompt-embeds", param="prompt_embeds", code="not_enabled")
        if embeds == []:
            raise ApiError(400, "prompt_embeds is empty", param="prompt_embeds")
        size = self.llm.engine.model_config.hidden_size
        return [EncodedEmbeds(text, size) for text in ([embeds] if isinstance(embeds, str) else embeds)]

    async def start(self, entered: Callable[[], None]) -> Generation:
        """Put the prompts into the engine. Arguments and errors: as `generation.start`."""
        try:
            prompts = await self.llm.in_thread(lambda: [self._prompt(prompt) for prompt in self.prompts])
        except PromptTooLongError as error:
            raise too_long(self.llm, error, "prompt") from None
        except (ValueError, TypeError) as error:
            raise self.body.invalid(error) from None
        return await start(self.llm, prompts, self.search or self.params, self.body, entered, self.adapter)

    def reply(self, outputs: list[RequestOutput]) -> dict:
        """All choices. Takes long if there are many log-probabilities."""
        self.outputs = dict(enumerate(outputs))
        choices = []
        for prompt, output in self.outputs.items():
            for completion in output.outputs:
                first = (prompt * self.num_computed + completion.index) * self.copies
                text = self._echoed(output) + ("" if self.only_scores else completion.text)
                choice = self._choice(first, output, completion, text, 0) | self._ending(completion)
                choices += [choice | {"index": first + copy} for copy in range(self.copies)]
        return self._envelope(choices) | {"usage": self._usage()}

    async def chunks(self, generation: Generation) -> AsyncIterator[dict]:
        """The choices as they grow. A choice's first chunk has the prompt, if it is to be echoed."""
        begun = set()
        async for change in changes(generation, self.params.n, self.copies):
            prompt = change.index // self.body.n
            self.outputs[prompt] = change.output
            text = "" if self.only_scores else change.completion.delta
            if change.index not in begun:
                begun.add(change.index)
                text = self._echoed(change.output) + text
            choice = self._choice(change.index, change.output, change.completion, text, change.num_seen)
            if change.completion.finish_reason is not None:
                choice |= self._ending(change.completion)
            if text or choice["finish_reason"]:
                chunk = self._envelope([choice])
                if self.body.wants_usage:
                    chunk["usage"] = self._usage() if self.body.wants_usage_always else None
                yield chunk
        if self.body.wants_usage:
            yield self._envelope([]) | {"usage": self._usage()}

    def _prompt(self, prompt: str | list[int] | EncodedEmbeds) -> dict:
        """A prompt as the engine takes it, with its tokens or embeddings."""
        if isinstance(prompt, EncodedEmbeds):
            return {"prompt_embeds": prompt.decode()}
        reader, body = self.llm.engine.input_processor.prompts, self.body
        room = prompt_room(self.llm, body, self.params.max_tokens)
        if isinstance(prompt, list):
            if body.suffix is not None:
                raise ApiError(400, "suffix needs prompts of text", param="suffix")
            ids = prompt if room is None else prompt[-room:]
            if body.echo:  # its text is returned
                tokenizer = reader.require_tokenizer("echo", "echo=false")
                return {"prompt": tokenizer.decode(ids, skip_special_tokens=False), "prompt_token_ids": ids}
            return {"prompt_token_ids": ids}
        if room is None:
            text = prompt if body.suffix is None else self._with_gap(prompt, body.suffix)
            return {"prompt": prompt, "prompt_token_ids": reader.encode(text, body.add_special_tokens)}
        tokenizer = reader.check_text(prompt, truncated=True)
        ids = tokenizer.encode(prompt, body.add_special_tokens)
        if len(ids) > room:
            ids = tokenizer.encode_truncated(prompt, None, room, "left")[0] if body.add_special_tokens else ids[-room:]
            prompt = tokenizer.decode(ids)
        return {"prompt": prompt, "prompt_token_ids": ids}

    def _with_gap(self, prompt: str, suffix: str) -> str:
        tokenizer = self.llm.engine.input_processor.prompts.require_tokenizer("suffix", "a prompt of token ids")
        for before, after, gap in FILL_IN_THE_MIDDLE:
            if tokenizer.backend.token_to_id(gap) is not None:
                return before + prompt + after + suffix + gap
        raise ApiError(400, "suffix: the model's tokenizer has no tokens to fill in the middle", param="suffix")

    def _echoed(self, output: RequestOutput) -> str:
        return (output.prompt or "") if self.body.echo else ""

    def _choice(
        self, index: int, output: RequestOutput, completion: CompletionOutput, text: str, num_seen: int
    ) -> dict[str, Any]:
        logprobs, tokenizer = None, self.llm.engine.tokenizer
        if completion.logprobs is not None and self.body.logprobs is not None and tokenizer is not None:
            token_ids = completion.token_ids[num_seen:]
            tables: list[dict[int, Logprob] | None] = [*completion.logprobs[num_seen:]]
            if self.only_scores:
                token_ids, tables = [], []
            skipped = tokenizer.special_ids if self.params.skip_special_tokens else frozenset()
            echoes_ids = self.body.echo and isinstance(self.prompts[index // self.body.n], list)
            num_shown = len(output.prompt_token_ids) if echoes_ids else 0
            offsets = self.offsets.setdefault(index, TextOffsets(tokenizer, skipped, num_shown))
            if self.body.echo and output.prompt_logprobs is not None and num_seen == 0:
                token_ids, tables = output.prompt_token_ids + token_ids, output.prompt_logprobs + tables
            as_ids = self.body.return_tokens_as_token_ids
            logprobs = completion_logprobs(offsets, token_ids, tables, self.body.logprobs, as_ids)
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None, "stop_reason": None}
        if self.body.return_token_ids:
            choice["token_ids"] = [] if self.only_scores else completion.token_ids[num_seen:]
            if num_seen == 0:
                choice["prompt_token_ids"] = output.prompt_token_ids
        if (count := self.body.prompt_logprobs) is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_token_ids, output.prompt_logprobs or [], count)
        return choice

    def _ending(self, completion: CompletionOutput) -> dict:
        reason = "length" if self.only_scores else completion.finish_reason
        return {"finish_reason": reason, "stop_reason": None if self.only_scores else completion.stop_reason}

    def _usage(self) -> dict:
        return usage(self.outputs.values(), self.copies, num_dropped=int(self.only_scores))

    def _envelope(self, choices: list[dict]) -> dict:
        names = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}
        return names | {"system_fingerprint": self.llm.system_fingerprint, "choices": choices}


def read_prompts(prompt: str | list, field: str = "prompt") -> list[str | list[int]]:
    """The prompts in a field of a body, each a text or token ids. Raises: ApiError."""
    prompts: list = list_prompts(prompt)
    if not prompts:
        raise ApiError(400, f"{field} is empty", param=field)
    if len(prompts) > MAX_PROMPTS:
        raise ApiError(400, f"{field} has {len(prompts):,} prompts: at most {MAX_PROMPTS:,}", param=field)
    return prompts
