"""ModelConfig: config.json read as data.

Nothing in config.json is executed. Fields that are not read here, such as `auto_map` and attention back-end names, have
no effect. A field that would change the result and is not supported is an error.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from nanopage.config.fields import ExpertsConfig, Fields, read_dtype
from nanopage.config.pooling import PoolingConfig, read_classifier
from nanopage.config.rope import RopeConfig, check_rope, read_rope
from nanopage.files.model_files import exists, read_json, shown

STORED_QUANTIZATIONS = ("awq", "gptq")  # those of a checkpoint, which `quantization` may only repeat
GROUP_SIZES = (32, 64, 128)  # inputs that share a scale in a checkpoint of one of them

# What AWQ and GPTQ checkpoints of models with experts leave as floats: the head, and what chooses experts.
EXPERT_GATES = re.compile(r"lm_head|(model\.layers\.\d+\.)?((mlp|block_sparse_moe)\.)?(shared_expert_)?gate")


@dataclass(frozen=True)
class StoredQuantization:
    """How the linear layers of a checkpoint, except the head, are stored (see quantization/quantized_checkpoint.py).

    method: "awq", with 4 bits, or "gptq", with 4 or 8.
    group_size: inputs that share a scale and a zero point; None: all inputs.
    desc_act: whether the inputs of a group are not adjacent (GPTQ's act-order).
    zero_offset: what is added to the stored zero points: 1 in GPTQ's first format.
    """

    method: str
    bits: int
    group_size: int | None
    desc_act: bool = False
    zero_offset: int = 0

    @classmethod
    def from_fields(cls, fields: "Fields", has_experts: bool = False) -> "StoredQuantization":
        """`fields` is quantization_config. Raises: ValueError naming what is not supported."""
        method = fields.values.get("quant_method")
        if method not in STORED_QUANTIZATIONS:
            supported = ", ".join(STORED_QUANTIZATIONS)
            raise fields.error("quant_method", f"{shown(method)} is not supported; supported: {supported}")
        layouts, default = (("gemm",), "gemm") if method == "awq" else (("gptq", "gptq_v2"), "gptq")
        layout = default
        for name in ("version", "format") if method == "awq" else ("checkpoint_format", "format"):
            value = fields.values.get(name)
            if value is not None:
                layout = value.lower() if isinstance(value, str) else value
                if layout not in layouts:
                    raise fields.error(name, f"{shown(value)} is not supported; supported: {', '.join(layouts)}")
        bits = fields.choice("bits", (4,) if method == "awq" else (4, 8))
        group_size = fields.choice("group_size", (*GROUP_SIZES, -1))
        if method == "awq" and not fields.flag("zero_point", True):
            raise fields.error("zero_point", "false is not supported; supported: true")
        skipped = fields.values.get("modules_to_not_convert") or []
        known = EXPERT_GATES if has_experts else re.compile("lm_head")
        if not isinstance(skipped, list) or not all(
            isinstance(name, str) and known.fullmatch(name) for name in skipped
        ):
            also = " and the gates of experts" if has_experts else ""
            raise fields.error("modules_to_not_convert", f"{shown(skipped)} is not supported, except for lm_head{also}")
        for name in ("lm_head", "is_marlin_format"):
            if fields.flag(name):
                raise fields.error(name, "true is not supported")
        for name in ("dynamic", "modules_in_block_to_quantize"):  # other settings for some of the layers
            if fields.values.get(name):
                raise fields.error(name, f"{shown(fields.values[name])} is not supported")
        if fields.values.get("pack_dtype", "int32") != "int32":
            raise fields.error("pack_dtype", f"{shown(fields.values['pack_dtype'])} is not supported; supported: int32")
        return cls(
            method=method,
            bits=bits,
            group_size=None if group_size == -1 else group_size,
            desc_act=method == "gptq" and fields.flag("desc_act"),
            zero_offset=int(method == "gptq" and layout == "gptq"),
        )


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer, whatever config.json called it.

    Fields that only some families have, beside their defaults:

    activation: of the feed-forward layer, one of ACTIVATIONS.
    norm_offset: as in layers/norm.py.
    attention_scale: of the products of q and K. None: head_dim ** -0.5.
    attention_softcap, logit_softcap: x becomes softcap * tanh(x / softcap), for the scores of attention and for logits.
        0: x stays.
    embedding_scale, residual_scale: factors of embeddings, and of what each layer adds to the hidden states.
    logit_divisor: logits are divided by it.
    local_rope: the rope of layers with a window. None: `rope`, as in other layers.
    undivided: why tensor parallelism does not work with the family.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    sliding_windows: tuple[int | None, ...]  # one per layer; None attends to everything
    dtype: str
    eos_token_ids: frozenset[int]
    quantization: StoredQuantization | None = None
    experts: ExpertsConfig | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    norm_offset: float | None = None
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    local_rope: RopeConfig | None = None
    undivided: str | None = None
    pooling: PoolingConfig | None = None  # what is made instead of text

    def for_length(self, max_model_len: int | None) -> "ModelConfig":
        """The same for sequences of up to `max_model_len` tokens. None: for the model's own limit."""
        return self if max_model_len is None else replace(self, rope=self.rope.for_length(max_model_len))

    def divided(self, tp_size: int, expert_parallel: bool = False) -> "ModelConfig":
        """The shape of what each of `tp_size` workers has of every layer.

        Heads, inputs of the feed-forward layer and the vocabulary are divided. Where there are fewer KV heads than
        workers, several workers have the same one. With `expert_parallel`, experts stay whole.

        Raises: ValueError naming a size that cannot be divided, or a family.
        """
        if tp_size > 1 and self.undivided is not None:
            raise ValueError(f"tensor_parallel_size={tp_size} does not work with {self.architecture}: {self.undivided}")
        sizes = {
            "num_heads": "num_attention_heads",
            "intermediate_size": "intermediate_size",
            "vocab_size": "vocab_size",
        }
        if self.experts is not None and all(self.experts.layers):
            del sizes["intermediate_size"]  # no layer has it
        for name, known_as in sizes.items():
            if getattr(self, name) % tp_size:
                raise ValueError(f"tensor_parallel_size={tp_size} does not divide {known_as}={getattr(self, name)}")
        if self.num_kv_heads % tp_size and tp_size % self.num_kv_heads:
            raise ValueError(
                f"tensor_parallel_size={tp_size} is neither a divisor nor a multiple of num_key_value_heads="
                f"{self.num_kv_heads}"
            )
        return replace(
            self,
            num_heads=self.num_heads // tp_size,
            num_kv_heads=max(1, self.num_kv_heads // tp_size),
            intermediate_size=self.intermediate_size // tp_size,
            vocab_size=self.vocab_size // tp_size,
            experts=None if self.experts is None else self.experts.divided(tp_size, expert_parallel),
        )

    def stage(self, pp_rank: int, pp_size: int) -> range:
        """The layers of one of `pp_size` stages. The first stages have one more if the number is not a multiple.

        Raises: ValueError if there are more stages than layers.
        """
        if pp_size > self.num_layers:
            raise ValueError(f"pipeline_parallel_size={pp_size} is more than the model's {self.num_layers} layers")
        each, more = divmod(self.num_layers, pp_size)
        first = pp_rank * each + min(pp_rank, more)
        return range(first, first + each + (pp_rank < more))

    @classmethod
    def from_directory(cls, path: Path) -> "ModelConfig":
        """Read config.json. The end-of-sequence ids are those of config.json and of generation_config.json.

        Raises: FileNotFoundError; ValueError as in `from_dict`, naming the file.
        """
        config = cls.from_dict(read_json(path / "config.json"), str(path / "config.json"))
        file = path / "generation_config.json"
        if not exists(file):
            return config
        more = Fields(read_json(file), str(file)).special_ids(config.vocab_size)
        return replace(config, eos_token_ids=config.eos_token_ids | more)

    @classmethod
    def from_dict(cls, config: dict, source: str = "config.json") -> "ModelConfig":
        """`config` is config.json as a dict, with the field names of transformers 4 or 5; `source` is the file's name
        in error messages.

        Raises:
            ValueError: an architecture, rope type, activation or quantization that is not supported, or a field that
                is missing, of the wrong type or out of range, by name.
        """
        fields = Fields(config, source)
        architecture, family = _find_family(fields)
        pooling = None
        if architecture.endswith("ForSequenceClassification"):
            pooling = read_classifier(config, source, fields.num_labels())
        elif architecture.endswith("Model"):
            pooling = PoolingConfig()
        architecture = _causal(architecture)
        for name, causal in (("is_causal", True), ("use_bidirectional_attention", False)):
            if fields.values.get(name) is not None and fields.flag(name, causal) != causal:
                raise fields.error(name, f"{str(not causal).lower()} is not supported for decoders")
        special = _read_family(fields, architecture, family)
        quantization = None
        if config.get("quantization_config") is not None:
            stored = Fields(fields.object("quantization_config").values, f"{source}: quantization_config")
            quantization = StoredQuantization.from_fields(stored, "experts" in special)
        vocab_size = fields.size("vocab_size")
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=fields.size("hidden_size"),
            intermediate_size=fields.size("intermediate_size"),
            num_layers=fields.size("num_hidden_layers"),
            num_heads=fields.size("num_attention_heads"),
            max_position_embeddings=fields.size("max_position_embeddings"),
            dtype=read_dtype(fields),
            eos_token_ids=fields.special_ids(vocab_size),
            quantization=quantization,
            pooling=pooling,
            **special,
        )


def _find_family(fields: Fields) -> tuple[str, ModuleType]:
    """The architecture, and the module of nanopage.models that has it."""
    from nanopage.models import find_family, load_families  # they import torch, which the engine must not

    names = fields.values.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise fields.error("architectures", f"must be a list of names, got {shown(names)}")
    for name in names or []:
        if (family := find_family(_causal(name))) is not None:
            return name, family
    supported = ", ".join(name for family in load_families() for name in family.ARCHITECTURES)
    raise fields.error("architectures", f"{shown(names)} is not supported; supported: {supported}")


def _read_family(fields: Fields, architecture: str, family: ModuleType) -> dict[str, Any]:
    """The fields that the family's `read_config` returns, and for the others of them what most families have."""
    num_heads = fields.size("num_attention_heads")
    special = family.read_config(fields, architecture)
    if "head_dim" not in special:
        special["head_dim"] = fields.size("head_dim", fields.size("hidden_size") // num_heads)
    if "activation" not in special:
        special["activation"] = fields.activation("hidden_act")
    if "rope" not in special:
        special["rope"] = read_rope(fields)
    special.setdefault("sliding_windows", (None,) * fields.size("num_hidden_layers"))
    special.setdefault("rms_norm_eps", fields.number("rms_norm_eps", 1e-6))
    special.setdefault("tie_word_embeddings", fields.flag("tie_word_embeddings"))
    if "experts" in special and special["activation"] != "silu":
        raise fields.error("hidden_act", f"{special['activation']!r} is not supported with experts; supported: silu")
    num_kv_heads, head_dim = special["num_kv_heads"], special["head_dim"]
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_attention_heads", f"{num_heads} is not a multiple of num_key_value_heads={num_kv_heads}"
        )
    if head_dim % 2:
        raise fields.error("head_dim", f"{head_dim} is odd: rotary embeddings need pairs")
    for rope in filter(None, (special["rope"], special.get("local_rope"))):
        check_rope(fields, rope, head_dim)
    return special


def _causal(architecture: str) -> str:
    """The name of the model with a language-model head, for one without or with a classifier: Qwen3Model ->
    Qwen3ForCausalLM."""
    return re.sub("(Model|ForSequenceClassification)$", "ForCausalLM", architecture)
