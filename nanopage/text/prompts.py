"""PromptReader: every form of prompt to token ids, for LLM and for the server."""

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import shake_128
from pathlib import Path
from typing import Any

import numpy as np

from nanopage.files.model_files import find_surrogate, shown
from nanopage.inputs import Prompt
from nanopage.step import Item
from nanopage.text.tokenizer import Tokenizer

MAX_SALT = 1024  # characters
ITEM_FIELDS = {  # of a prompt, and why they are refused if nothing reads them
    "prompt_embeds": "needs enable_prompt_embeds=True",
    "multi_modal_data": "is not supported by this model, whose prompts are text",
    "encoder_prompt": "is not supported by this model, which has no encoder that reads text",
    "prompt_adapter_request": "needs enable_prompt_adapter=True",
}


class PromptTooLongError(ValueError):
    """A prompt that leaves no room for output in max_model_len."""


@dataclass(slots=True)
class TokenizedPrompt:
    """A prompt that has been read.

    text: to return as `RequestOutput.prompt`; None for token ids alone.
    token_ids: with placeholders where items are.
    reasoning: see `Prompt`.
    items: by their positions.
    keys: what the prefix cache compares in place of `token_ids` (see `keys_of`). Empty without items.
    encoder: the text and the token ids that an encoder reads (items/text.py).
    """

    text: str | None
    token_ids: list[int]
    cache_salt: str = ""
    reasoning: bool | None = None
    items: list[Item] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    encoder: tuple[str | None, list[int] | None] = (None, None)


def keys_of(token_ids: list[int], items: list[Item]) -> list[int]:
    """The tokens of a prompt, with negative numbers that depend on the hash of an item in place of its placeholders. So
    prompts share the blocks before the first item that differs, and no others."""
    keys = list(token_ids)
    for item in items:
        numbers = np.frombuffer(shake_128(item.hash).digest(8 * item.length), "<i8") | np.int64(-(2**63))
        keys[item.position : item.position + item.length] = numbers.tolist()
    return keys


class PromptReader:
    """Reads prompts.

    Args:
        tokenizer: None if the model has none: prompts are then token ids, and text is refused.
        path: the model's, for messages.
        vocab_size: every token id is less.
        max_model_len: the most tokens that a sequence may have.

    limit: what messages call `max_model_len`.
    needed: the field of a prompt that an encoder-decoder model reads. Such a model gets text as it is, without the
        special tokens that its tokenizer would add. None: there is no such field.
    item_readers: field of a prompt -> what reads it: adds items, and the placeholders of their tokens, to a prompt.
        build.py attaches them. They raise TypeError or ValueError naming what is wrong.
    """

    def __init__(self, tokenizer: Tokenizer | None, path: Path, vocab_size: int, max_model_len: int):
        self.tokenizer, self.path, self.vocab_size, self.max_model_len = tokenizer, path, vocab_size, max_model_len
        self.item_readers: dict[str, Callable[[TokenizedPrompt, Any], None]] = {}
        self.needed: str | None = None
        self.limit = "max_model_len"

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
        return self.check_text(text).encode(text, add_special_tokens)

    def check_text(self, text: str, truncated: bool = False) -> Tokenizer:
        """Raises: as `encode`; a text that is truncated may have any length. Returns the tokenizer."""
        tokenizer = self.require_tokenizer("a prompt of text", "prompt_token_ids")
        if not truncated and len(text) > max(1, tokenizer.max_chars_per_token) * self.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {len(text):,} characters, more than {self.limit}={self.max_model_len:,} tokens of "
                f"at most {tokenizer.max_chars_per_token} characters each"
            )
        if (at := find_surrogate(text)) >= 0:
            raise ValueError(
                f"the prompt is not valid Unicode: it has a lone surrogate, U+{ord(text[at]):04X}, at character {at}"
            )
        return tokenizer

    def read(self, prompt: Prompt) -> TokenizedPrompt:
        """Raises: TypeError, ValueError naming what is wrong; as `encode`."""
        fields = prompt if isinstance(prompt, dict) else {}
        items = {name: fields[name] for name in ITEM_FIELDS if fields.get(name) is not None}
        if unknown := fields.keys() - {"prompt", "prompt_token_ids", "cache_salt", "reasoning"} - ITEM_FIELDS.keys():
            raise ValueError(f"the prompt has fields that are not supported: {', '.join(sorted(map(str, unknown)))}")
        text, token_ids, salt = fields.get("prompt"), fields.get("prompt_token_ids"), fields.get("cache_salt") or ""
        reasoning = fields.get("reasoning")
        if isinstance(prompt, str):
            text = prompt
        elif not isinstance(prompt, dict):
            token_ids = prompt
        elif text is None and token_ids is None:
            if not items:
                raise ValueError("a prompt dict has 'prompt' or 'prompt_token_ids'")
            token_ids = []
        if not isinstance(reasoning, bool | None):
            raise TypeError(f"reasoning must be True, False or None, not {reasoning!r:.100}")
        if not isinstance(salt, str):
            raise TypeError(f"cache_salt must be a string, not {shown(salt)}")
        if len(salt) > MAX_SALT or find_surrogate(salt) >= 0:
            raise ValueError(f"cache_salt must be valid Unicode of at most {MAX_SALT:,} characters")
        if token_ids is None or text is not None:
            if not isinstance(text, str):
                raise TypeError(f"a prompt must be a string, token ids or a dict, not {shown(text)}")
            token_ids = self.encode(text, self.needed is None) if token_ids is None else token_ids
        if not isinstance(token_ids, list):
            raise TypeError(f"a prompt must be a string, token ids or a dict, not {shown(token_ids)}")
        self.check_ids("prompt_token_ids", token_ids)
        if self.needed is not None and self.needed not in items:
            raise ValueError(f"the prompt has no {self.needed}, and {self.path.name} needs it")
        read = TokenizedPrompt(text, list(token_ids), salt, reasoning)
        for name, value in items.items():
            if name not in self.item_readers:
                raise ValueError(f"{name} {ITEM_FIELDS[name]}")
            self.item_readers[name](read, value)
        if not read.token_ids:
            raise ValueError("the prompt is empty")
        if read.items:
            read.keys = keys_of(read.token_ids, read.items)
            # Every token may depend on an item that takes the place of none.
            read.cache_salt = "".join(f"{item.hash.hex()} " for item in read.items if item.length == 0) + salt
        return read

    def check_ids(self, name: str, token_ids) -> None:
        """Raises: TypeError, ValueError for what is no token, naming the parameter."""
        for token_id in token_ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise TypeError(f"{name} must be integers, not {shown(token_id)}")
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"{name}: {shown(token_id)} is not in the vocabulary of {self.vocab_size} tokens")
