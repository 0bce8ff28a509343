"""InputProcessor: what a user asks for as a Request that can be queued, or an error that names what is wrong."""

import dataclasses
import hashlib
import itertools
import random
import re
from pathlib import Path

from nanopage.config import EngineConfig, ModelConfig
from nanopage.engine.beam_search import BeamSearch
from nanopage.engine.output_processor import Completion, Request
from nanopage.engine.sequence import Sequence, SequenceGroup
from nanopage.model_files import exists, read_json
from nanopage.params import BeamSearchParams, SamplingParams
from nanopage.step import SamplingSettings
from nanopage.structured import CompiledGrammar, Grammars
from nanopage.text.detokenizer import IncrementalDetokenizer
from nanopage.text.stop_strings import build_trie
from nanopage.text.tokenizer import Tokenizer

Prompt = str | list[int] | dict
"""Text, token ids, or a dict with "prompt" or "prompt_token_ids", and optionally "cache_salt" (vLLM's forms).

A dict with both is of token ids; the text is only returned as `RequestOutput.prompt`."""


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
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        path: Path,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        num_blocks: int,
    ):
        self.config, self.model_config, self.path, self.tokenizer = config, model_config, path, tokenizer
        self.max_model_len, self.num_blocks = max_model_len, num_blocks
        self._seq_ids = itertools.count()
        self._seeds = random.Random(config.seed)
        self._grammars: Grammars | None = None
        if tokenizer is not None:
            self._grammars = Grammars(tokenizer, model_config.vocab_size, model_config.eos_token_ids)

    def make_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | None = None,
        priority: int = 0,
    ) -> Request:
        """The request, not queued yet. Raises as LLMEngine.add_request."""
        if not isinstance(request_id, str) or not request_id:
            raise TypeError(f"request_id must be a non-empty string, not {request_id!r}")
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise TypeError(f"priority must be an integer, not {priority!r}")
        if priority and self.config.scheduling_policy != "priority":
            raise ValueError(f"priority={priority} needs scheduling_policy='priority'")
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams | BeamSearchParams):
            raise TypeError(f"sampling_params must be SamplingParams or BeamSearchParams, not {params!r}")
        params = dataclasses.replace(params)  # a copy, checked again: the caller may change the original
        text, token_ids, cache_salt = self._read_prompt(prompt)
        max_output = self.max_model_len - len(token_ids)
        if max_output < 1:
            raise PromptTooLongError(
                f"the prompt has {len(token_ids)} tokens and leaves no room for output in "
                f"max_model_len={self.max_model_len}"
            )
        if isinstance(params, BeamSearchParams):
            return self._search_request(request_id, text, token_ids, cache_salt, params, max_output, priority)
        name, count = "n" if params.best_of is None else "best_of", params.num_sequences
        self._check_size(name, count, len(token_ids), params.max_tokens)
        settings = self._settings(params, self._check_tokens(params))
        grammar = self._compile_grammar(params)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        eos = self.model_config.eos_token_ids
        limit = self.max_model_len if params.max_tokens is None else len(token_ids) + params.max_tokens
        seqs = [
            Sequence(
                next(self._seq_ids),
                token_ids,
                settings,
                seed=seed if index == 0 else branch_seed(seed, index),
                eos_token_ids=frozenset() if params.ignore_eos else eos,
                stop_token_ids=frozenset(params.stop_token_ids or ()),
                max_total_tokens=min(limit, self.max_model_len),
                num_logprobs=params.logprobs,
                cache_salt=cache_salt,
                token_mask=None if grammar is None else grammar.make_mask(params.stop_token_ids or ()),
            )
            for index in range(count)
        ]
        group = SequenceGroup(request_id, seqs, priority, ranks=params.ranks)
        detokenizers: list[IncrementalDetokenizer | None] = [None] * count
        if params.detokenize and self.tokenizer is not None:
            stop_strings = build_trie(list(params.stop)) if params.stop else None
            options = stop_strings, params.skip_special_tokens, params.include_stop_str_in_output
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
        return Request(SequenceGroup(request_id, seqs, priority, search), params, text, token_ids, [])

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
            logit_bias={token_id: float(bias) for token_id, bias in (params.logit_bias or {}).items()},
            allowed_token_ids=params.allowed_token_ids,
            bad_words_token_ids=bad_words,
            min_tokens=min(params.min_tokens, self.max_model_len),
            ending_token_ids=sorted(ends),
            logprobs=0 if params.logprobs is None and params.ranks else params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
        )

    def _compile_grammar(self, params: SamplingParams) -> CompiledGrammar | None:
        if params.structured_outputs is None:
            return None
        self.require_tokenizer("structured_outputs", "allowed_token_ids")
        assert self._grammars is not None
        return self._grammars.compile(params.structured_outputs)

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
        if len(text) > self.max_model_len and len(text) > self.max_model_len * tokenizer.max_chars_per_token:
            raise PromptTooLongError(
                f"the prompt has {len(text):,} characters, more than max_model_len={self.max_model_len:,} tokens of "
                f"at most {tokenizer.max_chars_per_token} characters each"
            )
        if (surrogate := re.search("[\ud800-\udfff]", text)) is not None:
            raise ValueError(
                f"the prompt is not valid Unicode: it has a lone surrogate, U+{ord(surrogate[0]):04X}, at character "
                f"{surrogate.start()}"
            )
        return tokenizer.encode(text, add_special_tokens)

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int], str]:
        """(text or None, token ids, cache salt) of any form of prompt."""
        text, token_ids, salt = None, None, ""
        if isinstance(prompt, dict):
            if unknown := prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"}:
                raise ValueError(
                    f"the prompt has fields that are not supported: {', '.join(sorted(map(str, unknown)))}"
                )
            text, token_ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt") or ""
            if text is None and token_ids is None:
                raise ValueError("a prompt dict has 'prompt' or 'prompt_token_ids'")
            if not isinstance(salt, str):
                raise TypeError(f"cache_salt must be a string, not {salt!r}")
            if len(salt) > MAX_SALT or not is_unicode(salt):
                raise ValueError(f"cache_salt must be valid Unicode of at most {MAX_SALT:,} characters")
        elif isinstance(prompt, str):
            text = prompt
        else:
            token_ids = prompt
        if token_ids is None or text is not None:
            if not isinstance(text, str):
                raise TypeError(f"a prompt must be a string, token ids or a dict, not {text!r}")
            token_ids = self.encode(text) if token_ids is None else token_ids
        if not isinstance(token_ids, list):
            raise TypeError(f"a prompt must be a string, token ids or a dict, not {token_ids!r}")
        if not token_ids:
            raise ValueError("the prompt is empty")
        self._check_ids("prompt_token_ids", token_ids)
        return text, list(token_ids), salt

    def _check_size(self, name: str, count: int, num_prompt_tokens: int, max_tokens: int | None) -> None:
        """Refuse a request whose `count` completions could never run together."""
        if count > self.config.max_num_seqs:
            raise ValueError(f"{name}={count} is more than max_num_seqs={self.config.max_num_seqs}")
        longest = min(num_prompt_tokens + (max_tokens or self.max_model_len), self.max_model_len)
        shared = num_prompt_tokens // self.config.block_size if count > 1 else 0
        blocks = shared + count * (-(-longest // self.config.block_size) - shared)
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
        bad_words = self._bad_words(params.bad_words or [])
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
                raise TypeError(f"{name} must be integers, not {token_id!r}")
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"{name}: {token_id} is not in the vocabulary of {vocab_size} tokens")

    def _bad_words(self, words: list[str]) -> list[list[int]]:
        """Each word's token ids at the beginning of a text and after a space, as in vLLM."""
        sequences = []
        for word in words:
            tokenizer = self.require_tokenizer("bad_words", "allowed_token_ids or logit_bias")
            word = word.lstrip() or word  # white space alone is a word, too
            plain = tokenizer.encode(word, add_special_tokens=False)
            spaced = tokenizer.encode(" " + word, add_special_tokens=False)
            if not plain:
                raise ValueError(f"bad_words: {word!r} has no tokens")
            sequences.append(plain)
            # "▁word" is its own token; where the space is a token apart, banning the plain form is enough.
            if spaced[0] != plain[0] and len(spaced) == len(plain):
                sequences.append(spaced)
        return sequences


def default_sampling_params(path: Path) -> SamplingParams:
    """The parameters that generation_config.json of a model's directory recommends; without one, SamplingParams().

    Raises: ValueError naming the file and the field.
    """
    file = path / "generation_config.json"
    if not path.is_dir() or not exists(file):
        return SamplingParams()
    config, params = read_json(file), SamplingParams()
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
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
