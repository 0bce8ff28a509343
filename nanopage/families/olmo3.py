"""OLMo 3 (2025): OLMo 2's layer. Three layers of four have a window, and a rope that is not stretched."""

from typing import Any

from nanopage.checks.fields import Fields
from nanopage.config.rope import RopeConfig
from nanopage.families import olmo2
from nanopage.reading.rope import read_rope

ARCHITECTURES = ("Olmo3ForCausalLM",)
GGUF_ARCHITECTURE = "olmo2 with windows"  # "olmo2" in the file, which has olmo2.attention.sliding_window, too
make_layer = olmo2.make_layer
GGUF_TENSORS = olmo2.GGUF_TENSORS
GGUF_FIELDS = {
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "layer_types",
    "rope.freq_base_swa": "rope_local_base_freq",
}
THETA = 500000.0


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    if fields.values.get("sliding_window", 4096) is None:
        raise fields.error("sliding_window", "must not be null: layers with a window have a rope of their own")
    rope = read_rope(fields, "full_attention", THETA)
    return olmo2.read_config(fields, architecture) | {
        "sliding_windows": fields.windows(default=4096, every=4),
        "rope": rope,
        "other_rope": _local_rope(fields, rope.theta),
    }


def _local_rope(fields: Fields, theta: float) -> RopeConfig:
    """The rope of layers with a window. Files of transformers 4 have one rope_theta, for all layers, and a rope_scaling
    for layers without a window. (By mistake, transformers 5 reads this rope_theta only for layers without one.)"""
    if fields.object("rope_parameters").values.keys() & {"full_attention", "sliding_attention"}:
        return read_rope(fields, "sliding_attention", THETA)
    return RopeConfig(theta)


def complete_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of config.json that GGUF files lack."""
    theta = config["rope_theta"]
    ropes = {
        "full_attention": {"rope_theta": theta, **config.get("rope_scaling", {})},
        "sliding_attention": {"rope_theta": config.get("rope_local_base_freq", theta)},
    }
    return {"rope_parameters": ropes}
