"""A decoder whose layers are transformers' own, with our attention.

A module of transformers calls the attention function that its configuration names. Here that is `attention`, which
passes q, K and V to the code that runs the module: a `TransformersDecoder`, or the trial run of probe.py. A step is one
row of tokens, and `position_ids` are their positions in their sequences. No mask function has the name NAME, so no
masks are built. The masks of a trial run show what layers see.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from nanopage.kernels.reference import Scoring
from nanopage.layers.attention import StepContext
from nanopage.models.decoder import Decoder

NAME, TRIAL = "nanopage", "nanopage-trial"  # names of the attention function

_attend: ContextVar[Callable[..., Tensor]] = ContextVar("attend")  # for the module that runs now


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: Any = None, **others: Any
) -> tuple[Tensor, None]:
    """The function that transformers calls. q, k and v are [1, heads, T, head_dim]. Returns: [1, T, heads, head_dim],
    and no weights."""
    return _attend.get()(module, (query, key, value), attention_mask, scaling, others), None


def trial_mask(*, mask_function: Callable[..., Tensor], kv_length: int, **others: Any) -> Tensor:
    """A mask without values. It carries the function that says what a query sees."""
    mask = torch.empty(1, 1, kv_length, kv_length, dtype=torch.bool, device="meta")
    mask.mask_function = mask_function  # type: ignore[attr-defined]
    return mask


AttentionInterface.register(NAME, attention)
AttentionInterface.register(TRIAL, attention)
AttentionMaskInterface.register(TRIAL, trial_mask)


def hidden_states(base: nn.Module, attend: Callable[..., Tensor], **inputs: Tensor) -> Tensor:
    """Run a base model whose layers call `attend(module, (q, k, v), mask, scaling, others)`: [T, hidden_size]."""
    token = _attend.set(attend)
    try:
        return base(**inputs, use_cache=False)[0][0]
    finally:
        _attend.reset(token)


@dataclass
class Hidden(MoeModelOutputWithPast):
    """The output of a base model, with every field that a language model may read."""

    cross_attentions: None = None


class Given(nn.Module):
    """Stands in for a base model: returns the `inputs_embeds` that it is given as hidden states."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **others: Any) -> Hidden:
        return Hidden(last_hidden_state=inputs_embeds)

    @property
    def decoder(self) -> "Given":
        return self  # OPT calls this part of its base model


class TransformersDecoder(Decoder):
    """Does the work of `Decoder` with the modules of a causal language model of transformers.

    Args: windows: of each layer, as in ModelConfig.
    """

    def __init__(self, model: PreTrainedModel, windows: Sequence[int | None]):
        nn.Module.__init__(self)  # not Decoder.__init__: the modules come from `model`
        self.base, self.head, self.windows = model.base_model, model, windows
        self.lm_head = self.norm = model.get_output_embeddings()  # CUDAGraphs reads their size and dtype
        setattr(model, model.base_model_prefix, Given())

    def forward(self, input_ids: Tensor, step: StepContext) -> Tensor:
        """As `Decoder.forward`, but the hidden states have passed the last norm."""
        inputs = {"input_ids": input_ids[None], "position_ids": step.positions[None]}
        hidden = hidden_states(self.base, partial(self.attend, step), **inputs)
        return hidden if step.rows is None else hidden[step.rows]

    def attend(
        self, step: StepContext, module: Any, heads: tuple[Tensor, ...], mask: Any, scaling: Any, others: dict[str, Any]
    ) -> Tensor:
        q, k, v = (part[0].transpose(0, 1).contiguous() for part in heads)
        index, softcap = module.layer_idx, others.get("softcap") or 0.0
        layer = SimpleNamespace(index=index, scoring=Scoring(self.windows[index], scaling, softcap))
        step.write(layer, k, v)
        return step.attend(layer, q)[None]

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Decoder.logits`, for hidden states of `forward`."""
        return self.head(inputs_embeds=hidden[None], use_cache=False).logits[0]
