"""config.json with the rotary embeddings and the length of context that the option `hf_overrides` gives it."""

from collections.abc import Mapping
from typing import Any

from nanopage.checks.overrides import OF_CONTEXT, ROPES
from nanopage.config.model import ModelConfig
from nanopage.config.rope import UNROTATED

KEPT = ("rope_theta", "partial_rotary_factor")  # of the model's own rope_parameters, if the new ones lack them


def override(config: dict, overrides: Mapping[str, Any]) -> dict:
    """config.json as a dict, with other values. A new rope takes the place of the whole old one, except for KEPT."""
    changed = config | {name: overrides[name] for name in OF_CONTEXT if name in overrides}
    old = config.get("rope_parameters") or {}
    rope = next((overrides[name] for name in ROPES if name in overrides), None)
    if rope is not None:
        changed |= {"rope_parameters": {name: old[name] for name in KEPT if name in old} | rope, "rope_scaling": None}
        length = "original_max_position_embeddings"
        if config.get(length) is not None and rope.get(length) is not None:  # the field beside a rope has priority
            changed[length] = rope[length]
    for name in ROPES:
        if "rope_theta" in overrides and changed.get(name):
            changed[name] = changed[name] | {"rope_theta": overrides["rope_theta"]}
    return changed


def check_overridden(model: ModelConfig, overrides: Mapping[str, Any]) -> None:
    """Raises: ValueError for a rope of a model that has none, or several."""
    several = model.other_rope not in (None, UNROTATED)
    for name in (*ROPES, "rope_theta"):
        if name in overrides and (several or model.rope == UNROTATED or model.is_encoder):
            how = "several" if several else "no"
            raise ValueError(f"hf_overrides: {name}: {model.architecture} has {how} rotary embeddings")
