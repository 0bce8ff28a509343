"""ModelConfig from config.json, by the family that has the architecture.

Nothing in config.json is executed. Fields that are not read here, such as `auto_map` and attention back-end names, have
no effect. A field that would change the result and is not supported is an error.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from nanopage.checks.fields import Fields, read_dtype
from nanopage.checks.pooling import PoolingConfig, read_classifier
from nanopage.checks.stored_quantization import FLOATS, read_stored_quantization
from nanopage.config.model import ModelConfig
from nanopage.files.model_files import exists, listed, read_json, shown
from nanopage.models import find_family, load_families
from nanopage.reading.overrides import check_overridden, override
from nanopage.reading.rope import check_rope, read_rope

# What runs instead of a model that is refused.
OTHERS = "model_impl='auto' runs most other decoders"


def config_from_directory(path: Path, overrides: dict | None = None) -> ModelConfig:
    """Read config.json. The end-of-sequence ids are those of config.json and of generation_config.json. ModelOpt may
    have its own file instead of quantization_config.

    Args: overrides: as in `config_from_dict`.
    Raises: FileNotFoundError; ValueError as in `config_from_dict`, naming the file.
    """
    config, of_modelopt = read_json(path / "config.json"), path / "hf_quant_config.json"
    if config.get("quantization_config") is None and exists(of_modelopt):
        fields = Fields(read_json(of_modelopt), str(of_modelopt)).object("quantization")
        config["quantization_config"] = fields.values | {"quant_method": "modelopt"}
    return add_ends(config_from_dict(config, str(path / "config.json"), None, overrides), path)


def add_ends(config: ModelConfig, path: Path) -> ModelConfig:
    """Add the end-of-sequence ids of generation_config.json, if there is one. Raises: ValueError naming a field."""
    file = path / "generation_config.json"
    if not exists(file):
        return config
    more = Fields(read_json(file), str(file)).special_ids(config.vocab_size)
    return replace(config, eos_token_ids=config.eos_token_ids | more)


def has_family(path: Path) -> bool:
    """Whether a family has the architecture of a directory's config.json. Raises: as `config_from_directory`."""
    names = read_json(path / "config.json").get("architectures")
    return isinstance(names, list) and _search(name for name in names if isinstance(name, str)) is not None


def config_from_dict(
    config: dict, source: str = "config.json", instead: str | None = None, overrides: dict | None = None
) -> ModelConfig:
    """`config` is config.json as a dict, with the field names of transformers 4 or 5; `source` is the file's name
    in error messages.

    Args:
        instead: what runs the model if a field is not supported. None: transformers' module, if it is a decoder.
        overrides: the option hf_overrides, of which the fields of the rope count here.

    Raises:
        ValueError: an architecture, rope type, activation or quantization that is not supported, or a field that
            is missing, of the wrong type or out of range, by name.
    """
    fields = Fields(config, source)
    name, architecture, family = _find_family(fields)
    if hasattr(family, "text_fields"):
        fields = family.text_fields(fields)
    fields = replace(fields, values=override(fields.values, overrides or {}))
    if instead is None and name.endswith("ForCausalLM"):
        instead = getattr(family, "INSTEAD", "model_impl='transformers' may run the model")
    fields = replace(fields, instead=instead or "")
    special = _read_family(fields, architecture, family)
    pooling = None
    if name.endswith("ForSequenceClassification"):
        pooling = read_classifier(fields.values, source, fields.num_labels())
    elif name.endswith("Model") and "encoded_positions" not in special:  # MarianMTModel makes text
        pooling = PoolingConfig()
    if pooling is not None and "type_vocab_size" in special:  # an encoder
        pooling = replace(pooling, pooling_type="CLS")
    else:
        _check_causal(fields)
    quantization = None
    if fields.values.get("quantization_config") is not None:
        stored = replace(fields.object("quantization_config"), source=f"{source}: quantization_config", instead=FLOATS)
        quantization = read_stored_quantization(stored)
        if quantization.method == "mxfp4" and not (special.get("experts") and special["experts"].swiglu):
            raise stored.unsupported("quant_method", f"'mxfp4' of {architecture}")
    vocab_size = fields.size("vocab_size")
    model = ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=fields.size("hidden_size"),
        num_layers=fields.size("num_hidden_layers"),
        dtype=special.pop("dtype", None) or read_dtype(fields),
        eos_token_ids=fields.special_ids(vocab_size),
        quantization=quantization,
        pooling=pooling,
        **special,
    )
    check_overridden(model, overrides or {})
    return model


def _find_family(fields: Fields) -> tuple[str, str, ModuleType]:
    """The name in config.json, the architecture, and the module that has it."""
    names = fields.values.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise fields.error("architectures", f"must be a list of names, got {shown(names)}")
    if (found := _search(names or [])) is not None:
        return found
    families = {re.sub("(For|Model).*", "", name): None for family in load_families() for name in family.ARCHITECTURES}
    raise replace(fields, instead=OTHERS).unsupported("architectures", f"{shown(names):.80}", [listed(families)])


def _search(names: Iterable[str]) -> tuple[str, str, ModuleType] | None:
    """As `_find_family`. None: no family here has one of these names."""
    for name in names:
        for architecture in (_causal(name), name):
            if (family := find_family(architecture)) is not None:
                return name, architecture, family
    return None


def _read_family(fields: Fields, architecture: str, family: ModuleType) -> dict[str, Any]:
    """The result of the family's `read_config`, with default values for the fields that it leaves out."""
    special = family.read_config(fields, architecture)
    needed = {"num_heads": "num_attention_heads", "intermediate_size": "intermediate_size"}
    for name, there in (needed | {"max_position_embeddings": "max_position_embeddings"}).items():
        if name not in special:
            special[name] = fields.size(there)
    num_heads = special["num_heads"]
    if "num_kv_heads" not in special:
        special["num_kv_heads"] = fields.size("num_key_value_heads", num_heads)
    if "head_dim" not in special:
        special["head_dim"] = fields.size("head_dim", fields.size("hidden_size") // num_heads)
    if "activation" not in special:
        special["activation"] = fields.activation("hidden_act")
    if "rope" not in special:
        special["rope"] = read_rope(fields)
    windows = special["sliding_windows"] = special.get("sliding_windows") or (None,) * fields.size("num_hidden_layers")
    if special.get("other_rope") is not None:
        with_window = frozenset(index for index, window in enumerate(windows) if window is not None)
        special.setdefault("other_rope_layers", with_window)
    special.setdefault("rms_norm_eps", fields.number("rms_norm_eps", 1e-6))
    special.setdefault("tie_word_embeddings", fields.flag("tie_word_embeddings"))
    if "experts" in special and special["activation"] not in (known := getattr(family, "OF_EXPERTS", ("silu",))):
        raise fields.unsupported("hidden_act", f"{special['activation']!r} with experts", known)
    num_kv_heads, head_dim = special["num_kv_heads"], special["head_dim"]
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_attention_heads", f"{num_heads} is not a multiple of num_key_value_heads={num_kv_heads}"
        )
    if head_dim % 2:
        raise fields.error("head_dim", f"{head_dim} is odd: rotary embeddings need pairs")
    ropes = special["rope"], special.get("other_rope")
    for rope, size in zip(ropes, (special.get("full_heads", (0, head_dim))[1], head_dim), strict=True):
        if rope is not None:
            check_rope(fields, rope, size)
    return special


def _check_causal(fields: Fields) -> None:
    for name, causal in (("is_causal", True), ("use_bidirectional_attention", False)):
        if fields.values.get(name) is not None and fields.flag(name, causal) != causal:
            raise fields.unsupported(name, f"{str(not causal).lower()} of a decoder")


def _causal(architecture: str) -> str:
    """The name of the model with a language-model head, for a model that has a classifier or no head: Qwen3Model ->
    Qwen3ForCausalLM."""
    return re.sub("(Model|ForSequenceClassification)$", "ForCausalLM", architecture)
