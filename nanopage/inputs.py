"""Prompts and adapters of requests, under vLLM's names, and the arguments of `LLM`'s methods, checked and paired."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict, cast

from nanopage.checks.options import Count, check, check_place
from nanopage.params import BeamSearchParams, PoolingParams, SamplingParams

Prompt = str | list[int] | dict
"""Text, token ids, or a dict with "prompt" or "prompt_token_ids", and optionally "cache_salt" (vLLM's forms).

If a dict has both, the token ids are used, and the text is only returned as `RequestOutput.prompt`. A dict may also
have a field of `ITEM_FIELDS` (text/prompts.py). {"encoder_prompt": ..., "decoder_prompt": ...} is in items/text.py. The
prompt of a conversation also has "reasoning": whether it ends within the model's reasoning; None: it does not think."""

AnyParams = SamplingParams | BeamSearchParams | PoolingParams


class TextPrompt(TypedDict):
    """A prompt of text. Requests share cached prefixes only if they have the same `cache_salt`."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt of token ids. `prompt` is the text to return as `RequestOutput.prompt`."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


@dataclass(frozen=True)
class LoRARequest:
    """The adapter of a request. Names are vLLM's.

    lora_name: for messages, and for clients of a server.
    lora_int_id: from 1; two adapters of an engine have different ones.
    lora_path: a directory with adapter_config.json and adapter_model.safetensors.

    Raises: TypeError, ValueError naming the field.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self):
        check_place(self, "lora_name", "lora_path")
        check("lora_int_id", self.lora_int_id, Count)


AnyAdapter = LoRARequest | Sequence[LoRARequest | None] | None


def list_prompts(
    prompts: Prompt | list[Prompt] | None, token_ids: list[int] | list[list[int]] | None = None
) -> list[Prompt]:
    """A list or tuple as it is, and a single prompt as a list of one.

    Args:
        token_ids: the ids of one prompt, or a list of the ids of each prompt. `prompts` are then their texts, or None.

    Raises: TypeError, ValueError: arguments of another type, or not as many texts as prompts.
    """
    if token_ids is not None:
        return _pair_texts(token_ids, None if prompts is None else list_prompts(prompts))
    if isinstance(prompts, str | dict) or (isinstance(prompts, list) and prompts and isinstance(prompts[0], int)):
        prompts = [cast(Prompt, prompts)]
    if not isinstance(prompts, list | tuple):
        raise TypeError(f"prompts must be a prompt or a list of prompts, not {prompts!r}")
    return cast(list[Prompt], prompts)


def _pair_texts(token_ids: list[int] | list[list[int]], texts: list[Prompt] | None) -> list[Prompt]:
    if not isinstance(token_ids, list | tuple):
        raise TypeError(f"prompt_token_ids must be token ids or a list of them, not {token_ids!r}")
    one = bool(token_ids) and isinstance(token_ids[0], int)
    prompts: list[dict] = [{"prompt_token_ids": ids} for ids in ([token_ids] if one else token_ids)]
    if texts is not None:
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("prompts beside prompt_token_ids must be their texts")
        if len(texts) != len(prompts):
            raise ValueError(f"{len(texts)} prompts beside {len(prompts)} prompt_token_ids")
        for prompt, text in zip(prompts, texts, strict=True):
            prompt["prompt"] = text
    return cast(list[Prompt], prompts)


def match_parameters(
    prompts: list[Prompt],
    params: AnyParams | Sequence[AnyParams],
    priority: int | Sequence[int] | None = None,
    lora_request: AnyAdapter = None,
    kind: type[AnyParams] = SamplingParams,
) -> list[tuple[Prompt, AnyParams, int, LoRARequest | None]]:
    """Each prompt with its parameters, its priority and its adapter.

    Args:
        params: of type `kind`: one object for all prompts, or one for each.
        priority: one integer for all prompts, or one for each; None: 0 for all.
        lora_request: one adapter for all prompts, or one or None for each.

    Raises: TypeError, ValueError: arguments of another type, or lists of another length than `prompts`.
    """
    matched = for_each(params, len(prompts), "sampling_params")
    for each in matched:
        if not isinstance(each, kind):
            raise TypeError(f"sampling_params must be {kind.__name__}, not {each!r}")
    if not isinstance(priority, int | list | tuple | None):
        raise TypeError(f"priority must be an integer, or a list with one for each prompt, not {priority!r}")
    priorities = for_each(
        priority if isinstance(priority, list | tuple) else priority or 0, len(prompts), "values of priority"
    )
    adapters = for_each(lora_request, len(prompts), "values of lora_request")
    return list(zip(prompts, matched, priorities, adapters, strict=True))


def for_each(value: Any, count: int, what: str) -> Sequence[Any]:
    """A list or tuple of `count` values as it is; a single value, `count` times."""
    values = value if isinstance(value, list | tuple) else [value] * count
    if len(values) != count:
        raise ValueError(f"{len(values)} {what} for {count} prompts")
    return values
