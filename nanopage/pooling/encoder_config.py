"""EncoderConfig: config.json of an encoder, read as data. See models/read_config.py for what that means."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from nanopage.checks.fields import Fields, read_dtype
from nanopage.checks.pooling import PoolingConfig, read_classifier
from nanopage.config.options import EngineConfig
from nanopage.files.model_files import exists, read_json, shown
from nanopage.pooling import bert, roberta
from nanopage.pooling.files import read_embedding

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
# Options that an encoder has no use for: anything but the default is refused. It heeds enforce_eager: it always is.
NOT_FOR_ENCODERS = (
    "block_size",
    "enable_prefix_caching",
    "kv_cache_dtype",
    "kv_cache_gib",
    "gpu_memory_utilization",
    "num_gpu_blocks_override",
    "preemption_mode",
    "swap_space",
    "quantization",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "distributed_executor_backend",
    "speculative_config",
    "enable_lora",
    "load_format",
    "generation_config",
    "seed",
    "hf_overrides",
)


def find_encoder(architecture: str) -> ModuleType | None:
    """The module of the family that has an architecture, such as "BertModel"."""
    return next((family for family in (bert, roberta) if architecture in family.ARCHITECTURES), None)


@dataclass(frozen=True)
class EncoderConfig:
    """The shape of an encoder.

    num_positions: rows of the position embeddings. The first token has row `first_position`.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_positions: int
    first_position: int
    type_vocab_size: int
    layer_norm_eps: float
    hidden_act: str
    dtype: str
    pooling: PoolingConfig
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def max_position_embeddings(self) -> int:
        """Most tokens of a text."""
        return self.num_positions - self.first_position


def read_encoder(path: Path, engine: EngineConfig) -> EncoderConfig | None:
    """The configuration of an encoder's directory; None if the model is not an encoder.

    Raises: FileNotFoundError; ValueError naming a file and field, or an option that is not for encoders.
    """
    file = path / "config.json"
    if not path.is_dir() or not exists(file):
        return None
    values = read_json(file)
    names = values.get("architectures")
    names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    found = next(((name, family) for name in names if (family := find_encoder(name)) is not None), None)
    if found is None:
        return None
    architecture, family = found
    for option in engine.given(*NOT_FOR_ENCODERS):
        raise ValueError(f"{option} is not for encoders, and {path.name} is one")
    if engine.runner == "generate":
        raise ValueError(f"runner='generate': {path.name} is an encoder, which makes no text")
    config = _read_shape(Fields(values, str(file)), architecture, family)
    classifies = architecture.endswith("ForSequenceClassification")
    wanted = {"embed": False, "classify": True}.get(engine.convert, classifies)
    if wanted != classifies:
        raise ValueError(f"convert={engine.convert!r}: {path.name} is a {architecture}")
    if not classifies:
        pooling = read_embedding(path, "CLS", engine.pooler_config, config.hidden_size)
        return replace(config, pooling=pooling)
    if engine.pooler_config:
        raise ValueError(f"pooler_config is for embeddings, and {path.name} is a {architecture}")
    return replace(config, pooling=read_classifier(values, str(file), Fields(values, str(file)).num_labels()))


def _read_shape(fields: Fields, architecture: str, family: ModuleType) -> EncoderConfig:
    values = fields.values
    if values.get("position_embedding_type", "absolute") != "absolute":
        kind = shown(values["position_embedding_type"])
        raise fields.error("position_embedding_type", f"{kind} is not supported; supported: absolute")
    for name in ("is_decoder", "add_cross_attention"):
        if fields.flag(name):
            raise fields.error(name, "true is not supported")
    if values.get("quantization_config") is not None:
        raise fields.error("quantization_config", "is not supported for encoders")
    activation = values.get("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise fields.error("hidden_act", f"{shown(activation)} is not supported; supported: {', '.join(ACTIVATIONS)}")
    hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if hidden_size % num_heads:
        raise fields.error("hidden_size", f"{hidden_size} is not a multiple of num_attention_heads={num_heads}")
    vocab_size = fields.size("vocab_size")
    fields.special_ids(vocab_size)
    pad_token_id = values.get("pad_token_id")
    first = family.first_position(pad_token_id if isinstance(pad_token_id, int) else 1)
    num_positions = fields.size("max_position_embeddings")
    if num_positions <= first:
        raise fields.error("max_position_embeddings", f"must be more than {first}, got {num_positions}")
    return EncoderConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=fields.size("num_hidden_layers"),
        num_heads=num_heads,
        num_positions=num_positions,
        first_position=first,
        type_vocab_size=fields.size("type_vocab_size"),
        layer_norm_eps=fields.number("layer_norm_eps", 1e-12),
        hidden_act=activation,
        dtype=read_dtype(fields),
        pooling=PoolingConfig(),
    )
