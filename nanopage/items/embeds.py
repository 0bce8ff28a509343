"""Prompt embeddings: prompts that are given as rows of the first layer's input (see docs/prompt-embeddings.md)."""

from typing import TYPE_CHECKING

from nanopage.files.model_files import shown
from nanopage.items.items import make_item
from nanopage.step import Item
from nanopage.text.prompts import TokenizedPrompt

if TYPE_CHECKING:
    import torch

PLACEHOLDER = 0  # the token id where there is none, as in vLLM


def read_embeds(hidden_size: int, dtype: "torch.dtype", prompt: TokenizedPrompt, embeds: object) -> None:
    """Make `embeds` a whole prompt (see `PromptReader.item_readers`).

    Args:
        dtype: what the model computes in.
        embeds: float [T, hidden_size], or [1, T, hidden_size].

    Raises: TypeError, ValueError naming what is wrong.
    """
    if prompt.token_ids:
        raise ValueError("prompt_embeds is a whole prompt: give neither prompt nor prompt_token_ids beside it")
    item = embeds_item("prompt_embeds", embeds, hidden_size, dtype)
    prompt.token_ids, prompt.items = [PLACEHOLDER] * item.length, [item]


def embeds_item(name: str, embeds: object, hidden_size: int, dtype: "torch.dtype") -> Item:
    """An item at the start of a prompt. Args, Raises: as `read_embeds`; name: of `embeds`, for errors."""
    import torch  # takes seconds, and a server with several models needs none

    floats = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    if not isinstance(embeds, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {shown(embeds)}")
    if embeds.dtype not in floats or embeds.layout is not torch.strided or embeds.is_meta:
        kind = f"{embeds.dtype}, {embeds.layout}, on {embeds.device.type}"
        raise ValueError(f"{name} must be a dense tensor of floats, not {kind}")
    rows = embeds[0] if embeds.ndim == 3 and len(embeds) == 1 else embeds
    if rows.ndim != 2 or rows.shape[1] != hidden_size or not len(rows):
        raise ValueError(f"{name} must have the shape [tokens, {hidden_size}], not {list(embeds.shape)}")
    rows = rows.detach().to("cpu", dtype, copy=True)  # the caller may change the original
    if not rows.isfinite().all():
        raise ValueError(f"{name} has values that are not finite in {str(dtype).removeprefix('torch.')}")
    rows = rows.float() if dtype == torch.bfloat16 else rows  # NumPy has no bfloat16
    return make_item("embeds", 0, len(rows), {"embeds": rows.numpy()})
