"""Prompts as dicts, under vLLM's names."""

from typing import NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt of text. Requests share cached prefixes only with those of the same `cache_salt`."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt of token ids. `prompt` is their text, if it is to be returned as `RequestOutput.prompt`."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
