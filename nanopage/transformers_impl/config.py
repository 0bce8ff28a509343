"""Reads config.json for a module of transformers, as data. A trial run finds the shape of the model.

Fields that name code, kernels or files have no effect.
"""

from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from nanopage.checks.fields import MAX_SIZES, Fields, read_dtype
from nanopage.config.model import ModelConfig
from nanopage.config.options import EngineConfig
from nanopage.config.rope import RopeConfig
from nanopage.files.model_files import read_json, shown
from nanopage.reading.config import add_ends, config_from_directory, has_family
from nanopage.transformers_impl.decoder import TRIAL
from nanopage.transformers_impl.probe import probe
from nanopage.weights.loader import Checkpoint

# Ignored, like names that begin with "_". nanopage itself sets the dtype and the outputs of a module.
IGNORED = {
    *("auto_map", "attn_implementation", "experts_implementation", "fusion_config", "transformers_weights"),
    *("distributed_config", "kernel_config", "custom_pipelines", "name_or_path", "dtype", "torch_dtype"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "torchscript"),
}
NOT_HERE = (
    *("tensor_parallel_size", "pipeline_parallel_size", "distributed_executor_backend", "quantization"),
    *("enable_lora", "load_format", "convert", "pooler_config", "hf_overrides"),
)
LONGEST = 2**20  # positions. Masks are compared at all positions


def read_config(options: EngineConfig, checkpoint: Checkpoint) -> ModelConfig:
    """The shape of a model that runs by transformers' own module.

    Raises: FileNotFoundError; ValueError naming an option, a field, or the reason why the module is not supported.
    """
    if not isinstance(checkpoint, Path):
        raise ValueError(f"{checkpoint.path}: model_impl='transformers' reads no .gguf files; model_impl='auto' does")
    if (module := read_module(checkpoint)) is None:
        return config_from_directory(checkpoint, options.hf_overrides)  # a family has it
    config, fields = module
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    name, positions = model_class.__name__, getattr(config, "max_position_embeddings", None)
    for option in options.given(*NOT_HERE):
        problem = f"{option} does not work with {name}, which transformers' own module computes"
        raise ValueError(f"{problem}; {elsewhere(checkpoint, 'the model runs without the option')}")
    longest = min(positions, LONGEST) if isinstance(positions, int) and positions > 0 else LONGEST
    try:
        shape = probe(config, longest)
    except Exception as error:  # of any kind, because the module is not ours
        why = str(error) if type(error) is ValueError else f"a trial run raised {type(error).__name__}: {error}"
        why = "its attention does not use transformers' AttentionInterface" if TRIAL in why else why
        problem = f"{fields.source}: {name} does not run by transformers' own module: {why:.120}"
        raise ValueError(f"{problem}; {elsewhere(checkpoint)}") from error
    if not isinstance(positions, int) or positions < 1:
        raise ValueError(f"{fields.source}: {name} has no max_position_embeddings; {elsewhere(checkpoint)}")
    # Nobody asks for these.
    shape |= {"intermediate_size": 0, "rms_norm_eps": 0.0, "rope": RopeConfig(0.0), "tie_word_embeddings": False}
    eos_token_ids, dtype = fields.special_ids(shape["vocab_size"]), read_dtype(fields)
    shape |= {"architecture": name, "max_position_embeddings": longest, "model_impl": "transformers"}
    return add_ends(ModelConfig(**shape, dtype=dtype, eos_token_ids=eos_token_ids), checkpoint)


def elsewhere(path: Path, otherwise: str = "transformers' own generate() runs it") -> str:
    """What runs a model that is refused here, for an error message."""
    return "model_impl='auto' runs it" if has_family(path) else otherwise


def read_module(path: Path) -> tuple[PreTrainedConfig, Fields] | None:
    """config.json as transformers' class, and as plain fields. None: transformers has no such causal language model,
    but a family here has the architecture.

    Raises: FileNotFoundError; ValueError naming a field, or what neither has.
    """
    fields = Fields(read_json(path / "config.json"), str(path / "config.json"))
    kind, names = fields.values.get("model_type"), fields.values.get("architectures")
    config_class: Any = CONFIG_MAPPING[kind] if isinstance(kind, str) and kind in CONFIG_MAPPING else None
    model_class = None if config_class is None else MODEL_FOR_CAUSAL_LM_MAPPING.get(config_class, None)
    if not isinstance(names, list) or getattr(model_class, "__name__", None) not in names:
        if isinstance(names, list) and not has_family(path):
            raise _unknown(fields, model_class)
        return None
    if fields.values.get("quantization_config") is not None:
        instead = elsewhere(path, "the checkpoint that is not quantized may run")
        raise fields.error("quantization_config", f"is not supported for transformers' own modules; {instead}")
    for name, most in MAX_SIZES.items():
        for known_as in {name, config_class.attribute_map.get(name, name)}:
            if isinstance(value := fields.values.get(known_as), int) and value > most:
                raise fields.error(known_as, f"must be at most {most:,}, got {shown(value)}")
    try:
        return config_class(**_filtered(fields.values)), fields
    except Exception as error:  # of any kind, as above
        text = f"transformers {transformers.__version__} refuses it: {type(error).__name__}: {error}"
        raise ValueError(f"{fields.source}: {text:.250}") from error


def _unknown(fields: Fields, model_class: Any) -> ValueError:
    """The error for an architecture that neither nanopage nor transformers has as a causal language model."""
    names, version = shown(fields.values["architectures"]), fields.values.get("transformers_version")
    problem = f"{names:.80} is not a decoder of nanopage or of transformers {transformers.__version__}"
    if model_class is not None:
        return fields.error("architectures", f"{problem}; a checkpoint of {model_class.__name__} may run")
    if isinstance(fields.values.get("text_config"), dict):
        return fields.error("architectures", f"{problem}; a checkpoint of its text model alone may run")
    return fields.error("architectures", f"{problem}; transformers {shown(version)}, which wrote the file, may have it")


def _filtered(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that may have an effect, also in nested objects."""
    kept = {name: value for name, value in fields.items() if not name.startswith("_") and name not in IGNORED}
    return {name: _filtered(value) if isinstance(value, dict) else value for name, value in kept.items()}
