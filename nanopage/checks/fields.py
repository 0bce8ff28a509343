"""Fields of config.json, checked.

Sizes and numbers have bounds, because they are read before the weights, and a wrong one must not allocate much memory
or start a long loop.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from nanopage.files.model_files import shown
from nanopage.files.safetensors_checkpoint import MAX_FUSED_EXPERTS

GENERATE = "transformers' own generate() may run the model"
Dtype = Literal["float32", "bfloat16", "float16", "float64"]
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2")  # layers/mlp.py

# The largest accepted sizes, by their names in config.json: several times the sizes of any known model. The loader can
# still build a model of these sizes without allocating its weights, to compare it with its files.
MAX_SIZES = {
    "vocab_size": 2**24,
    "hidden_size": 2**18,
    "intermediate_size": 2**20,
    "num_hidden_layers": 2**10,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
    "max_position_embeddings": 2**31 - 1,
    "full_attention_interval": 2**10,
    "linear_conv_kernel_dim": 2**10,
    "linear_num_key_heads": 2**12,
    "linear_num_value_heads": 2**12,
    "linear_key_head_dim": 2**12,
    "linear_value_head_dim": 2**12,
    "sliding_window": 2**31 - 1,
    "sliding_window_pattern": 2**10,
    "no_rope_layer_interval": 2**10,
    "num_experts": MAX_FUSED_EXPERTS,
    "num_local_experts": MAX_FUSED_EXPERTS,
    "num_experts_per_tok": 2**12,
    "moe_intermediate_size": 2**20,
    "shared_expert_intermediate_size": 2**20,
    "q_lora_rank": 2**16,
    "kv_lora_rank": 2**12,
    "qk_rope_head_dim": 2**12,
    "qk_nope_head_dim": 2**12,
    "v_head_dim": 2**12,
    "n_routed_experts": MAX_FUSED_EXPERTS,
    "n_shared_experts": 2**10,
    "n_group": 2**12,
    "topk_group": 2**12,
    "first_k_dense_replace": 2**10,
    "decoder_sparse_step": 2**10,
    "type_vocab_size": 2**10,
    "num_labels": 2**16,
    "conv_L_cache": 2**10,
    "block_ff_dim": 2**20,
    "block_multiple_of": 2**20,
    "num_heads": 2**12,
    "n_groups": 2**12,
    "state_size": 2**12,
    "conv_kernel": 2**10,
    "expand": 2**10,
    "global_head_dim": 2**12,
    "num_global_key_value_heads": 2**12,
    "num_kv_shared_layers": 2**10,
    "hidden_size_per_layer_input": 2**16,
    "vocab_size_per_layer_input": 2**24,
    "top_k_experts": 2**12,
    "altup_num_inputs": 2**6,
    "laurel_rank": 2**16,
    "mamba_n_heads": 2**12,
    "mamba_d_head": 2**12,
    "mamba_n_groups": 2**12,
    "mamba_d_state": 2**12,
    "mamba_d_conv": 2**10,
    "mamba_d_ssm": 2**20,
    "mamba_expand": 2**10,
    "shared_intermediate_size": 2**20,
    "d_model": 2**18,
    "encoder_layers": 2**9,
    "decoder_layers": 2**9,
    "encoder_attention_heads": 2**12,
    "decoder_attention_heads": 2**12,
    "encoder_ffn_dim": 2**20,
    "decoder_ffn_dim": 2**20,
    "num_mel_bins": 2**10,
    "max_source_positions": 2**16,
    "median_filter_width": 1499,
    "max_target_positions": 2**16,
    "n_positions": 2**16,
    "d_ff": 2**20,
    "d_kv": 2**12,
    "num_layers": 2**9,
    "num_decoder_layers": 2**9,
    "relative_attention_num_buckets": 2**16,
    "relative_attention_max_distance": 2**16,
    "image_size": 2**13,
    "patch_size": 2**10,
    "scale_factor": 2**6,
    "longest_edge": 2**13,
    "mm_tokens_per_image": 2**14,
    "depth": 2**10,
    "embed_dim": 2**18,
    "mlp_ratio": 2**6,
    "spatial_merge_size": 2**6,
    "temporal_patch_size": 2**6,
    "window_size": 2**13,
}

# The accepted range of each number. Outside it float32 overflows, or no trained model has such a value.
RANGES = {
    "rms_norm_eps": (1e-30, 1.0),
    "layer_norm_eps": (1e-30, 1.0),
    "layer_norm_epsilon": (1e-30, 1.0),
    "rope_theta": (2.0, 1e15),
    "factor": (1e-3, 1e6),
    "low_freq_factor": (1e-3, 1e6),
    "high_freq_factor": (1e-3, 1e6),
    "original_max_position_embeddings": (1, 2**31 - 1),
    "beta_fast": (1e-3, 1e6),
    "beta_slow": (1e-3, 1e6),
    "attention_factor": (1e-3, 1e3),
    "mscale": (0.0, 1e3),
    "mscale_all_dim": (0.0, 1e3),
    "llama_4_scaling_beta": (0.0, 1e3),
    "rope_local_base_freq": (2.0, 1e15),
    "partial_rotary_factor": (1e-3, 1.0),
    "query_pre_attn_scalar": (1e-3, 1e6),
    "attn_logit_softcapping": (1e-3, 1e6),
    "final_logit_softcapping": (1e-3, 1e6),
    "embedding_multiplier": (1e-6, 1e6),
    "residual_multiplier": (1e-6, 1e6),
    "norm_eps": (1e-30, 1.0),
    "block_ffn_dim_multiplier": (1e-3, 1e3),
    "attention_multiplier": (1e-6, 1e6),
    "logits_scaling": (1e-6, 1e6),
    "routed_scaling_factor": (1e-6, 1e6),
    "rescale_factor": (1e-9, 1e6),
    "swiglu_alpha": (1e-3, 1e3),
    "swiglu_limit": (1e-3, 1e6),
}


@dataclass(frozen=True)
class Fields:
    """Reads a JSON object field by field; a value of the wrong kind is a ValueError that names the file and field."""

    values: dict
    source: str  # the file
    instead: str = ""  # what runs a model with a field that is not supported

    def error(self, name: str, problem: str) -> ValueError:
        return ValueError(f"{self.source}: {name} {problem}")

    def unsupported(self, name: str, what: str, supported: Iterable[object] = ()) -> ValueError:
        """The error for a value that nanopage does not know, or that a family does not have.

        Args: what: the value, as text. supported: other values.
        """
        known = ", ".join(map(str, supported))
        parts = f"{name} {what} is not supported", f"supported: {known}" if known else "", self.instead
        return ValueError(f"{self.source}: {'; '.join(filter(None, parts))}")

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer. Null counts as missing here: several fields are written as null to say "the default"."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(name, f"must be a positive integer, got {shown(value)}")
        if value > MAX_SIZES[name]:
            raise self.error(name, f"must be at most {MAX_SIZES[name]:,}, got {shown(value)}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number within its range."""
        value = self.values.get(name, default)
        low, high = RANGES[name]
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(name, f"must be a number from {low:g} to {high:g}, got {shown(value)}")
        return float(value)

    def choice(self, name: str, supported: tuple[int, ...]) -> int:
        """One of several integers."""
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value not in supported:
            raise self.unsupported(name, shown(value), supported)
        return value

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """A number within its range, or None where it is null, or missing without a default."""
        return None if self.values.get(name, default) is None else self.number(name, default)

    def activation(self, name: str, default: str = "silu") -> str:
        """One of ACTIVATIONS. Two have a second name: swish and gelu_new."""
        value = self.values.get(name, default)
        value = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh"}.get(str(value), value)
        if value not in ACTIVATIONS:
            raise self.unsupported(name, shown(value), ACTIVATIONS)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, got {shown(value)}")
        return value

    def object(self, name: str) -> "Fields":
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, f"must be an object, got {shown(value)}")
        return replace(self, values=dict(value or {}))

    def windows(
        self, default: int | None, from_layer: int = 0, kinds: list[str] | None = None, every: int = 0
    ) -> tuple[int | None, ...]:
        """The sliding window of each layer, or None for a layer that attends to everything.

        `layer_types` or `max_window_layers` says which layers have a window.

        Args:
            default: the window if config.json has no `sliding_window`. Null means no window.
            kinds: in place of `layer_types`.
            from_layer: the first layer with a window, if config.json does not say. 0 ignores `max_window_layers`.
            every: each `every`th layer has no window, if config.json does not say.
        """
        num_layers = self.size("num_hidden_layers")
        if self.values.get("sliding_window", default) is None:
            return (None,) * num_layers
        window = self.size("sliding_window", default)
        kinds = self.values.get("layer_types") if kinds is None else kinds
        if every:
            pattern = ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(num_layers)]
            kinds = kinds or pattern
        if kinds is not None:
            kinds = self.kinds("layer_types", kinds, num_layers, ("full_attention", "sliding_attention"))
            return tuple(window if kind == "sliding_attention" else None for kind in kinds)
        first = self.values.get("max_window_layers", from_layer) if from_layer else 0
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise self.error("max_window_layers", f"must be an integer of at least 0, got {shown(first)}")
        return tuple(window if layer >= first else None for layer in range(num_layers))

    def kinds(self, name: str, kinds: Any, num_layers: int, known: tuple[str, ...]) -> list[str]:
        """`kinds`, the value of a field or its default: for each layer, one of `known`."""
        if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in known for kind in kinds):
            raise self.unsupported(name, f"{shown(kinds)} of {num_layers} layers")
        return kinds

    def num_labels(self) -> int:
        """How many classes a model has: transformers writes their names, unless there are two without names."""
        labels = self.object("id2label").values
        return len(labels) if labels else self.size("num_labels", 2)

    def special_ids(self, vocab_size: int) -> frozenset[int]:
        """The end-of-sequence ids. Checks the other special ids, too."""
        self._token_ids("bos_token_id", vocab_size)
        if self.values.get("pad_token_id") != -1:  # how old Llama checkpoints say that there is none
            self._token_ids("pad_token_id", vocab_size)
        return self._token_ids("eos_token_id", vocab_size)

    def token_id(self, name: str, vocab_size: int) -> int | None:
        ids = self._token_ids(name, vocab_size)
        if len(ids) > 1:
            raise self.error(name, f"must be one token id, got {shown(self.values[name])}")
        return next(iter(ids), None)

    def _token_ids(self, name: str, vocab_size: int) -> frozenset[int]:
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise self.error(name, f"must be a token id or a list of them, got {shown(value)}")
            if not 0 <= token_id < vocab_size:
                raise self.error(name, f"{shown(token_id)} is not in the vocabulary of {vocab_size:,} tokens")
        return frozenset(ids)


def read_dtype(fields: Fields) -> str:
    value = fields.values.get("dtype")
    name = "torch_dtype" if value is None else "dtype"  # transformers 4 wrote torch_dtype
    value = fields.values.get(name)
    value = "float32" if value is None else value
    dtype = value.removeprefix("torch.") if isinstance(value, str) else ""
    if dtype not in get_args(Dtype):
        raise fields.unsupported(name, shown(value), get_args(Dtype))
    return dtype
