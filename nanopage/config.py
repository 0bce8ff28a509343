"""Configuration: EngineConfig (what the user sets) and ModelConfig (config.json read as data).

config.json is never executed: `auto_map`, attention back-end names and whatever else it carries that is not read here
do nothing. What would change the result and is not supported is an error.
"""

import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
DEVICES = ("auto", "cpu", "cuda")
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
PREEMPTION_MODES = ("recompute", "swap")
POLICIES = ("fcfs", "priority")
QUANTIZATIONS = (None, "int8")
LOAD_FORMATS = ("auto", "dummy")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(kw_only=True)
class EngineConfig:
    """Everything a user can set on an engine. Names and defaults are vLLM's where the meaning is the same.

    Args:
        model: a Hugging Face directory, a .gguf file, a hub id, or None for SmolLM2-135M-Instruct (see hub.py).
        dtype: of weights, activations and KV; "auto" is the checkpoint's if the device computes in it natively.
        device: "auto" is CUDA if present, else the CPU.
        max_model_len: most tokens (prompt + output) of a sequence; None is the model's own limit, or what the
            KV cache holds if that is less.
        max_num_seqs: most sequences in one step.
        max_num_batched_tokens: most tokens in one step; longer prompts are prefilled in chunks.
        block_size: tokens per KV cache block; on a GPU a power of two.
        kv_cache_gib: size of the KV cache in GiB. None: see `gpu_memory_utilization`.
        gpu_memory_utilization: the share of the device's memory (of RAM, on a CPU) that weights and KV cache may
            take together, on a GPU with what steps take. None: 0.9 on a GPU; on a CPU the KV cache gets a quarter of
            the available RAM, at most 4 GiB.
        num_gpu_blocks_override: size of the KV cache in blocks instead, on any device; for tests.
        enable_prefix_caching: share the KV of equal prefixes between requests.
        preemption_mode: what happens to a request's KV when another needs its blocks: "recompute" or "swap". None: see
            the rule in scheduler.py.
        swap_space: GiB of host memory for swapped KV, taken when first needed. None: as much as the KV cache, but at
            most a quarter of the available RAM and 4 GiB. When it is full, or 0, requests are recomputed.
        scheduling_policy: "fcfs", or "priority": requests with a lower `priority` go first, and take the blocks of
            those with a higher one.
        enforce_eager: compile and capture nothing. Otherwise, on a CPU in float32 and bfloat16, decoder layers are
            compiled in the background from the second request on (see compiler.py); on a GPU they are at start, and
            decode steps captured as CUDA graphs (see jit.py and decode_graphs.py).
        quantization: "int8" keeps the weights of products, and of an embedding tied to the head, in a byte each (see
            kernels/int8_linear.py); activations and KV stay in `dtype`. On a CPU. None: in `dtype`.
        async_scheduling: launch a step before the tokens of the one before it are looked at, so that a GPU need not
            wait for Python; outputs are the same, and come one call of `step` later. None: on a GPU.
        load_format: "auto" reads the model's weights. "dummy" draws random ones, to measure speed: a directory with
            config.json is enough then (see benchmarks/configs), and without tokenizer.json prompts are token ids.
        seed: of the requests that bring no seed of their own.

    Raises:
        ValueError, TypeError: an option out of range, by name.
    """

    model: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    kv_cache_gib: float | None = None
    gpu_memory_utilization: float | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    preemption_mode: str | None = None
    swap_space: float | None = None
    scheduling_policy: str = "fcfs"
    enforce_eager: bool = False
    quantization: str | None = None
    async_scheduling: bool | None = None
    load_format: str = "auto"
    seed: int = 0

    def __post_init__(self):
        if self.model is not None and not isinstance(self.model, str | Path):
            raise TypeError(f"model must be a path or a name, not {self.model!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.device not in DEVICES:
            raise ValueError(f"device={self.device!r} is not one of {', '.join(DEVICES)}")
        if self.preemption_mode not in (None, *PREEMPTION_MODES):
            raise ValueError(f"preemption_mode={self.preemption_mode!r} is not one of {', '.join(PREEMPTION_MODES)}")
        if self.scheduling_policy not in POLICIES:
            raise ValueError(f"scheduling_policy={self.scheduling_policy!r} is not one of {', '.join(POLICIES)}")
        if self.quantization not in QUANTIZATIONS:
            raise ValueError(f"quantization={self.quantization!r} is not one of int8")
        if self.load_format not in LOAD_FORMATS:
            raise ValueError(f"load_format={self.load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "max_model_len",
            "num_gpu_blocks_override",
        ):
            value = getattr(self, name)
            if value is None and name in ("max_model_len", "num_gpu_blocks_override"):
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an integer, not {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name, limit in (("kv_cache_gib", math.inf), ("gpu_memory_utilization", 1.0)):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise TypeError(f"{name} must be a number, not {value!r}")
            if not 0 < value <= min(limit, sys.float_info.max):
                raise ValueError(f"{name} must be in (0, {limit}], got {value}")
        if self.swap_space is not None:
            if not isinstance(self.swap_space, int | float) or isinstance(self.swap_space, bool):
                raise TypeError(f"swap_space must be a number, not {self.swap_space!r}")
            if not 0 <= self.swap_space <= sys.float_info.max:
                raise ValueError(f"swap_space must be at least 0, got {self.swap_space}")
            if self.preemption_mode == "recompute" and self.swap_space:
                raise ValueError("swap_space is of no use with preemption_mode='recompute'")
        sized_by = [
            name
            for name in ("kv_cache_gib", "gpu_memory_utilization", "num_gpu_blocks_override")
            if getattr(self, name) is not None
        ]
        if len(sized_by) > 1:
            raise ValueError(f"{' and '.join(sized_by)} both set the size of the KV cache: give one")
        for name in ("enable_prefix_caching", "enforce_eager"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.async_scheduling is not None and not isinstance(self.async_scheduling, bool):
            raise TypeError(f"async_scheduling must be True, False or None, not {self.async_scheduling!r}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise TypeError(f"seed must be an integer, not {self.seed!r}")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding parameters; `params` holds what is particular to `rope_type`, under config.json's names."""

    theta: float
    rope_type: str = "default"
    params: dict = field(default_factory=dict)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer, whatever config.json called it."""

    architecture: str
    family: str  # a module of nanopage.models
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
    attention_bias: bool
    mlp_bias: bool
    sliding_windows: tuple[int | None, ...]  # one per layer; None attends to everything
    dtype: str
    eos_token_ids: frozenset[int]

    @classmethod
    def from_directory(cls, path: Path) -> "ModelConfig":
        """Read config.json, and the end-of-sequence ids of generation_config.json if there is one.

        Raises: FileNotFoundError, ValueError as in `from_dict`.
        """
        config = read_json(path / "config.json")
        if (path / "generation_config.json").exists():
            eos = read_json(path / "generation_config.json").get("eos_token_id")
            config = config | ({} if eos is None else {"eos_token_id": eos})
        return cls.from_dict(config)

    @classmethod
    def from_dict(cls, config: dict) -> "ModelConfig":
        """`config` is config.json as a dict, with the field names of transformers 4 or 5.

        Raises:
            ValueError: an architecture, rope type, activation or quantization that is not supported, or a missing
                or impossible field, by name.
        """
        fields = _Fields(config)
        architecture = _architecture(config.get("architectures"))
        if config.get("quantization_config") is not None:
            method = fields.object("quantization_config").values.get("quant_method", "unknown")
            raise ValueError(f"quantization_config (quant_method {method}) is not supported: use unquantized weights")
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise ValueError(f"hidden_act {config['hidden_act']!r} is not supported; supported: silu")
        hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
        # Where a field is missing, its default is that of transformers' class for the architecture.
        num_kv_heads = fields.size("num_key_value_heads", num_heads if architecture == "LlamaForCausalLM" else None)
        head_dim = fields.size("head_dim", 128 if architecture == "Qwen3ForCausalLM" else hidden_size // num_heads)
        num_layers = fields.size("num_hidden_layers")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}")
        if head_dim % 2:
            raise ValueError(f"head_dim={head_dim} is odd: rotary embeddings need pairs")
        max_position_embeddings = fields.size("max_position_embeddings")
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        if dtype not in DTYPES[1:]:
            raise ValueError(f"config.json: dtype {dtype!r} is not supported; supported: {', '.join(DTYPES[1:])}")
        eos = config.get("eos_token_id")
        eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
        if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in eos):
            raise ValueError(f"config.json: eos_token_id must be an integer or a list of them, got {eos!r}")
        return cls(
            architecture=architecture,
            family=ARCHITECTURES[architecture],
            vocab_size=fields.size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.size("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            max_position_embeddings=max_position_embeddings,
            rope=_rope(fields, max_position_embeddings),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            attention_bias=fields.flag("attention_bias"),
            mlp_bias=fields.flag("mlp_bias"),
            sliding_windows=_sliding_windows(fields, architecture, num_layers),
            dtype=dtype,
            eos_token_ids=frozenset(eos),
        )


@dataclass(frozen=True)
class _Fields:
    """Reads a JSON object field by field; a value of the wrong kind is a ValueError that names the field."""

    values: dict

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer. Null counts as missing here: several fields are written as null to say "the default"."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"config.json: {name} must be a positive integer, got {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self.values.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            raise ValueError(f"config.json: {name} must be a positive number, got {value!r}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.values.get(name, False)
        if not isinstance(value, bool):
            raise ValueError(f"config.json: {name} must be true or false, got {value!r}")
        return value

    def object(self, name: str) -> "_Fields":
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"config.json: {name} must be an object, got {value!r}")
        return _Fields(dict(value or {}))


def _architecture(names) -> str:
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"config.json: architectures must be a list of names, got {names!r}")
    for name in names or []:
        if name in ARCHITECTURES:
            return name
    named = ", ".join(names or []) or "(none named)"
    raise ValueError(f"architecture {named} is not supported; supported: {', '.join(ARCHITECTURES)}")


def _rope(config: _Fields, max_position_embeddings: int) -> RopeConfig:
    # transformers 5 writes rope_parameters, 4 wrote rope_theta beside rope_scaling (whose key was once "type").
    rope = config.object("rope_parameters" if config.values.get("rope_parameters") else "rope_scaling")
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise ValueError("rope_parameters per layer type are not supported")
    if rope.values.get("rope_theta") is not None:
        theta = rope.number("rope_theta")
    else:
        theta = config.number("rope_theta", 10000.0) if config.values.get("rope_theta") is not None else 10000.0
    rope_type = rope.values.get("rope_type", rope.values.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    for fields in (rope, config):
        if fields.values.get("partial_rotary_factor") not in (None, 1.0):
            partial = fields.values["partial_rotary_factor"]
            raise ValueError(f"partial_rotary_factor {partial!r} is not supported; supported: 1.0")
    params = {name: value for name, value in rope.values.items() if name not in ("rope_theta", "rope_type", "type")}
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": ("factor", "original_max_position_embeddings"),
    }
    if config.values.get("original_max_position_embeddings") is not None:  # transformers gives it priority
        params["original_max_position_embeddings"] = config.values["original_max_position_embeddings"]
    if rope_type == "yarn" and params.get("original_max_position_embeddings") is None:
        params["original_max_position_embeddings"] = max_position_embeddings
    for name in needed[rope_type]:
        try:
            params[name] = _Fields(params).number(name)
        except ValueError as error:
            raise ValueError(f"rope type {rope_type!r}: {error}") from None
    return RopeConfig(theta, rope_type, params)


def _sliding_windows(config: _Fields, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    qwen = architecture.startswith("Qwen")
    window = config.values.get("sliding_window", None if architecture == "LlamaForCausalLM" else 4096)
    # transformers' Llama has no window; Qwen writes one that is off unless use_sliding_window says otherwise.
    if window is None or architecture == "LlamaForCausalLM" or (qwen and not config.flag("use_sliding_window")):
        return (None,) * num_layers
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise ValueError(f"config.json: sliding_window must be a positive integer, got {window!r}")
    kinds = config.values.get("layer_types")
    if kinds is not None:
        known = isinstance(kinds, list) and all(kind in ("full_attention", "sliding_attention") for kind in kinds)
        if not known or len(kinds) != num_layers:
            raise ValueError(f"config.json: layer_types {kinds!r} is not supported for {num_layers} layers")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if not qwen:
        return (window,) * num_layers
    first = config.values.get("max_window_layers", 28)
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise ValueError(f"config.json: max_window_layers must be an integer of at least 0, got {first!r}")
    return tuple(window if layer >= first else None for layer in range(num_layers))


def read_json(path: Path) -> dict:
    """Raises: FileNotFoundError; ValueError naming the file if it is not a JSON object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or beyond Python's limits
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} is not a JSON object")
    return data
