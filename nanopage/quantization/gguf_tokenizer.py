"""The tokenizer of a GGUF file, from llama.cpp's flat list of vocabulary and merges."""

import json
import math
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from nanopage.files.model_files import rust_errors, shown
from nanopage.quantization.gguf_fields import INSTEAD, REQUIRED, GGUFFields

UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)  # tokenizer.ggml.token_type
MAX_PIECE = 256  # characters of a SentencePiece token; SentencePiece's own limit is 16 unless a trainer raises it

LLAMA3 = ("llama-bpe", "lfm2")  # pre-tokenizers that split as Llama 3's
NEOX = ("mpt", "olmo")  # those of GPT-NeoX's vocabulary, which Mamba-2 has: they split as GPT-2's


class GGUFVocabulary:
    """What a file says about its tokens. Raises: ValueError naming the file and the field, as all methods."""

    def __init__(self, fields: GGUFFields):
        self.fields = fields

    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer.

        Raises: ValueError for a kind or pre-tokenizer that is not supported, and for fields that contradict each other.
        """
        kind = self.fields.string("tokenizer.ggml.model")
        if kind == "gpt2":
            tokenizer = self._byte_level_bpe()
        elif kind == "llama":
            tokenizer = self._sentencepiece_bpe()
        else:
            problem = f"tokenizer {shown(kind)} is not supported; supported: gpt2, llama"
            raise ValueError(f"{self.fields.path}: {problem}; {INSTEAD}")
        added = self._added_tokens()
        bos = self.token_id("bos")
        # llama.cpp's defaults, if the file says nothing.
        adds_bos = kind == "llama" or self.fields.string("tokenizer.ggml.pre", "") in LLAMA3
        adds_bos = self.fields.flag("tokenizer.ggml.add_bos_token", adds_bos)
        if self.fields.flag("tokenizer.ggml.add_eos_token", False):
            raise self.fields.unsupported("tokenizer.ggml.add_eos_token")
        with rust_errors(f"{self.fields.path}: tokenizer.ggml.tokens"):
            tokenizer.add_tokens(added)
            # Set the special flag again, because add_tokens does not change tokens that are already in the vocabulary.
            tokenizer.add_special_tokens([token for token in added if token.special])
            if adds_bos and bos is not None:
                tokenizer.post_processor = processors.TemplateProcessing(
                    single="bos:0 $A:0",
                    pair="bos:0 $A:0 $B:1",
                    special_tokens=[{"id": "bos", "ids": [bos], "tokens": [self.tokens[bos]]}],
                )
        return tokenizer

    def _added_tokens(self) -> list[AddedToken]:
        """The tokens that a text is divided at. Some files call an end of a reply user-defined: it is special. "</s>"
        may be text, as in Gemma's files."""
        return [
            AddedToken(token, special=kind != USER_DEFINED or (_is_end(token) and token != "</s>"), normalized=False)
            for token, kind in zip(self.tokens, self._token_types(), strict=True)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ]

    def config(self) -> dict[str, Any]:
        """The special tokens and the chat templates as the contents of a tokenizer_config.json."""
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            if (token_id := self.token_id(key)) is not None:
                config[f"{name}_token"] = self.tokens[token_id]
        # llama.cpp's converter writes a template with another name, such as tool_use, as a separate field.
        keys = [key for key in self.fields.values if key.startswith("tokenizer.chat_template.")]
        named = {key.removeprefix("tokenizer.chat_template."): self.fields.string(key) for key in keys}
        if template := self.fields.string("tokenizer.chat_template", ""):
            named = {"default": template} | named
        if named:
            listed = [{"name": name, "template": text} for name, text in named.items()]
            config["chat_template"] = template if [*named] == ["default"] else listed
        config["model_max_length"] = self.fields.size("{arch}.context_length", "max_position_embeddings")
        return config

    def save(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json."""
        (directory / "tokenizer.json").write_text(self.tokenizer().to_str(pretty=True), encoding="utf-8")
        (directory / "tokenizer_config.json").write_text(json.dumps(self.config(), indent=2))

    @cached_property
    def tokens(self) -> list[str]:
        """The vocabulary, by id. Empty tokens get distinct names, as in llama.cpp."""
        tokens = self.fields.strings("tokenizer.ggml.tokens")
        tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
        ids: dict[str, int] = {}
        for i, token in enumerate(tokens):
            if ids.setdefault(token, i) != i:
                raise self.fields.error(
                    "tokenizer.ggml.tokens", f"has {shown(token)} twice, as {ids[token]} and as {i}"
                )
        return tokens

    def _one_for_each_token(self, key: str, kinds: str, what: str) -> list:
        """An array of numbers whose numpy dtype is of one of `kinds`."""
        values = self.fields.field(key, np.ndarray, f"an array of {what}", REQUIRED)
        if values.dtype.kind not in kinds:
            raise self.fields.error(key, f"must be an array of {what}, got {shown(values)}")
        if len(values) != len(self.tokens):
            raise self.fields.error(key, f"has {len(values):,} values for {len(self.tokens):,} tokens")
        return values.tolist()

    def token_id(self, name: str) -> int | None:
        """The id of a special token; None if there is none. Files then leave the field out, or have an id that is not
        in the vocabulary, such as -1 or 2^32 - 1."""
        token_id = self.fields.field(f"tokenizer.ggml.{name}_token_id", int, "a token id", None)
        return token_id if token_id is not None and 0 <= token_id < len(self.tokens) else None

    def _token_types(self) -> list[int]:
        key = "tokenizer.ggml.token_type"
        if not self.fields.has(key):
            return [NORMAL] * len(self.tokens)
        types = self._one_for_each_token(key, "iu", "integers")
        if unknown := set(types) - set(range(7)):
            raise self.fields.error(key, f"has values that are not supported: {shown(sorted(unknown))}")
        return types

    def _byte_level_bpe(self) -> Tokenizer:
        from nanopage.text.tokenizer_bounds import SPLITS  # not for the processes that compile: they need no tokenizer

        pre, known = self.fields.string("tokenizer.ggml.pre"), ("gpt-2", *NEOX, "smollm", "refact", *SPLITS)
        if pre not in known:
            problem = f"pre-tokenizer {shown(pre)} is not supported; supported: {', '.join(known)}"
            raise ValueError(f"{self.fields.path}: {problem}; {INSTEAD}")
        merges = []
        for merge in self.fields.strings("tokenizer.ggml.merges"):
            left, _, right = merge.partition(" ")
            if not (left and right):
                raise self.fields.error(
                    "tokenizer.ggml.merges", f"has {shown(merge)}, which is not two tokens and a space"
                )
            merges.append((left, right))
        vocabulary = {token: i for i, token in enumerate(self.tokens)}
        with rust_errors(f"{self.fields.path}: tokenizer.ggml.merges"):
            tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in (*LLAMA3, "tekken")))
        if pre in SPLITS:
            splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in SPLITS[pre]]
            parts = [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        else:
            parts = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
            if pre in ("smollm", "refact"):
                parts.insert(0, pre_tokenizers.Digits(individual_digits=True))
        if pre in ("qwen2", "qwen35", *NEOX):
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _sentencepiece_bpe(self) -> Tokenizer:
        """SentencePiece BPE has scores, not merges: any pair whose result is a token merges, best score first."""
        types, scores = self._token_types(), self._one_for_each_token("tokenizer.ggml.scores", "f", "numbers")
        if not all(map(math.isfinite, scores)):
            raise self.fields.error("tokenizer.ggml.scores", "has values that are not finite")
        vocabulary = {token: i for i, token in enumerate(self.tokens)}
        merges = []
        for i, token in enumerate(self.tokens):
            if types[i] != NORMAL:
                continue
            if len(token) > MAX_PIECE:
                raise self.fields.error(
                    "tokenizer.ggml.tokens", f"has a token of {len(token):,} characters: {shown(token)}"
                )
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in vocabulary and right in vocabulary:
                    merges.append((-scores[i], vocabulary[left], vocabulary[right], left, right))
        merges.sort()
        unknown = self.token_id("unknown") or 0
        with rust_errors(f"{self.fields.path}: tokenizer.ggml.tokens"):
            tokenizer = Tokenizer(
                models.BPE(
                    vocabulary,
                    [(left, right) for *_, left, right in merges],
                    unk_token=self.tokens[unknown],
                    fuse_unk=True,
                    byte_fallback=True,
                )
            )
        spaces = normalizers.Replace(" ", "▁")
        decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if self.fields.flag("tokenizer.ggml.add_space_prefix", True):
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
            decoding.append(decoders.Strip(" ", 1, 0))
        else:
            tokenizer.normalizer = spaces
        tokenizer.decoder = decoders.Sequence(decoding)
        return tokenizer

    def end_ids(self) -> list[int]:
        """The tokens that end a reply by the file's fields: the ends of a text, a turn, a message or a file, as in
        llama.cpp. The tokenizer knows others by their names.

        Raises: ValueError if the end of a text is no token, and there is no other end.
        """
        names = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
        ids = {token_id for name in names if (token_id := self.token_id(name)) is not None}
        eos = self.fields.values.get("tokenizer.ggml.eos_token_id")
        if not (ids or eos is None or any(token.special and _is_end(token.content) for token in self._added_tokens())):
            raise self.fields.error(
                "tokenizer.ggml.eos_token_id", f"= {eos} is no token, and no other token ends a reply"
            )
        return sorted(ids)


def _is_end(token: str) -> bool:
    from nanopage.text.tokenizer import ENDS  # as in _byte_level_bpe

    return token in ENDS
