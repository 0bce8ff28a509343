"""What a model makes of a text instead of more text: an embedding, or scores of classes.

`PoolingConfig` says how. How an embedding model pools is read as data from the files of sentence-transformers:
modules.json, 1_Pooling/config.json, sentence_bert_config.json and config_sentence_transformers.json. A field in them
that would change the result and is not supported is an error that names it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import numpy as np

from nanopage.config.checked import Flag, check
from nanopage.files.model_files import exists, is_plain_name, read_json, read_json_list, shown

Runner = Literal["auto", "generate", "pooling"]
Conversion = Literal["auto", "none", "embed", "classify"]
POOLER_CONFIG = {"pooling_type": Literal["CLS", "LAST", "MEAN"], "normalize": Flag}
# How 1_Pooling/config.json names them: a flag each in older files, one of the strings in newer files.
FLAGS = {"pooling_mode_cls_token": "CLS", "pooling_mode_lasttoken": "LAST", "pooling_mode_mean_tokens": "MEAN"}
MODES = {"cls": "CLS", "lasttoken": "LAST", "mean": "MEAN"}
SIMILARITIES = ("cosine", "dot")
ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Softmax": "softmax",
}
# Options of EngineConfig that pooling on a decoder does not work with.
NOT_FOR_POOLING = (
    "speculative_config",
    "enable_lora",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "distributed_executor_backend",
)
OVERRIDES = ("architectures", "classifier_from_token", "is_original_qwen3_reranker")
# Qwen3-Reranker's prompt, from its model card: before the pair, the pair, and behind it.
QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: {}\n"
    "<Document>: {}",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)


@dataclass(frozen=True)
class PoolingConfig:
    """How a model makes a vector of a text.

    task: "embed" or "classify".
    pooling_type: which hidden states of the last layer make the vector: the first token's ("CLS"), the last token's
        ("LAST"), or the mean of all ("MEAN").
    normalize: whether embeddings are scaled to length 1, unless a request says otherwise.
    activation: of the scores of classes: "identity", "sigmoid" or "softmax".
    num_labels: how many classes there are; 0 for embeddings. A model with one class scores texts, or pairs of texts.
    similarity: of two embeddings: "cosine" or "dot".
    max_seq_length: most tokens of a text; None: as many as the model has positions for.
    prompts, default_prompt_name: texts that go before the texts to embed, by name.
    answers: two token ids, such as those of "no" and "yes". A text is scored by how much likelier the second one is to
        follow than the first.
    template: the texts before a pair, of a pair, and behind it; None: the two texts alone.
    """

    task: str = "embed"
    pooling_type: str = "LAST"
    normalize: bool = True
    activation: str = "identity"
    num_labels: int = 0
    similarity: str = "cosine"
    max_seq_length: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    answers: tuple[int, int] | None = None
    template: tuple[str, str, str] | None = None

    @property
    def scores(self) -> bool:
        """Whether the model itself scores a pair. An embedding model compares the embeddings of its two texts."""
        return self.task == "classify" and self.num_labels == 1

    def prompt_for(self, name: str | None) -> str:
        """The text that goes before a text to embed. Raises: ValueError for a name that the model's files lack."""
        name = self.default_prompt_name if name is None else name
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise ValueError(f"prompt_name={name!r} is not one of the model's prompts: {known}")
        return self.prompts[name]


def similarity(first: np.ndarray, second: np.ndarray, config: PoolingConfig) -> float:
    """How alike two embeddings are."""
    product = float(first @ second)
    if config.similarity == "dot":
        return product
    return product / max(float(np.linalg.norm(first) * np.linalg.norm(second)), 1e-12)


def check_pooling_options(pooler_config: dict | None, hf_overrides: dict | None) -> None:
    """Check the options of EngineConfig of these names. Raises: ValueError, TypeError naming the option."""
    for key, value in (pooler_config or {}).items():
        if key not in POOLER_CONFIG:
            raise ValueError(
                f"pooler_config has {shown(key)}, which is not supported; supported: {', '.join(POOLER_CONFIG)}"
            )
        check(f"pooler_config: {key}", value, POOLER_CONFIG[key])
    overrides = hf_overrides or {}
    for key in overrides:
        if key not in OVERRIDES:
            raise ValueError(
                f"hf_overrides has {shown(key)}, which is not supported; supported: {', '.join(OVERRIDES)}"
            )
    if not overrides:
        return
    names = overrides.get("architectures")
    if not (isinstance(names, list) and len(names) == 1 and str(names[0]).endswith("ForSequenceClassification")):
        raise ValueError(f"hf_overrides: architectures must be one ...ForSequenceClassification, not {shown(names)}")
    tokens = overrides.get("classifier_from_token")
    if not (isinstance(tokens, list) and len(tokens) == 2 and all(isinstance(token, str) for token in tokens)):
        raise ValueError(f"hf_overrides: classifier_from_token must be two tokens, not {shown(tokens)}")
    name = "is_original_qwen3_reranker"
    check(f"hf_overrides: {name}", overrides.get(name, False), Flag)


class PoolingOptions(Protocol):
    """The options of EngineConfig that say what a model makes."""

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
    """What a decoder makes instead of text; None: it makes text.

    Args:
        path: the model's directory or .gguf file.
        made_for: what config.json's architecture says.
        options: those of EngineConfig.

    Raises: ValueError naming the option that the model does not allow, or a file and its field.
    """
    runner, convert, overrides = options.runner, options.convert, options.hf_overrides
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
    pooling = read_embedding(path, "LAST", options.pooler_config, hidden_size)
    if pooling.pooling_type == "CLS":
        raise ValueError(f"{path.name}: the pooling type CLS is not for decoders, whose first token sees only itself")
    return pooling


def read_classifier(config: dict, source: str, num_labels: int) -> PoolingConfig:
    """How a model ...ForSequenceClassification scores classes, for a decoder: by its last token.

    Args: config: config.json; source: its name. Raises: ValueError naming the field.
    """
    known = {
        "regression": "identity",
        "multi_label_classification": "sigmoid",
        "single_label_classification": "softmax",
    }
    problem = config.get("problem_type")
    activation = "softmax" if problem is None else known[_choice(problem, known, f"{source}: problem_type")]
    if num_labels == 1 and activation == "softmax":
        activation = "sigmoid"
    section = config.get("sentence_transformers")
    section = section if isinstance(section, dict) else {}
    name = section.get("activation_fn", config.get("sbert_ce_default_activation_function"))
    if name is not None:
        activation = ACTIVATIONS[_choice(name, ACTIVATIONS, f"{source}: the activation")]
    return PoolingConfig("classify", activation=activation, num_labels=num_labels)


def read_embedding(path: Path, default: str, pooler_config: dict | None, hidden_size: int) -> PoolingConfig:
    """How a model makes embeddings, according to its files. Without a modules.json, they are normalized.

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
    if default is not None and default not in list(prompts):  # it may be of a type that has no hash
        raise ValueError(f"{source}: default_prompt_name {shown(default)} is not one of its prompts")
    name = _choice(config.get("similarity_fn_name") or "cosine", SIMILARITIES, f"{source}: similarity_fn_name")
    if config.get("truncate_dim") is not None:
        raise ValueError(f"{source}: truncate_dim {shown(config['truncate_dim'])} is not supported: give dimensions")
    return {"prompts": prompts, "default_prompt_name": default, "similarity": name}


def _choice(value: Any, known: Iterable[str], place: str) -> str:
    """A value of a JSON file, of any type, that must be one of `known`. Raises: ValueError that begins with `place`."""
    names = tuple(known)
    if value not in names:
        raise ValueError(f"{place} {shown(value)} is not supported; supported: {', '.join(names)}")
    return value
