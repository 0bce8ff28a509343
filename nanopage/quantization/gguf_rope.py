"""How a GGUF file stretches its rotary embeddings, as `rope_scaling` of config.json."""

from collections.abc import Callable, Mapping
from typing import Any

import gguf
import numpy as np

from nanopage.checks.fields import MAX_SIZES, RANGES
from nanopage.config.rope import RopeConfig
from nanopage.files.model_files import shown
from nanopage.quantization.gguf_fields import INSTEAD, GGUFFields
from nanopage.quantization.gguf_reader import TensorInfo

ROPE_TENSORS = FREQS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
YARN_FIELDS = {  # last parts of keys of files with yarn -> names in config.json
    "attn_factor": "attention_factor",  # in the first files of OLMo 3
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}

Read = Callable[[TensorInfo, int, int], np.ndarray]
"""Reads the numbers of a vector from one to another one, in float32."""


def read_scaling(
    fields: GGUFFields, tensors: Mapping[str, TensorInfo], read: Read, head_dim: int, theta: float
) -> dict[str, Any] | None:
    """None: the rope is plain.

    Args: tensors: those of ROPE_TENSORS that the file has. Raises: ValueError naming a field or a tensor.
    """
    if SHORT in tensors or LONG in tensors:
        return _longrope(fields, tensors, read)
    type_, prefix = "{arch}.rope.scaling.type", "{arch}.rope.scaling."
    kind = fields.string(type_, "none")
    for name in ("yarn_ext_factor", *([] if kind == "yarn" else YARN_FIELDS)):
        if fields.has(prefix + name):
            raise fields.unsupported(prefix + name)
    if kind == "none":
        return _llama3(fields, tensors[FREQS], read, head_dim, theta) if FREQS in tensors else None
    if FREQS in tensors:
        raise fields.error(type_, f"is {shown(kind)}, and there is {FREQS}, too")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": fields.number(f"{prefix}factor", "factor")}
    if original := fields.size(f"{prefix}original_context_length", "max_position_embeddings", None):
        scaling["original_max_position_embeddings"] = original
    for name, known_as in YARN_FIELDS.items():
        if fields.has(prefix + name):
            scaling[known_as] = fields.number(prefix + name, known_as)
    return scaling


def _longrope(fields: GGUFFields, tensors: Mapping[str, TensorInfo], read: Read) -> dict[str, Any]:
    """Phi-3's. llama.cpp stores its divisors of frequencies as tensors."""
    scaling: dict[str, Any] = {"rope_type": "longrope"}
    for known_as, name in (("short_factor", SHORT), ("long_factor", LONG)):
        tensor = tensors.get(name)
        known = tensor is not None and len(tensor.shape) == 1 and tensor.shape[0] <= MAX_SIZES["head_dim"]
        if tensor is None or not known or tensor.kind != gguf.GGMLQuantizationType.F32:
            raise ValueError(f"{fields.path}: {name} must be a vector of float32")
        scaling[known_as] = read(tensor, 0, tensor.shape[0]).tolist()
    scaling["attention_factor"] = fields.number("{arch}.rope.scaling.attn_factor", "attention_factor", 1.0)
    original = fields.size("{arch}.rope.scaling.original_context_length", "max_position_embeddings")
    return scaling | {"original_max_position_embeddings": original}


def _llama3(fields: GGUFFields, tensor: TensorInfo, read: Read, head_dim: int, theta: float) -> dict[str, Any]:
    """Llama 3's, which llama.cpp stores as divisors of frequencies. Raises: ValueError for any other."""
    problem = ValueError(f"{fields.path}: {FREQS} is not Llama 3's rope scaling, the only one supported; {INSTEAD}")
    if tensor.shape != (head_dim // 2,) or tensor.kind != gguf.GGMLQuantizationType.F32:
        raise problem
    stored = read(tensor, 0, head_dim // 2)
    low, high = RANGES["factor"]
    if not ((stored >= low) & (stored <= high)).all():
        raise problem
    scaling = {
        "rope_type": "llama3",
        "factor": stored.max().item(),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,  # of every Llama 3.x
    }
    from nanopage.layers.rotary import inverse_frequencies  # imports torch

    plain, _ = inverse_frequencies(head_dim, RopeConfig(theta))
    scaled, _ = inverse_frequencies(head_dim, RopeConfig(theta, "llama3", scaling))
    if not np.allclose((plain / scaled).numpy(), stored, rtol=1e-3):
        raise problem
    return scaling
