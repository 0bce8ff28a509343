"""InputProcessor: what a user asks for as a Request that can be queued, or an error that names what is wrong."""

import dataclasses
import hashlib
import itertools
import random
import re
from pathlib import Path
from typing import cast

from nanopage.adapters.requests import Adapters
from nanopage.config.encoder import EncoderConfig
from nanopage.config.model import ModelConfig
from nanopage.config.options import EngineConfig
from nanopage.engine.beam_search import BeamSearch
from nanopage.engine.output_processor import Completion, Request
from nanopage.engine.sequence import Adapter, Sequence, SequenceGroup
from nanopage.files.model_files import exists, read_json, shown
from nanopage.grammar.structured import CompiledGrammar, Grammars
from nanopage.inputs import LoRARequest, Prompt
from nanopage.params import (
    MAX_INTEGER,
    RECOMMENDED,
    BeamSearchParams,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
    check_integer,
)
from nanopage.state.layer_kinds import BlockNeeds
from nanopage.step import SamplingSettings
from nanopage.text.bad_words import bad_word_ids
from nanopage.text.detokenizer import IncrementalDetokenizer
from nanopage.text.stop_strings import StopStrings
from nanopage.text.tokenizer import Tokenizer

MAX_SALT = 1024  # characters


class PromptTooLongError(ValueError):
    """A prompt that leaves no room for output in max_model_len."""


class InputProcessor:
    """Makes an engine's requests.

    Args:
        path: the model's, for messages.
        tokenizer: None if the model has none: requests are then of token ids, and text is refused.
        max_model_len: the most tokens that a sequence may have.
        num_blocks: of the KV cache.
        needs: how many of them sequences take. None: the model is an encoder, which has no KV cache.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig | EncoderConfig,
        path: Path,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        num_blocks: int,
        needs: BlockNeeds | None = None,
    ):
        self.config, self.model_config, self.path, self.tokenizer = config, model_config, path, tokenizer
        self.max_model_len, self.num_blocks, self.needs = max_model_len, num_blocks, needs
        self._seq_ids = itertools.count()
        self._seeds = random.Random(config.seed)
        self.adapters = Adapters(config, cast(ModelConfig, model_config))  # refused for an encoder
        self._grammars: Grammars | None = None
        if tokenizer is not None:
            self._grammars = Grammars(tokenizer, model_config.vocab_size, model_config.eos_token_ids)

    def make_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | PoolingParams | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> Request:
        """The request, not queued yet. Raises as LLMEngine.add_request."""
        if not isinstance(request_id, str) or not request_id:
            raise TypeError(f"request_id must be a non-empty string, not {shown(request_id)}")
        check_integer("priority", priority, -MAX_INTEGER - 1)
        if priority and self.config.scheduling_policy != "priority":
            raise ValueError(f"priority={priority} needs scheduling_policy='priority'")
        params = SamplingParams() if params is None else params
        if isinstance(params, PoolingParams):
            return self._pooling_request(request_id, prompt, dataclasses.replace(params), priority, lora_request)
        if (pooling := self.model_config.pooling) is not None:
            makes = "embeddings" if pooling.task == "embed" else "scores of classes"
            raise ValueError(f"the model {self.path.name} runs with runner='pooling': it makes {makes}, not text")
        if not isinstance(params, SamplingParams | BeamSearchParams):
            raise TypeError(f"sampling_params must be SamplingParams or BeamSearchParams, not {shown(params)}")
        params = dataclasses.replace(params)  # a copy, checked again: the caller may change the original
        adapter = None if lora_request is None else self.adapters.check(lora_request)
        text, token_ids, cache_salt = self._read_prompt(prompt)
        reasoning: bool | None = prompt.get("reasoning") if isinstance(prompt, dict) else None
        cache_salt = self.adapters.salt(adapter, cache_salt)
        max_output = self.max_model_len - len(token_ids)
        if max_output < 1:
            raise PromptTooLongError(
                f"the prompt has {len(token_ids)} tokens and leaves no room for output in "
                f"max_model_len={self.max_model_len}"
            )
        if isinstance(params, BeamSearchParams):
            return self._search_request(request_id, text, token_ids, cache_salt, params, max_output, priority, adapter)
        name, count = "n" if params.best_of is None else "best_of", params.num_sequences
        self._check_size(name, count, len(token_ids), params.max_tokens)
        settings = self._settings(params, self._check_tokens(params))
        grammar = None if params.structured_outputs is None else self.compile_grammar(params.structured_outputs)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        eos, stops = self.model_config.eos_token_ids, params.stop_token_ids or ()
        limit = self.max_model_len if params.max_tokens is None else len(token_ids) + params.max_tokens
        seqs = [
            Sequence(
                next(self._seq_ids),
                token_ids,
                settings,
                seed=seed if index == 0 else branch_seed(seed, index),
                eos_token_ids=frozenset() if params.ignore_eos else eos,
                stop_token_ids=frozenset(stops),
                max_total_tokens=min(limit, self.max_model_len),
                num_logprobs=params.logprobs,
                cache_salt=cache_salt,
                token_mask=None if grammar is None else grammar.make_mask(stops, token_ids, reasoning),
            )
            for index in range(count)
        ]
        group = SequenceGroup(request_id, seqs, priority, ranks=params.ranks, adapter=adapter)
        detokenizers: list[IncrementalDetokenizer | None] = [None] * count
        if params.detokenize and self.tokenizer is not None:
            stop_strings = StopStrings(list(params.stop)) if params.stop else None
            searched = None if params.stop_in_reasoning else reasoning
            options = stop_strings, params.skip_special_tokens, params.include_stop_str_in_output, searched
            detokenizers = [IncrementalDetokenizer(self.tokenizer, token_ids, *options) for _ in seqs]
        completions = [Completion(seq, detokenizer) for seq, detokenizer in zip(seqs, detokenizers, strict=True)]
        return Request(group, params, text, token_ids, completions)

    def _search_request(
        self,
        request_id: str,
        text: str | None,
        token_ids: list[int],
        cache_salt: str,
        params: BeamSearchParams,
        max_output: int,
        priority: int,
        adapter: Adapter | None,
    ) -> Request:
        max_tokens = min(params.max_tokens, max_output)
        eos = self.model_config.eos_token_ids
        search = BeamSearch(params.width, max_tokens, params.length_penalty, params.early_stopping, eos)
        self._check_size("width", params.width, len(token_ids), max_tokens)
        settings = SamplingSettings(temperature=0, logprobs=search.num_candidates)
        limit = len(token_ids) + max_tokens
        seqs = [
            Sequence(next(self._seq_ids), token_ids, settings, max_total_tokens=limit, cache_salt=cache_salt)
            for _ in range(params.width)
        ]
        group = SequenceGroup(request_id, seqs, priority, search, adapter=adapter)
        return Request(group, params, text, token_ids, [])

    def _pooling_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: PoolingParams,
        priority: int,
        lora_request: LoRARequest | None,
    ) -> Request:
        """A request for a vector. `prompt` may also be {"prompt": text, "text_pair": text}: a pair to score."""
        pooling, config = self.model_config.pooling, self.model_config
        if pooling is None:
            raise ValueError(
                f"the model {self.path.name} makes text: embeddings and scores need a model made for them, or "
                "runner='pooling'"
            )
        if lora_request is not None:
            raise ValueError("lora_request is not supported with embeddings and scores")
        pooling.check(params, config.hidden_size)
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        fields = dict(prompt) if isinstance(prompt, dict) else {"prompt_token_ids": prompt}
        pair, text, types = fields.pop("text_pair", None), fields.get("prompt"), None
        if pair is not None:
            if not pooling.scores:
                raise ValueError(f"the model {self.path.name} does not score pairs of texts")
            for each in (text, pair):
                if not isinstance(each, str):
                    raise TypeError(f"each text of a pair must be a string, not {shown(each)}")
            fields["prompt_token_ids"], types = self._encode_pair(cast(str, text), cast(str, pair), params)
        elif isinstance(text, str) and fields.get("prompt_token_ids") is None:
            fields["prompt"] = text = pooling.prompt_for(params.prompt_name) + text
            fields["prompt_token_ids"], types = self._encode_truncated(text, None, params)
        elif params.prompt_name is not None:
            raise ValueError("prompt_name is for prompts of text")
        text, token_ids, salt = self._read_prompt(fields)
        if types is None and pair is None:  # the ids may be the client's
            token_ids = token_ids[: self._most_tokens(params)]
        if len(token_ids) > self.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {len(token_ids)} tokens, more than max_model_len={self.max_model_len}: give "
                "truncate_prompt_tokens=-1 to keep the first ones"
            )
        blocks = 0 if self.needs is None else self.needs.of([len(token_ids)])
        if blocks > self.num_blocks:
            raise ValueError(
                f"the prompt of {len(token_ids)} tokens needs {blocks} blocks, the KV cache has {self.num_blocks}: "
                "raise kv_cache_gib"
            )
        settings = SamplingSettings(temperature=0, pooling_type=pooling.pooling_type)
        limit = len(token_ids) + 1
        seq = Sequence(next(self._seq_ids), token_ids, settings, max_total_tokens=limit, cache_salt=salt)
        group = SequenceGroup(request_id, [seq], priority)
        return Request(group, params, text, token_ids, [], token_types=types)

    def _most_tokens(self, params: PoolingParams) -> int | None:
        """How many tokens of a longer text are kept; None: all."""
        most = params.truncate_prompt_tokens
        if most is not None and most > self.max_model_len:
            raise ValueError(f"truncate_prompt_tokens={most} is more than max_model_len={self.max_model_len}")
        return self.max_model_len if most == -1 else most

    def _encode_pair(self, first: str, second: str, params: PoolingParams) -> tuple[list[int], list[int] | None]:
        """The tokens of a pair, and which text each belongs to (None: the model does not say)."""
        pooling = self.model_config.pooling
        assert pooling is not None
        if isinstance(self.model_config, EncoderConfig):
            return self._encode_truncated(first, second, params)
        if pooling.template is None:
            return self._encode_truncated(first + second, None, params)[0], None
        before, pair, behind = pooling.template
        head, tail = (self.encode(text, add_special_tokens=False) for text in (before, behind))
        tokenizer, most = (
            self.require_tokenizer("a pair of texts", "a model with a tokenizer"),
            self._most_tokens(params),
        )
        for text in (first, second):
            self._check_text(text, tokenizer, most is not None)
        ids = tokenizer.encode(pair.format(first, second), add_special_tokens=False)
        if most is not None:  # what is behind the pair stays
            if (room := most - len(head) - len(tail)) < 1:
                raise ValueError(f"truncate_prompt_tokens={most} leaves no room beside the prompt around the pair")
            ids = ids[:room]
        return head + ids + tail, None

    def _encode_truncated(
        self, text: str, pair: str | None, params: PoolingParams
    ) -> tuple[list[int], list[int] | None]:
        """The tokens of a text or a pair, truncated, with special tokens, and the tokens' types."""
        tokenizer = self.require_tokenizer("a prompt of text", "prompt_token_ids")
        most = self._most_tokens(params)
        for each in (text,) if pair is None else (text, pair):
            self._check_text(each, tokenizer, most is not None)
        ids, types = tokenizer.encode_truncated(text, pair, most)
        one_type = isinstance(self.model_config, ModelConfig) or self.model_config.type_vocab_size == 1
        return ids, None if one_type else types

    def _settings(self, params: SamplingParams, bad_words: list[list[int]]) -> SamplingSettings:
        """The parameters as the worker needs them, in plain numbers of at most 64 bits."""
        ends = self.model_config.eos_token_ids | set(params.stop_token_ids or ())
        return SamplingSettings(
            temperature=float(params.temperature),
            top_p=float(params.top_p),
            top_k=min(params.top_k, self.model_config.vocab_size),
            min_p=float(params.min_p),
            repetition_penalty=float(params.repetition_penalty),
            presence_penalty=float(params.presence_penalty),
            frequency_penalty=float(params.frequency_penalty),
            dry_multiplier=float(params.dry_multiplier),
            dry_base=float(params.dry_base),
            dry_allowed_length=params.dry_allowed_length,
            dry_breaker_ids=self._breakers(params.dry_sequence_breakers or []) if params.dry_multiplier else [],
            logit_bias={token_id: float(bias) for token_id, bias in (params.logit_bias or {}).items()},
            allowed_token_ids=list(dict.fromkeys(params.allowed_token_ids)) if params.allowed_token_ids else None,
            bad_words_token_ids=bad_words,
            min_tokens=min(params.min_tokens, self.max_model_len),
            ending_token_ids=sorted(ends),
            logprobs=0 if params.logprobs is None and params.ranks else params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
        )

    def compile_grammar(self, structured_outputs: StructuredOutputsParams) -> CompiledGrammar:
        """What the text of an output must be. Raises: ValueError as `Grammars.compile`, or without a tokenizer."""
        self.require_tokenizer("structured_outputs", "allowed_token_ids")
        assert self._grammars is not None
        return self._grammars.compile(structured_outputs)

    def has_to_compile(self, structured_outputs: StructuredOutputsParams) -> bool:
        """Whether `compile_grammar` may take seconds."""
        if self._grammars is None or not isinstance(structured_outputs, StructuredOutputsParams):
            return False
        return not self._grammars.has_compiled(structured_outputs)

    def require_tokenizer(self, what: str, instead: str) -> Tokenizer:
        """The tokenizer. Raises ValueError, saying `what` needs it and what to give `instead`, if there is none."""
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer, and {self.path} has no tokenizer.json: give {instead}")
        return self.tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a prompt.

        Raises: ValueError if the model has no tokenizer, if the text holds a lone surrogate, which cannot be encoded,
            or if it is longer than max_model_len tokens of the greatest length.
        """
        tokenizer = self.require_tokenizer("a prompt of text", "prompt_token_ids")
        self._check_text(text, tokenizer)
        return tokenizer.encode(text, add_special_tokens)

    def _check_text(self, text: str, tokenizer: Tokenizer, truncated: bool = False) -> None:
        """Raises: as `encode`; a text that is truncated may have any length."""
        if (
            not truncated
            and len(text) > self.max_model_len
            and len(text) > self.max_model_len * tokenizer.max_chars_per_token
        ):
            raise PromptTooLongError(
                f"the prompt has {len(text):,} characters, more than max_model_len={self.max_model_len:,} tokens of "
                f"at most {tokenizer.max_chars_per_token} characters each"
            )
        if (surrogate := re.search("[\ud800-\udfff]", text)) is not None:
            raise ValueError(
                f"the prompt is not valid Unicode: it has a lone surrogate, U+{ord(surrogate[0]):04X}, at character "
                f"{surrogate.start()}"
            )

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int], str]:
        """(text or None, token ids, cache salt) of any form of prompt."""
        text, token_ids, salt = None, None, ""
        if isinstance(prompt, dict):
            if unknown := prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt", "reasoning"}:
                raise ValueError(
                    f"the prompt has fields that are not supported: {', '.join(sorted(map(str, unknown)))}"
                )
            text, token_ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt") or ""
            if text is None and token_ids is None:
                raise ValueError("a prompt dict has 'prompt' or 'prompt_token_ids'")
            if not isinstance(prompt.get("reasoning"), bool | None):
                raise TypeError(f"reasoning must be True, False or None, not {prompt['reasoning']!r:.100}")
            if not isinstance(salt, str):
                raise TypeError(f"cache_salt must be a string, not {shown(salt)}")
            if len(salt) > MAX_SALT or not is_unicode(salt):
                raise ValueError(f"cache_salt must be valid Unicode of at most {MAX_SALT:,} characters")
        elif isinstance(prompt, str):
            text = prompt
        else:
            token_ids = prompt
        if token_ids is None or text is not None:
            if not isinstance(text, str):
                raise TypeError(f"a prompt must be a string, token ids or a dict, not {shown(text)}")
            token_ids = self.encode(text) if token_ids is None else token_ids
        if not isinstance(token_ids, list):
            raise TypeError(f"a prompt must be a string, token ids or a dict, not {shown(token_ids)}")
        if not token_ids:
            raise ValueError("the prompt is empty")
        self._check_ids("prompt_token_ids", token_ids)
        return text, list(token_ids), salt

    def _check_size(self, name: str, count: int, num_prompt_tokens: int, max_tokens: int | None) -> None:
        """Refuse a request whose `count` completions could never run together."""
        if count > self.config.max_num_seqs:
            raise ValueError(f"{name}={count} is more than max_num_seqs={self.config.max_num_seqs}")
        longest = min(num_prompt_tokens + (max_tokens or self.max_model_len), self.max_model_len)
        assert self.needs is not None  # an encoder completes nothing
        blocks = self.needs.of([longest] * count, num_prompt_tokens if count > 1 else 0)
        if blocks > self.num_blocks:
            raise ValueError(
                f"{name}={count} completions of {longest} tokens need {blocks} blocks, the KV cache has "
                f"{self.num_blocks}: lower {name} or max_tokens, or raise kv_cache_gib"
            )

    def _check_tokens(self, params: SamplingParams) -> list[list[int]]:
        """Check the token ids in `params`. Returns the ids of its bad_words."""
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", params.logit_bias or ())
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        if params.stop:
            self.require_tokenizer("stop", "stop_token_ids")
        bad_words = []
        if params.bad_words:
            tokenizer = self.require_tokenizer("bad_words", "allowed_token_ids or logit_bias")
            bad_words = bad_word_ids(tokenizer, params.bad_words, params.num_sequences)
        if params.allowed_token_ids is not None:
            never = {ids[0] for ids in bad_words if len(ids) == 1}
            ends = self.model_config.eos_token_ids | set(params.stop_token_ids or ())
            never |= ends if params.min_tokens else set()
            if never.issuperset(params.allowed_token_ids):
                raise ValueError("allowed_token_ids: bad_words and min_tokens forbid every one of them")
        return bad_words

    def _check_ids(self, name: str, token_ids) -> None:
        vocab_size = self.model_config.vocab_size
        for token_id in token_ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise TypeError(f"{name} must be integers, not {shown(token_id)}")
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"{name}: {shown(token_id)} is not in the vocabulary of {vocab_size} tokens")

    def _breakers(self, texts: list[str]) -> list[int]:
        """The tokens that contain one of these texts, and the last token of each text that no token contains."""
        if not texts:
            return []
        tokenizer = self.require_tokenizer("dry_multiplier", "dry_sequence_breakers=[]")
        for text in texts:
            self._check_text(text, tokenizer)
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


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: it has no lone surrogates."""
    return re.search("[\ud800-\udfff]", text) is None
