"""SmolLM3 (2025): Llama's layer, without rotary embeddings in every fourth layer (Yang et al. 2025)."""

from typing import Any

from nanopage.checks.fields import Fields
from nanopage.config.rope import UNROTATED
from nanopage.files.model_files import shown
from nanopage.models import llama
from nanopage.reading.rope import read_rope

ARCHITECTURES = ("SmolLM3ForCausalLM",)
GGUF_ARCHITECTURE = "smollm3"  # always every fourth layer, as the default here
make_layer = llama.make_layer
GGUF_REORDERED = True


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    num_layers, num_heads = fields.size("num_hidden_layers"), fields.size("num_attention_heads")
    unrotated, has_windows = _unrotated(fields, num_layers), fields.flag("use_sliding_window")
    kinds = fields.values.get("layer_types") or [
        "sliding_attention" if has_windows and index in unrotated else "full_attention" for index in range(num_layers)
    ]
    windows = fields.windows(default=None, kinds=kinds)
    if any(windows) and not has_windows:  # attention classes of transformers disagree
        raise fields.error("use_sliding_window", "must be true if layer_types has sliding_attention")
    num_kv_heads = num_heads if "num_key_value_heads" in fields.values else 4  # null or missing
    return {
        "num_kv_heads": fields.size("num_key_value_heads", num_kv_heads),
        "attention_bias": fields.flag("attention_bias"),
        "mlp_bias": fields.flag("mlp_bias"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", True),
        "sliding_windows": windows,
        "rope": read_rope(fields, default_theta=2e6),
        "other_rope": UNROTATED,
        "other_rope_layers": unrotated,
    }


def _unrotated(fields: Fields, num_layers: int) -> frozenset[int]:
    """The layers without rotary embeddings: `no_rope_layers` has a 0 for each of them."""
    every, flags = fields.size("no_rope_layer_interval", 4), fields.values.get("no_rope_layers")
    if flags is None:
        return frozenset(range(every - 1, num_layers, every))
    if not isinstance(flags, list) or len(flags) < num_layers or any(flag not in (0, 1) for flag in flags):
        raise fields.error("no_rope_layers", f"must be a list of 0 and 1 for each layer, got {shown(flags)}")
    return frozenset(index for index in range(num_layers) if not flags[index])
