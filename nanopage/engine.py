"""LLMEngine: requests in, outputs out, one step at a time."""

import dataclasses
import itertools
import logging
import random
import time

from nanopage import hub, loader
from nanopage.block_manager import BlockManager
from nanopage.config import EngineConfig
from nanopage.kv_cache import GIB, KVCache, block_bytes, num_blocks_that_fit
from nanopage.model_runner import ModelRunner, resolve_device, resolve_dtype
from nanopage.request import CompletionOutput, Logprob, RequestOutput, SamplingParams, Sequence
from nanopage.scheduler import Scheduler
from nanopage.tokenizer import IncrementalDetokenizer, Tokenizer

logger = logging.getLogger("nanopage")

Prompt = str | list[int] | dict
"""Text, token ids, or a dict with "prompt" or "prompt_token_ids", and optionally "cache_salt" (vLLM's forms)."""


@dataclasses.dataclass(slots=True)
class Request:
    """What the engine keeps of a request beside its sequence, to make its outputs."""

    seq: Sequence
    prompt: str | None
    prompt_token_ids: list[int]
    detokenizer: IncrementalDetokenizer | None
    logprobs: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


class LLMEngine:
    """A model, its scheduler and its runner.

        engine = LLMEngine(EngineConfig())
        engine.add_request("a", "Once upon a time", SamplingParams())
        while engine.has_unfinished_requests():
            for output in engine.step():
                ...

    Raises:
        FileNotFoundError, ValueError: a model that is not there, is broken or is not supported.
        MemoryError: no room for its KV cache.
    """

    def __init__(self, config: EngineConfig):
        self.config = config
        self.model_path = path = hub.resolve(None if config.model is None else str(config.model))
        self.device = resolve_device(config.device)
        self.model_config = loader.read_config(path)
        limit = self.model_config.max_position_embeddings
        if config.max_model_len is not None and config.max_model_len > limit:
            raise ValueError(f"max_model_len={config.max_model_len} is more than the model's {limit} positions")
        self.dtype, why = resolve_dtype(config.dtype, self.model_config.dtype, self.device)
        if why:
            logger.info(why)
        self.tokenizer = Tokenizer(path)
        model = loader.load_model(path, self.model_config, self.dtype, self.device)
        longest = config.max_model_len or limit
        num_blocks = num_blocks_that_fit(config, self.model_config, longest, self.dtype, self.device)
        self.max_model_len = self._fit_length(longest, num_blocks * config.block_size)
        self.kv_cache = KVCache(self.model_config, num_blocks, config.block_size, self.dtype, self.device)
        self.runner = ModelRunner(model, self.kv_cache, self.device, compiled=not config.enforce_eager)
        block_manager = BlockManager(num_blocks, config.block_size, config.enable_prefix_caching)
        self.scheduler = Scheduler(block_manager, config.max_num_seqs, config.max_num_batched_tokens)
        self._requests: dict[str, Request] = {}
        self._seq_ids = itertools.count()
        self._seeds = random.Random(config.seed)
        tokens = num_blocks * config.block_size
        gib = num_blocks * block_bytes(self.model_config, config.block_size, self.dtype) / GIB
        logger.info(
            f"{path.name} in {str(self.dtype).removeprefix('torch.')} on {self.device.type}; KV cache {gib:.2f} GiB = "
            f"{tokens:,} tokens = {tokens / self.max_model_len:.1f} requests of {self.max_model_len:,} tokens"
        )

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams | None = None) -> None:
        """Queue a request; `step` will report on it under `request_id`.

        Args:
            prompt: text, token ids, or a dict (see `Prompt`).
            params: default SamplingParams().

        Raises:
            ValueError, TypeError: an id that is in use, an empty prompt, one that leaves no room for output, a token
                id outside the vocabulary, by name. Nothing is queued then.
        """
        self.submit(self.make_request(request_id, prompt, params))

    def make_request(self, request_id: str, prompt: Prompt, params: SamplingParams | None = None) -> Request:
        """Check everything about a request without queueing it. Raises as `add_request`."""
        if not isinstance(request_id, str) or not request_id:
            raise TypeError(f"request_id must be a string, not {request_id!r}")
        if request_id in self._requests:
            raise ValueError(f"request_id {request_id!r} is in use")
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, not {params!r}")
        params = dataclasses.replace(params)  # a copy, checked again: the caller's may have been changed, or will be
        text, token_ids, cache_salt = self._read_prompt(prompt)
        if len(token_ids) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens and leaves no room for output in "
                f"max_model_len={self.max_model_len}"
            )
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", params.logit_bias or ())
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        bad_words = self._bad_words(params.bad_words or [])
        eos = self.model_config.eos_token_ids
        if params.allowed_token_ids is not None:
            never = {ids[0] for ids in bad_words if len(ids) == 1}
            never |= (eos | set(params.stop_token_ids or ())) if params.min_tokens else set()
            if never.issuperset(params.allowed_token_ids):
                raise ValueError("allowed_token_ids: bad_words and min_tokens forbid every one of them")
        seq = Sequence(
            next(self._seq_ids),
            request_id,
            token_ids,
            params,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            eos_token_ids=eos,
            max_total_tokens=self.max_model_len,
            cache_salt=cache_salt,
            bad_words_token_ids=bad_words,
        )
        detokenizer = None
        if params.detokenize:
            detokenizer = IncrementalDetokenizer(
                self.tokenizer,
                token_ids,
                list(params.stop or ()),
                params.skip_special_tokens,
                params.include_stop_str_in_output,
            )
        return Request(seq, text, token_ids, detokenizer)

    def submit(self, request: Request) -> None:
        """Queue what `make_request` made. Raises ValueError if its id has come into use meanwhile."""
        seq = request.seq
        if seq.request_id in self._requests:
            raise ValueError(f"request_id {seq.request_id!r} is in use")
        seq.metrics.arrival_time = time.perf_counter()
        self._requests[seq.request_id] = request
        self.scheduler.add(seq)

    def step(self) -> list[RequestOutput]:
        """Run one batch. Returns an output for each request that got a token, finished or not."""
        batch = self.scheduler.schedule()
        sampled = self.runner.execute(batch)
        self.scheduler.update(batch, sampled)
        return [self._advance(s.seq) for s in batch.sequences if s.samples]

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now and free its blocks. Returns what it has so far; None if there is no such request
        (it may just have finished)."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self.scheduler.finish(request.seq, "abort")
        return self._output(request)

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished()

    def _advance(self, seq: Sequence) -> RequestOutput:
        """Turn a sequence's new token into text, and end it if that completes a stop string."""
        request = self._requests[seq.request_id]
        if seq.logprobs:
            request.logprobs.append(self._decoded(seq.logprobs[-1]))
        params = seq.params
        if request.detokenizer is not None:
            ended_by_token = seq.finish_reason == "stop"
            if not ended_by_token or params.include_stop_str_in_output:
                searching = seq.num_output_tokens >= params.min_tokens and not ended_by_token
                stop = request.detokenizer.add(seq.token_ids[-1:], searching)
                if stop is not None and seq.finished:  # it also was the last token allowed
                    seq.finish_reason, seq.stop_reason = "stop", stop
                elif stop is not None:
                    self.scheduler.finish(seq, "stop", stop)
        return self._output(request)

    def _output(self, request: Request) -> RequestOutput:
        seq = request.seq
        completion = CompletionOutput(0, "", seq.output_token_ids, None, None, seq.finish_reason, seq.stop_reason)
        if request.detokenizer is not None:
            if seq.finished:
                request.detokenizer.finish()
            completion.delta = request.detokenizer.take(seq.finished)
            completion.text = request.detokenizer.taken
        if seq.params.logprobs is not None:
            completion.logprobs = list(request.logprobs)
            completion.cumulative_logprob = seq.cumulative_logprob
        if seq.params.prompt_logprobs is not None and request.prompt_logprobs is None and seq.num_output_tokens:
            request.prompt_logprobs = [None, *map(self._decoded, seq.prompt_logprobs)]
        if seq.finished:
            del self._requests[seq.request_id]
        return RequestOutput(
            seq.request_id,
            request.prompt,
            request.prompt_token_ids,
            [completion],
            seq.finished,
            seq.metrics,
            seq.num_cached_tokens,
            request.prompt_logprobs,
        )

    def _decoded(self, table: dict[int, tuple[float, int]]) -> dict[int, Logprob]:
        return {
            token_id: Logprob(logprob, rank, self.tokenizer.decode([token_id], skip_special_tokens=False))
            for token_id, (logprob, rank) in table.items()
        }

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int], str]:
        """(text or None, token ids, cache salt) of any form of prompt."""
        text, token_ids, salt = None, None, ""
        if isinstance(prompt, dict):
            if unknown := prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"}:
                raise ValueError(
                    f"the prompt has fields that are not supported: {', '.join(sorted(map(str, unknown)))}"
                )
            text, token_ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt") or ""
            if (text is None) == (token_ids is None):
                raise ValueError("a prompt dict has either 'prompt' or 'prompt_token_ids'")
            if not isinstance(salt, str):
                raise TypeError(f"cache_salt must be a string, not {salt!r}")
        elif isinstance(prompt, str):
            text = prompt
        else:
            token_ids = prompt
        if token_ids is None:
            if not isinstance(text, str):
                raise TypeError(f"a prompt must be a string, token ids or a dict, not {text!r}")
            token_ids = self.tokenizer.encode(text)
        elif not isinstance(token_ids, list):
            raise TypeError(f"a prompt must be a string, token ids or a dict, not {token_ids!r}")
        if not token_ids:
            raise ValueError("the prompt is empty")
        self._check_ids("prompt_token_ids", token_ids)
        return text, list(token_ids), salt

    def _check_ids(self, name: str, token_ids) -> None:
        vocab_size = self.model_config.vocab_size
        for token_id in token_ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise TypeError(f"{name} must be integers, not {token_id!r}")
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"{name}: {token_id} is not in the vocabulary of {vocab_size} tokens")

    def _bad_words(self, words: list[str]) -> list[list[int]]:
        """Each word's token ids at the beginning of a text and after a space, as in vLLM."""
        sequences = []
        for word in words:
            word = word.lstrip() or word  # white space alone is a word, too
            plain = self.tokenizer.encode(word, add_special_tokens=False)
            spaced = self.tokenizer.encode(" " + word, add_special_tokens=False)
            if not plain:
                raise ValueError(f"bad_words: {word!r} has no tokens")
            sequences.append(plain)
            # "▁word" is its own token; where the space is a token apart, banning the plain form is enough.
            if spaced[0] != plain[0] and len(spaced) == len(plain):
                sequences.append(spaced)
        return sequences

    def _fit_length(self, longest: int, pool: int) -> int:
        """The max_model_len to use with a pool of that many tokens, so that any accepted request fits it alone."""
        if longest <= pool:
            return longest
        if self.config.max_model_len is not None:
            raise MemoryError(
                f"the KV cache holds {pool:,} tokens, less than one request of max_model_len={longest:,}: "
                "raise kv_cache_gib or gpu_memory_utilization, or lower max_model_len"
            )
        logger.info(f"max_model_len is {pool:,}, what the KV cache holds, not the model's {longest:,}")
        return pool
