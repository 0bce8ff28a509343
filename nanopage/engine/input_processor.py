"""InputProcessor: turns what a user asks for into a Request to queue, or raises an error that names what is wrong."""

import dataclasses
import hashlib
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from nanopage.checks.options import Int64, check
from nanopage.config.model import ModelConfig
from nanopage.config.options import EngineConfig
from nanopage.engine.output_processor import Completion, Request
from nanopage.engine.sequence import Adapter, Sequence, SequenceGroup, TokenMask
from nanopage.files.model_files import exists, read_json, shown
from nanopage.inputs import LoRARequest, Prompt
from nanopage.outputs import EngineAsleepError
from nanopage.params import RECOMMENDED, BeamSearchParams, PoolingParams, SamplingParams, StructuredOutputsParams
from nanopage.state.layer_kinds import BlockNeeds
from nanopage.step import NUMBERS, Capacity, SamplingSettings
from nanopage.text.bad_words import bad_word_ids
from nanopage.text.detokenizer import IncrementalDetokenizer
from nanopage.text.prompts import PromptReader, PromptTooLongError, TokenizedPrompt
from nanopage.text.stop_strings import StopStrings
from nanopage.text.tokenizer import Tokenizer


class Grammar(Protocol):
    def make_mask(self, stop_token_ids, prompt_token_ids=..., reasoning=..., budget=...) -> TokenMask | None: ...


class Grammars(Protocol):
    """What the texts of outputs must be (grammar/structured.py)."""

    def compile(self, params: StructuredOutputsParams | None) -> Grammar: ...
    def has_compiled(self, params: StructuredOutputsParams) -> bool: ...


class Adapters(Protocol):
    """The adapters that requests name (adapters/requests.py)."""

    def check(self, request: LoRARequest) -> Adapter: ...
    def salt(self, adapter: Adapter | None, salt: str) -> str: ...
    def forget(self, adapter_id: int) -> None: ...


class Pooling(Protocol):
    """Requests for vectors (pooling/requests.py)."""

    def make_request(self, request_id: str, prompt: Prompt, params: object, priority: int) -> Request: ...


class InputProcessor:
    """Makes an engine's requests.

    grammars, adapters, pooling: what build.py attaches to an engine that has structured output, adapters, or a model
        that makes vectors instead of text. make_search, add_processors: for beam searches and logits processors.

    Args:
        path: the model's, for messages.
        tokenizer: None if the model has none.
        capacity: what the workers hold.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        path: Path,
        tokenizer: Tokenizer | None,
        capacity: Capacity,
    ):
        self.config, self.model_config, self.tokenizer = config, model_config, tokenizer
        self.max_model_len, self.num_blocks = capacity.max_model_len, capacity.num_blocks
        self.needs = BlockNeeds(capacity.windows, config.block_size, config.token_budget(capacity.device))
        self.prompts = PromptReader(tokenizer, path, model_config.vocab_size, capacity.max_model_len)
        self.grammars: Grammars | None = None
        self.adapters: Adapters | None = None
        self.pooling: Pooling | None = None
        self.make_search: Callable[..., Request] | None = None
        self.add_processors: Callable[[Request], Request] = lambda request: request
        self.seq_ids = itertools.count()
        self.closed: str | None = None  # why no request is taken now, such as that the engine sleeps
        self._seeds = random.Random(config.seed)

    def make_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | PoolingParams | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> Request:
        """The request, not queued yet. Raises as LLMEngine.add_request."""
        self.check_open()
        if not isinstance(request_id, str) or not request_id:
            raise TypeError(f"request_id must be a non-empty string, not {shown(request_id)}")
        check("priority", priority, Int64)
        if priority and self.config.scheduling_policy != "priority":
            raise ValueError(f"priority={priority} needs scheduling_policy='priority'")
        params = SamplingParams() if params is None else params
        if self.pooling is not None or isinstance(params, PoolingParams):
            return self._pooling_request(request_id, prompt, params, priority, lora_request)
        if not isinstance(params, SamplingParams | BeamSearchParams):
            raise TypeError(f"sampling_params must be SamplingParams or BeamSearchParams, not {shown(params)}")
        params = dataclasses.replace(params)  # a copy, checked again: the caller may change the original
        adapter = self._check_adapter(lora_request)
        read = self.prompts.read(prompt)
        if self.adapters is not None:
            read.cache_salt = self.adapters.salt(adapter, read.cache_salt)
        if len(read.token_ids) >= self.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {len(read.token_ids)} tokens and leaves no room for output in "
                f"max_model_len={self.max_model_len}"
            )
        if isinstance(params, SamplingParams):
            return self.add_processors(self._sampling_request(request_id, read, params, priority, adapter))
        assert self.make_search is not None
        return self.make_search(self, request_id, read, params, priority, adapter)

    def check_open(self) -> None:
        """Raises: EngineAsleepError while no request is taken."""
        if self.closed is not None:
            raise EngineAsleepError(self.closed)

    def _sampling_request(
        self, request_id: str, prompt: TokenizedPrompt, params: SamplingParams, priority: int, adapter: Adapter | None
    ) -> Request:
        token_ids, reasoning = prompt.token_ids, prompt.reasoning
        name, count = "n" if params.best_of is None else "best_of", params.num_sequences
        self.check_size(name, count, len(token_ids), params.max_tokens)
        if params.prompt_logprobs is not None and any(item.kind in ("embeds", "prefix") for item in prompt.items):
            raise ValueError("prompt_logprobs does not work with embeddings in the prompt: they are no tokens")
        settings = self._settings(params, self._check_tokens(params))
        budget = None if params.thinking_token_budget == -1 else params.thinking_token_budget
        is_free = budget is None and params.structured_outputs is None
        grammar = None if is_free else self.compile_grammar(params.structured_outputs)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        eos, stops = self.model_config.eos_token_ids, params.stop_token_ids or ()
        limit = self.max_model_len if params.max_tokens is None else len(token_ids) + params.max_tokens
        seqs = [
            Sequence(
                next(self.seq_ids),
                token_ids,
                settings,
                seed=seed if index == 0 else branch_seed(seed, index),
                eos_token_ids=frozenset() if params.ignore_eos else eos,
                stop_token_ids=frozenset(stops),
                max_total_tokens=min(limit, self.max_model_len),
                num_logprobs=params.logprobs,
                cache_salt=prompt.cache_salt,
                token_mask=None if grammar is None else grammar.make_mask(stops, token_ids, reasoning, budget),
            )
            for index in range(count)
        ]
        group = SequenceGroup(request_id, seqs, priority, None, params.ranks, adapter, prompt.items, prompt.keys)
        detokenizers: list[IncrementalDetokenizer | None] = [None] * count
        if params.detokenize and self.tokenizer is not None:
            stop_strings = StopStrings(list(params.stop)) if params.stop else None
            searched = None if params.stop_in_reasoning else reasoning
            options = stop_strings, params.skip_special_tokens, params.include_stop_str_in_output, searched
            detokenizers = [IncrementalDetokenizer(self.tokenizer, token_ids, *options) for _ in seqs]
        completions = [Completion(seq, detokenizer) for seq, detokenizer in zip(seqs, detokenizers, strict=True)]
        return Request(group, params, prompt.text, token_ids, completions, encoder=prompt.encoder)

    def _check_adapter(self, request: LoRARequest | None) -> Adapter | None:
        if request is None:
            return None
        if not isinstance(request, LoRARequest):
            raise TypeError(f"lora_request must be a LoRARequest or None, not {request!r}")
        if self.adapters is None:
            raise ValueError("lora_request needs enable_lora=True")
        return self.adapters.check(request)

    def _pooling_request(
        self, request_id: str, prompt: Prompt, params: object, priority: int, lora_request: LoRARequest | None
    ) -> Request:
        if self.pooling is None:
            raise ValueError(
                f"the model {self.prompts.path.name} makes text: embeddings and scores need a model made for them, or "
                "runner='pooling'"
            )
        if isinstance(params, PoolingParams):
            params = dataclasses.replace(params)
            if lora_request is not None:
                raise ValueError("lora_request is not supported with embeddings and scores")
        return self.pooling.make_request(request_id, prompt, params, priority)

    def _settings(self, params: SamplingParams, bad_words: list[list[int]]) -> SamplingSettings:
        """The parameters as the worker needs them, in plain numbers of at most 64 bits."""
        ends = self.model_config.eos_token_ids | set(params.stop_token_ids or ())
        numbers: dict[str, Any] = {name: float(getattr(params, name)) for name in NUMBERS}
        return SamplingSettings(
            **numbers,
            top_k=min(params.top_k, self.model_config.vocab_size),
            dry_breaker_ids=self._breakers(params.dry_sequence_breakers or []) if params.dry_multiplier else [],
            logit_bias={token_id: float(bias) for token_id, bias in (params.logit_bias or {}).items()},
            allowed_token_ids=list(dict.fromkeys(params.allowed_token_ids)) if params.allowed_token_ids else None,
            bad_words_token_ids=bad_words,
            min_tokens=min(params.min_tokens, self.max_model_len),
            ending_token_ids=sorted(ends),
            logprobs=0 if params.logprobs is None and params.ranks else params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
        )

    def compile_grammar(self, structured_outputs: StructuredOutputsParams | None) -> Grammar:
        """What the text of an output must be. Raises: ValueError as `Grammars.compile`, or without a tokenizer."""
        name = "structured_outputs" if structured_outputs else "thinking_token_budget"
        self.prompts.require_tokenizer(name, "allowed_token_ids")
        assert self.grammars is not None
        return self.grammars.compile(structured_outputs)

    def has_to_compile(self, structured_outputs: StructuredOutputsParams) -> bool:
        """Whether `compile_grammar` may take seconds."""
        if self.grammars is None or not isinstance(structured_outputs, StructuredOutputsParams):
            return False
        return not self.grammars.has_compiled(structured_outputs)

    def check_size(self, name: str, count: int, num_prompt_tokens: int, max_tokens: int | None) -> None:
        """Refuse a request whose `count` completions could never run together."""
        if count > self.config.max_num_seqs:
            raise ValueError(f"{name}={count} is more than max_num_seqs={self.config.max_num_seqs}")
        longest = min(num_prompt_tokens + (max_tokens or self.max_model_len), self.max_model_len)
        blocks = self.needs.of([longest] * count, num_prompt_tokens if count > 1 else 0)
        if blocks > self.num_blocks:
            raise ValueError(
                f"{name}={count} completions of {longest} tokens need {blocks} blocks, the KV cache has "
                f"{self.num_blocks}: lower {name} or max_tokens, or raise kv_cache_gib"
            )

    def _check_tokens(self, params: SamplingParams) -> list[list[int]]:
        """Check the token ids in `params`. Returns the ids of its bad_words."""
        self.prompts.check_ids("stop_token_ids", params.stop_token_ids)
        self.prompts.check_ids("logit_bias", params.logit_bias or ())
        self.prompts.check_ids("allowed_token_ids", params.allowed_token_ids or ())
        if params.stop:
            self.prompts.require_tokenizer("stop", "stop_token_ids")
        bad_words = []
        if params.bad_words:
            tokenizer = self.prompts.require_tokenizer("bad_words", "allowed_token_ids or logit_bias")
            bad_words = bad_word_ids(tokenizer, params.bad_words, params.num_sequences)
        if params.allowed_token_ids is not None:
            never = {ids[0] for ids in bad_words if len(ids) == 1}
            ends = self.model_config.eos_token_ids | set(params.stop_token_ids or ())
            never |= ends if params.min_tokens else set()
            if never.issuperset(params.allowed_token_ids):
                raise ValueError("allowed_token_ids: bad_words and min_tokens forbid every one of them")
        return bad_words

    def _breakers(self, texts: list[str]) -> list[int]:
        """The tokens that contain one of these texts, and the last token of each text that no token contains."""
        if not texts:
            return []
        tokenizer = self.prompts.require_tokenizer("dry_multiplier", "dry_sequence_breakers=[]")
        for text in texts:
            self.prompts.check_text(text)
        return [token_id for token_id in tokenizer.containing(tuple(texts)) if token_id < self.model_config.vocab_size]


def default_sampling_params(path: Path) -> SamplingParams:
    """The parameters that generation_config.json of a model's directory recommends; without one, SamplingParams().

    Raises: ValueError naming the file and the field.
    """
    file = path / "generation_config.json"
    if not path.is_dir() or not exists(file):
        return SamplingParams()
    config, params = read_json(file), SamplingParams()
    for name in RECOMMENDED:
        if config.get(name) is not None:
            try:
                params = dataclasses.replace(params, **{name: config[name]})
            except (TypeError, ValueError, RecursionError) as error:  # RecursionError: a deeply nested value's repr
                raise ValueError(f"{file}: {name} is not valid: {str(error)[:200]}") from None
    return params


def branch_seed(seed: int, index: int) -> int:
    """The seed of completion `index` of a request: 63 bits, independent of the other completions' seeds."""
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
