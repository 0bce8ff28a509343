"""`prompt_embeds` in the body of /v1/completions: base64 of a safetensors file with one tensor. Never of a pickle."""

import base64
import binascii
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from nanopage.aio.async_llm import AsyncLLM
from nanopage.server.errors import ApiError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class EncodedEmbeds:
    """A prompt that is not decoded yet. Its size is limited by that of a body (middleware.py)."""

    text: str
    hidden_size: int

    def __len__(self) -> int:
        """An estimate of its tokens: two bytes for each number."""
        return len(self.text) * 3 // 4 // (2 * self.hidden_size) + 1

    def decode(self) -> "Tensor":
        """The tensor, of any shape and dtype: the engine checks it. Raises: ValueError."""
        from safetensors.torch import load  # imports torch

        try:
            tensors = load(base64.b64decode(self.text, validate=True))
        except binascii.Error as error:
            raise ValueError(f"prompt_embeds is not base64: {error}") from None
        except (SafetensorError, KeyError, ValueError, RuntimeError) as error:  # KeyError: a dtype that torch lacks
            raise ValueError(f"prompt_embeds is not a safetensors file: {str(error)[:200]}") from None
        if len(tensors) != 1:
            raise ValueError(f"prompt_embeds has {len(tensors)} tensors: give one")
        return next(iter(tensors.values()))


def encoded_prompts(llm: AsyncLLM, embeds: str | list[str]) -> list[EncodedEmbeds]:
    """The prompts in the field. Raises: ApiError."""
    if "prompt_embeds" not in llm.engine.input_processor.prompts.item_readers:
        raise ApiError(400, "prompt_embeds needs --enable-prompt-embeds", param="prompt_embeds", code="not_enabled")
    size = llm.engine.model_config.hidden_size
    prompts = [EncodedEmbeds(text, size) for text in ([embeds] if isinstance(embeds, str) else embeds)]
    if not prompts:
        raise ApiError(400, "prompt_embeds is empty", param="prompt_embeds")
    return prompts
