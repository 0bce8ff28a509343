"""How a model pools. This is read, as data, from the files of sentence-transformers: modules.json,
1_Pooling/config.json, sentence_bert_config.json and config_sentence_transformers.json.

An unsupported field that would change the result raises an error that names the field.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

from nanopage.checks.overrides import reranker_fields
from nanopage.checks.pooling import SIMILARITIES, Conversion, PoolingConfig, Runner, choice
from nanopage.config.model import ModelConfig
from nanopage.config.options import EngineConfig
from nanopage.device import resolve_device
from nanopage.files.model_files import exists, is_plain_name, read_json, read_json_list, shown

# How 1_Pooling/config.json names them: a flag each in older files, one of the strings in newer files.
FLAGS = {"pooling_mode_cls_token": "CLS", "pooling_mode_lasttoken": "LAST", "pooling_mode_mean_tokens": "MEAN"}
MODES = {"cls": "CLS", "lasttoken": "LAST", "mean": "MEAN"}
# Options of EngineConfig that pooling does not work with, and options that an encoder has no use for. Any value but the
# default is refused.
NOT_FOR_POOLING = (
    "batch_invariant",
    "speculative_config",
    "enable_lora",
    "enable_prompt_embeds",
    "enable_prompt_adapter",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "distributed_executor_backend",
)
NOT_FOR_ENCODERS = (
    *("block_size", "enable_prefix_caching", "kv_cache_dtype", "kv_cache_gib", "gpu_memory_utilization"),
    *("num_gpu_blocks_override", "preemption_mode", "swap_space", "quantization", "generation_config", "seed"),
    "model_impl",
)
TOKENS_OF_ENCODER = {"cpu": 2048, "cuda": 16384}  # default token budget of a step
# Qwen3-Reranker's prompt, from its model card: the text before the pair, the pair, and the text after it.
QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: {}\n"
    "<Document>: {}",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)


class PoolingOptions(Protocol):
    """The options of EngineConfig that choose what a model makes."""

    runner: Runner
    convert: Conversion
    pooler_config: dict | None
    hf_overrides: dict | None


def choose_pooling(
    path: Path,
    made_for: PoolingConfig | None,
    hidden_size: int,
    options: PoolingOptions,
    token_to_id: Callable[[str], int | None],
) -> PoolingConfig | None:
    """What a model makes instead of text; None if it makes text.

    Args:
        path: the model's directory or .gguf file.
        made_for: what the model makes according to config.json's architecture.
        options: the options of EngineConfig.

    Raises: ValueError naming the option that the model does not allow, or a file and its field.
    """
    runner, convert, overrides = options.runner, options.convert, reranker_fields(options.hf_overrides)
    if runner == "generate":
        if made_for is not None:
            raise ValueError(f"runner='generate': {path.name} has no language-model head")
        return None
    has_files = path.is_dir() and exists(path / "modules.json")
    asked = runner == "pooling" or convert in ("embed", "classify") or options.pooler_config or overrides
    if not (asked or has_files or made_for is not None):
        return None
    if not path.is_dir():
        raise ValueError(f"runner='pooling' needs a directory with safetensors, and {path.name} is a .gguf file")
    classifies = made_for is not None and made_for.task == "classify"
    if overrides:
        if made_for is not None:
            raise ValueError(f"hf_overrides: {path.name} has no language-model head that could answer")
        ids = [token_to_id(token) for token in overrides["classifier_from_token"]]
        for token, token_id in zip(overrides["classifier_from_token"], ids, strict=True):
            if token_id is None:
                raise ValueError(f"hf_overrides: classifier_from_token: {shown(token)} is not a token of {path.name}")
        template = QWEN3_RERANKER if overrides.get("is_original_qwen3_reranker") else None
        answers = cast(tuple[int, int], tuple(ids))
        return PoolingConfig("classify", activation="sigmoid", num_labels=1, answers=answers, template=template)
    if classifies:
        if convert == "embed" or options.pooler_config:
            name = "convert='embed'" if convert == "embed" else "pooler_config"
            raise ValueError(f"{name} is for embeddings, and {path.name} is a model that classifies")
        return made_for
    if convert == "classify":
        raise ValueError(f"convert='classify': {path.name} is not a model that classifies: see hf_overrides")
    default = "LAST" if made_for is None else made_for.pooling_type
    pooling = read_embedding(path, default, options.pooler_config, hidden_size)
    if pooling.pooling_type == "CLS" and default == "LAST":
        raise ValueError(f"{path.name}: the pooling type CLS is not for decoders, whose first token sees only itself")
    return pooling


def read_embedding(path: Path, default: str, pooler_config: dict | None, hidden_size: int) -> PoolingConfig:
    """How a model makes embeddings, according to its files. Without a modules.json, embeddings are normalized.

    Args:
        path: the model's directory.
        default: the pooling type without modules.json.
        pooler_config: as in EngineConfig; it has priority.

    Raises: FileNotFoundError; ValueError naming the file and the field.
    """
    options: dict[str, Any] = {"pooling_type": default}
    if exists(path / "modules.json"):
        options = _read_modules(path, hidden_size)
    for name, read in (
        ("sentence_bert_config.json", _read_transformer),
        ("config_sentence_transformers.json", _read_prompts),
    ):
        if exists(path / name):
            options |= read(read_json(path / name), str(path / name))
    return PoolingConfig(**options | (pooler_config or {}))


def _read_modules(path: Path, hidden_size: int) -> dict:
    """What modules.json says: a transformer, a pooling and perhaps a normalization, in this order."""
    file = path / "modules.json"
    modules = read_json_list(file)
    kinds, places = [], []
    for module in modules:
        kind, place = (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(place, str) or not (place == "" or is_plain_name(place)):
            raise ValueError(f"{file}: {shown(module)} is not a module with a type and a plain path")
        kinds.append(kind.rpartition(".")[2])
        places.append(place)
    supported = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
    if kinds not in supported or places[0] not in ("", "."):
        raise ValueError(
            f"{file}: the modules {shown(kinds)} are not supported; supported: Transformer, Pooling, and perhaps "
            "Normalize behind them"
        )
    return {"pooling_type": _read_pooling(path / places[1] / "config.json", hidden_size), "normalize": len(kinds) == 3}


def _read_pooling(file: Path, hidden_size: int) -> str:
    config = read_json(file)
    size = config.get("word_embedding_dimension", config.get("embedding_dimension", hidden_size))
    if size != hidden_size:
        raise ValueError(f"{file}: word_embedding_dimension {shown(size)} is not the model's {hidden_size}")
    if config.get("include_prompt", True) is not True:
        raise ValueError(f"{file}: include_prompt {shown(config['include_prompt'])} is not supported; supported: true")
    flags = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is not False]
    mode = config.get("pooling_mode")
    names = flags if mode is None else [mode]
    found = (
        FLAGS.get(names[0]) if mode is None and len(names) == 1 else MODES.get(mode) if isinstance(mode, str) else None
    )
    if found is None:
        supported = ", ".join(FLAGS)
        raise ValueError(f"{file}: the pooling {shown(names)} is not supported; supported: one of {supported}")
    return found


def _read_transformer(config: dict, source: str) -> dict:
    length = config.get("max_seq_length")
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        raise ValueError(f"{source}: max_seq_length must be a positive integer, got {shown(length)}")
    for name, value in config.items():
        if name in ("do_lower_case", "model_args", "tokenizer_args", "config_args", "processor_args") and value:
            raise ValueError(f"{source}: {name} {shown(value)} is not supported")
    return {"max_seq_length": length}


def _read_prompts(config: dict, source: str) -> dict:
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ValueError(f"{source}: prompts must be texts by name, got {shown(prompts)}")
    if default is not None and default not in list(prompts):  # `in list`, because its type may have no hash
        raise ValueError(f"{source}: default_prompt_name {shown(default)} is not one of its prompts")
    name = choice(config.get("similarity_fn_name") or "cosine", SIMILARITIES, f"{source}: similarity_fn_name")
    if config.get("truncate_dim") is not None:
        raise ValueError(f"{source}: truncate_dim {shown(config['truncate_dim'])} is not supported: give dimensions")
    return {"prompts": prompts, "default_prompt_name": default, "similarity": name}


def check_pooling(config: EngineConfig, model_config: ModelConfig, pooling: PoolingConfig) -> EngineConfig:
    """The options of an engine that makes vectors of texts. Raises: ValueError naming an option."""
    for option in config.given(*NOT_FOR_POOLING):
        raise ValueError(f"{option} does not work with embeddings and scores")
    limit = model_config.max_position_embeddings
    if config.max_model_len is None and pooling.max_seq_length is not None:
        config = replace(config, max_model_len=min(limit, pooling.max_seq_length))
    if model_config.is_encoder:
        for option in config.given(*NOT_FOR_ENCODERS):
            raise ValueError(f"{option} is not for encoders, and {model_config.architecture} is one")
        budget = config.max_num_batched_tokens or TOKENS_OF_ENCODER[resolve_device(config.device).type]
        config = replace(config, max_num_batched_tokens=budget, enable_prefix_caching=False)
    return replace(config, enforce_eager=True)  # compiled steps end with the text head, and encoders gain nothing
