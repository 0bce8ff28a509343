"""Text to token ids and back: a thin layer over `tokenizers`, and the chat template."""

import re
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as BackendTokenizer

from nanopage.files.model_files import exists, read_json, read_text, rust_errors, shown
from nanopage.text import tokenizer_bounds
from nanopage.text.chat_template import TemplateRenderer


def _byte_of_character() -> dict[str, int]:
    """GPT-2's way to write any byte as a printable character, which byte-level tokenizers use."""
    shown = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


BYTE_OF_CHARACTER = _byte_of_character()
CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


class Encoding(dict):
    """What `Tokenizer.__call__` returns: "input_ids" and "attention_mask", as items and as attributes."""

    @property
    def input_ids(self) -> list:
        return self["input_ids"]

    @property
    def attention_mask(self) -> list:
        return self["attention_mask"]


SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
# Special tokens that end a turn, a message, a text or a file, whatever else the model's files say of them: those of
# llama.cpp (llama-vocab.cpp).
ENDS = {
    *("<|im_end|>", "<|end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|return|>", "<|call|>"),
    *("<|calls|>", "<|flush|>", "<|tool_response>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]"),
    *("<EOT>", "_<EOT>", "[EOT]", "[e~[", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "<|file_sep|>"),
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
}
MAX_TOKENIZER = 2**27  # bytes of tokenizer.json; a file with 260,000 tokens has about 2**25


class TokenizerSource(Protocol):
    """A file that has a tokenizer in it, such as quantization/gguf_checkpoint.py's."""

    path: Path

    def tokenizer(self) -> BackendTokenizer: ...

    def tokenizer_config(self) -> dict: ...


class Tokenizer:
    """The tokenizer and chat template of a model. Names are transformers' where its tokenizers have one.

    Args:
        source: a directory with tokenizer.json (and tokenizer_config.json, chat_template.jinja), or an open .gguf file.
        num_embeddings: the size of the model's vocabulary, if it is known. It may be larger than the tokenizer's.
            Added tokens of the tokenizer may lie beyond this size: a text with such a token cannot be encoded.

    chat_template: None if there is none.
    tool_template: used instead for conversations with tools, if the model has one.
    named_templates: all templates by their names, of which "default" and "tool_use" are those above.

    Attributes: max_chars_per_token: characters of the longest token. renderer: of chat templates; one whose process
        runs already may replace it.

    Raises:
        FileNotFoundError: no tokenizer.json.
        ValueError: a file that cannot be read, by name; a tokenizer that is too large for the model, or that could make
            very much of a short text.
    """

    def __init__(self, source: Path | TokenizerSource, num_embeddings: int | None = None):
        if isinstance(source, Path):
            self.path = source / "tokenizer.json"
            (self.backend, self._trial), config = _read_tokenizer(self.path), read_tokenizer_config(source)
        else:
            self.path = source.path
            self.backend, self._trial, config = source.tokenizer(), None, source.tokenizer_config()
            config["chat_templates"] = _named_templates(self.path, config.get("chat_template"))
        self._growth = tokenizer_bounds.growth(self.backend, str(self.path))
        self.max_chars_per_token = tokenizer_bounds.check(self.backend, str(self.path))
        self.num_embeddings = num_embeddings
        num_tokens = self.backend.get_vocab_size(with_added_tokens=False)
        if num_embeddings is not None and num_tokens > num_embeddings:
            raise ValueError(
                f"{self.path} has {num_tokens:,} tokens and the model has embeddings for {num_embeddings:,}: "
                "it belongs to another model"
            )
        self.backend.no_truncation()
        self.backend.no_padding()
        self.special_tokens = {name: config[name] for name in SPECIAL_TOKENS if config.get(name) is not None}
        self.named_templates: dict[str, str] = config["chat_templates"]
        self.chat_template, self.tool_template = map(self.named_templates.get, ("default", "tool_use"))
        added = self.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added_ids = frozenset(added)
        decoder = self.backend.decoder
        self._is_byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        self._contained: tuple[tuple[str, ...], list[int]] = (), []  # of the last call of `containing`
        self.renderer = TemplateRenderer()

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self.special_tokens.get("pad_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._special_id("pad_token")

    def end_ids(self) -> frozenset[int]:
        """The tokens that end a reply: end-of-sequence, and special tokens whose names say that they are ends."""
        special = {self.backend.id_to_token(token_id) for token_id in self.special_ids}
        names = special & ENDS
        if {"<|return|>", "<|call|>"} <= special or {"<|calls|>", "<|flush|>"} <= special:
            names -= {"<|end|>"}  # it ends only a part of a reply
        found = (self.eos_token_id, *(self.backend.token_to_id(name) for name in names if name is not None))
        ids = (token_id for token_id in found if token_id is not None)
        return frozenset(i for i in ids if self.num_embeddings is None or i < self.num_embeddings)

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises: ValueError if the tokenizer fails on the text or could make too much of it, or if the model has no
        embedding for one of its tokens."""
        self.check_text(text)
        with rust_errors(f"{self.path} failed on a text of {len(text):,} characters"):
            ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return self._checked(ids)

    def check_text(self, text: str) -> None:
        """Raises: ValueError if the tokenizer could make too much of a text, or takes too long for it."""
        tokenizer_bounds.check_text(text, self._growth, str(self.path))
        if self._trial is not None:
            self._trial.check(text)

    def _checked(self, ids: list[int]) -> list[int]:
        """`ids`. Raises: ValueError if the model has no embedding for one of them."""
        if self.num_embeddings is not None and max(ids, default=0) >= self.num_embeddings:
            token = self.backend.id_to_token(max(ids))
            raise ValueError(
                f"the text has the token {shown(token)}, which is {max(ids)} in {self.path}: the model has embeddings "
                f"for {self.num_embeddings:,} tokens only"
            )
        return ids

    def encode_truncated(
        self, text: str, pair: str | None = None, max_tokens: int | None = None, side: str = "right"
    ) -> tuple[list[int], list[int]]:
        """The ids of a text or a pair with special tokens, and the type of each token: 1 for tokens of the second text,
        if the tokenizer tells the two apart.

        Args:
            max_tokens: keep this many of a longer text's first tokens, special ones included. Of a pair, the longer
                text is shortened until both are equally long, as transformers' "longest_first" does.
            side: "left" drops the first tokens instead of the last.

        Raises: as `encode`; ValueError if the special tokens alone are more than `max_tokens`.
        """
        texts = [text] if pair is None else [text, pair]
        for each in texts:
            self.check_text(each)
        with rust_errors(f"{self.path} failed on texts of {sum(map(len, texts)):,} characters"):
            parts = [self.backend.encode(each, add_special_tokens=False) for each in texts]
            if max_tokens is not None:
                room = max_tokens - self.backend.num_special_tokens_to_add(pair is not None)
                if room < len(texts):
                    raise ValueError(f"truncate_prompt_tokens={max_tokens} leaves no room beside the special tokens")
                for part, length in zip(parts, _shortened([len(part.ids) for part in parts], room), strict=True):
                    part.truncate(length, direction=side)
            done = self.backend.post_process(parts[0], parts[1] if len(parts) > 1 else None)
        return self._checked(done.ids), done.type_ids

    def __call__(self, text: str | list[str], add_special_tokens: bool = True) -> Encoding:
        """The ids and attention mask (all ones) of a text, or lists of these for several texts, as in transformers.

        Raises: as `encode`, and TypeError for anything but text.
        """
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, list | tuple) or not all(isinstance(one, str) for one in texts):
            raise TypeError(f"text must be a string or a list of strings, not {text!r:.200}")
        ids = [self.encode(one, add_special_tokens) for one in texts]
        masks = [[1] * len(one) for one in ids]
        if isinstance(text, str):
            return Encoding(input_ids=ids[0], attention_mask=masks[0])
        return Encoding(input_ids=ids, attention_mask=masks)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        try:
            return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except BaseException:  # entering rust_errors for every token would take as long as decoding it
            with rust_errors(f"{self.path} failed to decode {len(token_ids):,} tokens"):
                raise

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, which may be a part of a character; empty for an id without a token."""
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added_ids:
            return token.encode()
        if self._is_byte_level:
            return bytes(BYTE_OF_CHARACTER[character] for character in token)
        if re.fullmatch("<0x[0-9A-F]{2}>", token):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()  # SentencePiece's mark for a space

    def template_for(self, tools: bool, chosen: str | None = None) -> str | None:
        """The template for a conversation with or without tools, as transformers chooses it.

        Args: chosen: the name of one of the model's templates, or Jinja source. None: the model's own.
        """
        if chosen is not None:
            return self.named_templates.get(chosen, chosen) if isinstance(chosen, str) else chosen
        return self.tool_template if tools and self.tool_template is not None else self.chat_template

    def containing(self, texts: tuple[str, ...]) -> list[int]:
        """The tokens that contain one of these texts, and the last token of each text that no token contains."""
        if texts != self._contained[0]:
            found: set[int] = set()
            for text in texts:
                form, raw = text.replace(" ", "\u2581"), text.encode()  # as they stand in SentencePiece's tokens
                if self._is_byte_level:
                    form = "".join(CHARACTER_OF_BYTE[byte] for byte in raw)
                ids = {i for token, i in self._vocabulary if form in token}
                if len(raw) == 1 and (byte := self.backend.token_to_id(f"<0x{raw[0]:02X}>")) is not None:
                    ids.add(byte)
                found |= ids or {*self.encode(text, add_special_tokens=False)[-1:]}
            self._contained = texts, sorted(found)
        return self._contained[1]

    @cached_property
    def _vocabulary(self) -> list[tuple[str, int]]:
        return [*self.backend.get_vocab(with_added_tokens=True).items()]

    def apply_chat_template(
        self,
        messages: list[dict],
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: list[dict] | None = None,
        continue_final_message: bool = False,
        *,
        tokenize: bool = False,
        **chat_template_kwargs,
    ) -> str | list[int]:
        """`render_chat`, or with `tokenize` its token ids. Other keywords are variables of the template.

        The defaults are not transformers', which are add_generation_prompt=False and tokenize=True.
        """
        text = self.render_chat(
            messages, chat_template, add_generation_prompt, tools, continue_final_message, chat_template_kwargs
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def render_chat(
        self,
        messages: list[dict],
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: list[dict] | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: dict | None = None,
    ) -> str:
        """The conversation as the model was trained to see it, ready for `encode(..., add_special_tokens=False)`.

        Args:
            messages: dicts with "role" and "content" (see `normalize_messages` in chat_template.py).
            chat_template: Jinja source to use instead of the model's, or the name of one of the model's templates.
            add_generation_prompt: end with the opening of the assistant's reply.
            tools: JSON schemas of the functions that the model may call. Even an empty list asks for the template named
                tool_use, as in transformers.
            continue_final_message: end where the content of the last message ends, so that the model goes on with it.
            chat_template_kwargs: more variables of the template, such as {"enable_thinking": False}.

        Raises:
            TypeError: an argument of the wrong type.
            ValueError: no template, messages of the wrong form, or a template that fails, does what the sandbox forbids
                or exceeds a limit (see chat_template.py).
            RuntimeError: the process that renders templates cannot be started.
        """
        source = self.template_for(tools is not None, chat_template)
        if source is None and self.named_templates:
            names = ", ".join(map(repr, self.named_templates))
            raise ValueError(f"the model has no default chat template: choose one by its name, of {names:.200}")
        if source is None:
            raise ValueError(
                "the model has no chat template, so it is probably a base model: use generate(), or give a template"
            )
        special_tokens = self.special_tokens
        return self.renderer.render(
            source, messages, add_generation_prompt, special_tokens, tools, continue_final_message, chat_template_kwargs
        )


def _shortened(lengths: list[int], room: int) -> list[int]:
    """The lengths of one or two texts, the longer one shortened first until both fit into `room` tokens."""
    if sum(lengths) <= room:
        return lengths
    if len(lengths) == 1:
        return [room]
    shorter = min(lengths)
    first_is_longer = lengths[0] > lengths[1]
    kept = (shorter, room - shorter) if 2 * shorter <= room else (room // 2, room - room // 2)
    return [kept[1], kept[0]] if first_is_longer else [*kept]


def _read_tokenizer(file: Path) -> tuple[BackendTokenizer, tokenizer_bounds.Trial | None]:
    if not exists(file):
        raise FileNotFoundError(
            f"{file.parent} has no tokenizer.json. If it has another kind of tokenizer, convert it with transformers: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    text = read_text(file, MAX_TOKENIZER)
    trial = tokenizer_bounds.check_file(text, file)
    with rust_errors(f"{file} is not a readable tokenizer"):
        return BackendTokenizer.from_str(text), trial


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json, with special tokens as strings. Its `chat_templates` are by name; templates in files of
    their own replace all of these, as in transformers."""
    file, template = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    config, older = _with_special_tokens(file), directory / "special_tokens_map.json"
    if "added_tokens_decoder" not in config:  # as in transformers
        config |= {name: text for name, text in _with_special_tokens(older).items() if text and name in SPECIAL_TOKENS}
    files = {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if exists(template):
        files["default"] = template
    written, of_processor = config.get("chat_template"), directory / "chat_template.json"
    if written is None and exists(of_processor):  # of older models that see images
        written = read_json(of_processor).get("chat_template")
    written = None if files else written
    config["chat_templates"] = _named_templates(file, written) | {name: read_text(files[name]) for name in files}
    return config


def _with_special_tokens(file: Path) -> dict[str, Any]:
    """A JSON file, or {} if there is none, with special tokens as strings or None."""
    config = read_json(file) if exists(file) else {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        config[name] = value.get("content") if isinstance(value, dict) else value
        if value is not None and not isinstance(config[name], str):
            raise ValueError(
                f"{file}: {name} must be a string or an object with a string 'content', got {shown(value)}"
            )
    return config


def _named_templates(file: Path, written: Any) -> dict[str, str]:
    """The chat templates in tokenizer_config.json, by name: a string, or a list of several."""
    if written is None or isinstance(written, str):
        return {} if written is None else {"default": written}
    if isinstance(written, list) and all(_is_named_template(entry) for entry in written):
        return {entry["name"]: entry["template"] for entry in written}
    expected = 'a string or a list of {"name": ..., "template": ...}'
    raise ValueError(f"the chat_template in {file} must be {expected}, got {shown(written)}")


def _is_named_template(entry: Any) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("name", "template"))
