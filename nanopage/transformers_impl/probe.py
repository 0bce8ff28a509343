"""A trial run of a module of transformers, without memory for its weights. It finds out what attention layers need.

A module is refused if it keeps more than K and V of each layer, or needs attention that our operators do not have.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from nanopage.transformers_impl.decoder import TRIAL, TransformersDecoder, hidden_states

NUM_TOKENS = 7
# Arguments of attention that are accepted. Our operators have softcap. The others change nothing: the mask shows the
# window, and there is no dropout.
HARMLESS = (
    *("dropout", "sliding_window", "position_ids", "position_embeddings", "cache_position"),
    *("use_cache", "output_attentions", "softcap"),
)


@torch.inference_mode()
def probe(config: PreTrainedConfig, longest: int) -> dict[str, Any]:
    """Run the causal language model of `config`. Args: longest: the most tokens of a sequence.

    Returns: fields of ModelConfig.

    Raises: ValueError with the reason why nanopage cannot run the module; anything that the module raises.
    """
    with torch.device("meta"):
        # Experts computed in this way do not look at values, which do not exist here.
        options: dict[str, Any] = {"attn_implementation": TRIAL, "experts_implementation": "batched_mm"}
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **options).eval()
        ids = torch.zeros(1, NUM_TOKENS, dtype=torch.int64)
    check_modules(model)
    calls: list[tuple[Any, int | None, tuple[int, int, int]]] = []  # (layer, window, sizes of heads)
    window_of = cache(lambda mask_function: find_window(mask_function, longest))

    def record(module: Any, heads: tuple[Tensor, ...], mask: Any, scaling: Any, others: dict[str, Any]) -> Tensor:
        q, k, v = heads
        if unknown := [name for name, value in others.items() if value is not None and name not in HARMLESS]:
            raise ValueError(f"its attention takes {', '.join(unknown)}, which ours does not")
        if k.shape != v.shape or any((len(x), *x.shape[2:]) != (1, NUM_TOKENS, q.shape[3]) for x in heads):
            shapes = [tuple(part.shape) for part in heads]
            raise ValueError(f"its q, k and v are not one head_dim wide, or not those of each token: {shapes}")
        if not hasattr(mask, "mask_function"):
            raise ValueError("its attention has a mask or a bias of its own")
        sizes = q.shape[1], k.shape[1], q.shape[3]
        calls.append((getattr(module, "layer_idx", None), window_of(mask.mask_function), sizes))
        return q.transpose(1, 2)

    # With a mask of tokens, transformers does not search the positions for several sequences.
    inputs = {"input_ids": ids, "position_ids": ids, "attention_mask": ids + 1}
    hidden = hidden_states(model.base_model, record, **inputs)
    layers, windows, sizes = zip(*calls, strict=True) if calls else ((), (), ())
    if not calls or layers != (*range(config.num_hidden_layers),):
        raise ValueError("its layers do not use transformers' AttentionInterface, or not once each in order")
    if len({*sizes}) > 1:
        raise ValueError(f"its layers differ in num_heads, num_kv_heads and head_dim: {sorted({*sizes})}")
    shape: dict[str, Any] = dict(zip(("num_heads", "num_kv_heads", "head_dim"), sizes[0], strict=True))
    vocab_size = TransformersDecoder(model, windows).logits(hidden).shape[1]
    own = {"num_layers": len(calls), "hidden_size": hidden.shape[1], "vocab_size": vocab_size}
    return shape | own | {"sliding_windows": windows}


def check_modules(model: Any) -> None:
    """Raises: ValueError if a model is more than a decoder with K and V of each layer, or takes no positions."""
    config, base = model.config, model.base_model
    if model._is_stateful or any(isinstance(module, nn.Conv1d | nn.RNNBase) for module in model.modules()):
        raise ValueError("it keeps a state besides K and V")
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise ValueError("it attends to an encoder")
    if "position_ids" not in inspect.signature(base.forward).parameters:
        raise ValueError("it takes no position_ids")
    if base is model or config.sub_configs or not isinstance(model.get_output_embeddings(), nn.Linear):
        raise ValueError("it is not a decoder with a linear head")
    if any(f"'rope_type': '{kind}'" in str(config.to_dict()) for kind in ("dynamic", "longrope")):
        raise ValueError("its rotary embeddings depend on the longest sequence of a step")


def find_window(mask_function: Callable[..., Tensor], longest: int) -> int | None:
    """The window of a mask, as in Scoring.

    Args: mask_function: transformers' function that says whether a query sees a key, by positions.
    Raises: ValueError for a mask that is not simply causal, with or without a window.
    """
    keys, zero = torch.arange(longest), torch.tensor(0)

    def seen(query: int) -> Tensor:
        return torch.as_tensor(mask_function(zero, zero, torch.tensor(query), keys)).expand(longest)

    window = int(seen(longest - 1).sum())
    for query in {0, 1, window - 1, window, window + 1, longest // 3, longest // 2, longest - 1}:
        if 0 <= query < longest and not torch.equal(seen(query), (keys <= query) & (keys > query - window)):
            raise ValueError("its attention is not causal, with a sliding window or without")
    return window if window < longest else None
