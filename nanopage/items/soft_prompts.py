"""Soft prompts: trained rows that come before the tokens of a prompt, as PEFT saves them.

PROMPT_TUNING (Lester et al. 2021) trains the rows themselves, P_TUNING (Liu et al. 2021) a small network that makes
them. PEFT saves what the network makes, so both are one tensor: `prompt_embeddings` [num_virtual_tokens, hidden_size].
PREFIX_TUNING trains K and V of all layers instead (items/prefixes.py).
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanopage.adapters.files import CONFIG, FLOATS, WEIGHTS
from nanopage.checks.options import Count, check, check_place
from nanopage.config.model import ModelConfig
from nanopage.config.options import EngineConfig
from nanopage.files.model_files import exists, read_json, shown
from nanopage.files.safetensors_checkpoint import opened, read_whole, stored_bytes
from nanopage.inputs import Prompt, for_each
from nanopage.items.embeds import PLACEHOLDER, embeds_item
from nanopage.step import Item
from nanopage.text.prompts import TokenizedPrompt

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MOST_KEPT = 64  # soft prompts in memory, each some hundred KB, or some MB with K and V
TENSOR = "prompt_embeddings"
PREFIX_TUNING = "PREFIX_TUNING"
# Fields of adapter_config.json that change the result, with the values that are supported.
SUPPORTED: dict[str, tuple] = {
    "peft_type": ("PROMPT_TUNING", "P_TUNING", PREFIX_TUNING),
    "task_type": ("CAUSAL_LM",),
    "num_transformer_submodules": (1, None),
    "modules_to_save": (None, []),
}
# Fields that are read elsewhere, or that only say how the rows were trained, or where they come from.
KNOWN = {
    *("num_virtual_tokens", "token_dim", "num_attention_heads", "num_layers", "inference_mode", "auto_mapping"),
    *("base_model_name_or_path", "revision", "peft_version", "prompt_tuning_init", "prompt_tuning_init_text"),
    *("tokenizer_name_or_path", "tokenizer_kwargs", "prompt_tuning_init_state_dict_path", "prompt_tuning_init_task"),
    *("encoder_reparameterization_type", "encoder_hidden_size", "encoder_num_layers", "encoder_dropout"),
    *("prefix_projection", "init_weights"),
}


@dataclass(frozen=True)
class PromptAdapterRequest:
    """The soft prompt of a request. Names are those of vLLM, before it gave up soft prompts.

    prompt_adapter_name: for messages, and for clients of a server.
    prompt_adapter_id: from 1; two soft prompts have different ones.
    prompt_adapter_local_path: a directory with adapter_config.json and adapter_model.safetensors.
    prompt_adapter_num_virtual_tokens: as in its adapter_config.json.

    Raises: TypeError, ValueError naming the field.
    """

    prompt_adapter_name: str
    prompt_adapter_id: int
    prompt_adapter_local_path: str
    prompt_adapter_num_virtual_tokens: int

    def __post_init__(self):
        check_place(self, "prompt_adapter_name", "prompt_adapter_local_path")
        for name in ("prompt_adapter_id", "prompt_adapter_num_virtual_tokens"):
            check(name, getattr(self, name), Count)


def with_prompt_adapters(
    prompts: list[Prompt], requests: PromptAdapterRequest | Sequence[PromptAdapterRequest | None] | None
) -> list[Prompt]:
    """Put soft prompts into prompts: one into all, or one or None into each.

    Raises: ValueError for a list of another length than `prompts`.
    """
    if requests is None:
        return prompts
    made: list[Prompt] = []
    each = for_each(requests, len(prompts), "values of prompt_adapter_request")
    for prompt, request in zip(prompts, each, strict=True):
        name = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
        fields = prompt if isinstance(prompt, dict) else {name: prompt}
        made.append(prompt if request is None else fields | {"prompt_adapter_request": request})
    return made


class SoftPrompts:
    """The soft prompts that requests of an engine name. Those that were used last stay in memory. Threads may share it.

    Args: dtype: what the model computes in.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig, dtype: "torch.dtype"):
        self.config, self.model_config, self.dtype = config, model_config, dtype
        self._kept: OrderedDict[int, tuple[PromptAdapterRequest, Item]] = OrderedDict()  # by id
        self._lock = threading.Lock()

    def read(self, prompt: TokenizedPrompt, request: object) -> None:
        """Put a soft prompt before the tokens of a prompt (see `PromptReader.item_readers`).

        Raises: TypeError, ValueError naming what is wrong with it, also if there is no such file.
        """
        if not isinstance(request, PromptAdapterRequest):
            raise TypeError(f"prompt_adapter_request must be a PromptAdapterRequest or None, not {shown(request)}")
        if not prompt.token_ids:
            raise ValueError("the prompt is empty")
        item = self._item(request)
        prompt.token_ids = [PLACEHOLDER] * item.length + prompt.token_ids
        prompt.items = [item, *(replace(other, position=other.position + item.length) for other in prompt.items)]

    def _item(self, request: PromptAdapterRequest) -> Item:
        number, name = request.prompt_adapter_id, request.prompt_adapter_name
        with self._lock:
            known, item = self._kept.get(number, (None, None))
            if item is None:
                try:
                    item = self._read_item(Path(request.prompt_adapter_local_path).expanduser())
                except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: "~name" without such a user
                    raise ValueError(f"prompt adapter {name!r}: {error}") from None
                known = request
            if known != request:
                raise ValueError(f"prompt_adapter_id={number} is already that of {known}: give {name!r} another one")
            if item.length != (given := request.prompt_adapter_num_virtual_tokens):
                raise ValueError(
                    f"prompt adapter {name!r}: prompt_adapter_num_virtual_tokens={given}, but it has {item.length}"
                )
            self._kept[number] = request, item
            self._kept.move_to_end(number)
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return item

    def _read_item(self, directory: Path) -> Item:
        from nanopage.items.prefixes import prefix_item, prefix_width  # imports torch

        kind, length = read_kind(directory)
        is_prefix = kind == PREFIX_TUNING
        width = prefix_width(self.config, self.model_config) if is_prefix else self.model_config.hidden_size
        item = embeds_item(TENSOR, read_rows(directory, (length, width)), width, self.dtype)
        return prefix_item(item, self.model_config) if is_prefix else item


def read_rows(directory: Path, shape: tuple[int, int]) -> "Tensor":
    """The rows of a soft prompt, of this shape and in the file's dtype.

    Raises: ValueError, OSError naming the file and what is wrong.
    """
    file = directory / WEIGHTS
    if not exists(file):
        raise FileNotFoundError(f"{directory} has no {WEIGHTS}")
    with opened(file) as content:
        stored = stored_bytes(content, file)
        for entry in stored:
            tensor = entry.tensor
            if tensor.name != TENSOR or tensor.shape != shape or tensor.dtype not in FLOATS:
                found = f"{shown(tensor.name)} {list(tensor.shape)} of type {tensor.dtype}"
                raise ValueError(f"{file} has {found}: {TENSOR!r} of shape {list(shape)} in floats was expected")
        if not stored:
            raise ValueError(f"{file} has no tensors")
        return read_whole(content, stored[0])


def read_kind(directory: Path) -> tuple[str, int]:
    """The `peft_type` of a soft prompt, and the number of its tokens. Raises: as `read_rows`."""
    config = directory / CONFIG
    fields: dict[str, Any] = read_json(config)
    for name, values in SUPPORTED.items():
        if (value := fields.get(name)) not in values:
            wanted = " or ".join(map(repr, values))
            raise ValueError(f"{config}: {name}={shown(value)} is not supported; supported: {wanted}")
    for name, value in fields.items():
        if name not in KNOWN and name not in SUPPORTED and value not in (None, False, [], {}, ""):
            raise ValueError(f"{config}: {shown(name)[1:-1]}={shown(value)} is not supported")
    count = fields.get("num_virtual_tokens")
    if type(count) is not int or count < 1:
        raise ValueError(f"{config}: num_virtual_tokens must be an integer from 1, not {shown(count)}")
    return fields["peft_type"], count
