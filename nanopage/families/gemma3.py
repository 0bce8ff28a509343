"""Gemma 3 (Gemma Team 2025), for text: Gemma 2's layer with norms of q and k heads in place of soft caps.

Five layers of six have a window, and a rope of their own.
"""

from functools import partial
from typing import Any

from nanopage.checks.fields import Fields
from nanopage.config.rope import RopeConfig
from nanopage.families import gemma2
from nanopage.families.gemma2 import gemma_config
from nanopage.reading.rope import read_rope

ARCHITECTURES = ("Gemma3ForCausalLM",)
GGUF_ARCHITECTURE = "gemma3"
make_layer, complete_gguf = gemma2.make_layer, partial(gemma2.complete_gguf, layers_27b=62)
GGUF_TENSORS = gemma2.GGUF_TENSORS
GGUF_FIELDS = {
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "rope.freq_base_swa": "rope_local_base_freq",
    "final_logit_softcapping": "final_logit_softcapping",
}
GGUF_NORM_OFFSET = 1.0


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    if fields.values.get("attn_logit_softcapping") is not None:  # transformers reads the field and ignores it
        raise fields.unsupported("attn_logit_softcapping", "of Gemma 3")
    require_window(fields)
    return gemma_config(fields, every=fields.size("sliding_window_pattern", 6)) | {
        "head_norms": True,
        "logit_softcap": fields.optional_number("final_logit_softcapping") or 0.0,
        "rope": read_rope(fields, "full_attention", default_theta=1e6),
        "other_rope": local_rope(fields),
    }


def require_window(fields: Fields) -> None:
    """Raises: ValueError if config.json says that no layer has a window."""
    if fields.values.get("sliding_window", 0) is None:
        raise fields.error("sliding_window", "must not be null: layers with a window have a rope of their own")


def local_rope(fields: Fields) -> RopeConfig:
    """The rope of layers with a window: `sliding_attention` of rope_parameters, or, as transformers 4 wrote it,
    rope_local_base_freq."""
    parameters = fields.object("rope_parameters")
    if parameters.values.get("sliding_attention") is not None:
        return read_rope(fields, "sliding_attention", default_theta=1e4)
    return RopeConfig(fields.number("rope_local_base_freq", 1e4))
