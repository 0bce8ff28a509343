"""ModelConfig: config.json as data. models/read_config.py reads it."""

import re
from dataclasses import dataclass, replace

from nanopage.checks.fields import ExpertsConfig, Fields
from nanopage.config.pooling import PoolingConfig
from nanopage.config.rope import RopeConfig
from nanopage.files.model_files import shown

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
