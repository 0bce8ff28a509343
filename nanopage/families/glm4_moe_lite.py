"""GLM-4.7-Flash (Zhipu AI 2026): DeepSeek-V3's layer under other defaults. `mlp_layer_types` says which layers have a
mixture of experts."""

from dataclasses import replace
from typing import Any

from nanopage.checks.fields import GENERATE, Fields
from nanopage.families import deepseek
from nanopage.files.model_files import shown

ARCHITECTURES = ("Glm4MoeLiteForCausalLM",)
INSTEAD = GENERATE
make_layer, rename = deepseek.make_layer, deepseek.rename


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in deepseek.py."""
    num_layers, first = fields.size("num_hidden_layers"), fields.values.get("first_k_dense_replace", 1)
    kinds = fields.values.get("mlp_layer_types") or ["dense", *["sparse"] * (num_layers - 1)]
    fields.kinds("mlp_layer_types", kinds, num_layers, ("dense", "sparse"))
    if first != 1:  # transformers reads mlp_layer_types only
        raise fields.unsupported("first_k_dense_replace", shown(first), [1])
    fields = replace(fields, values=fields.values | {"first_k_dense_replace": first})
    special = deepseek.read_config(fields, "DeepseekV3ForCausalLM")
    experts = replace(special["experts"], layers=tuple(kind == "sparse" for kind in kinds))
    return special | {"experts": experts, "rms_norm_eps": fields.number("rms_norm_eps", 1e-5)}
