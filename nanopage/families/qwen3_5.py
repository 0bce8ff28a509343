"""Qwen3.5 (Qwen 2026): the layers of Qwen3-Next without experts. Only the text model: the tensors of images and videos
(visual.*) are left out. Drafts may come from the tensors mtp.* (speculation/heads.py). mrope_section divides a head
among three positions of a token. They are equal for text, so this rope is an ordinary one."""

from functools import partial
from typing import Any

from nanopage.checks.fields import GENERATE, Fields
from nanopage.families import qwen3_next
from nanopage.families.qwen3_next import GGUF_FIELDS, GGUF_TENSORS, complete_gguf, read_layers  # noqa: F401
from nanopage.reading.names import renamed
from nanopage.recurrent.gated_delta_net import GatedDeltaNet

ARCHITECTURES = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
INSTEAD = GENERATE
GGUF_ARCHITECTURE = "qwen35"
GGUF_NORM_OFFSET = 1.0
GGUF_PARTIAL_ROPE = GGUF_SECTIONS = True
make_layer = partial(qwen3_next.make_layer, delta_net=GatedDeltaNet)
rename = partial(renamed, names={r"^(model\.)?(mtp|visual)\.": None, r"^model\.language_model\.": "model."})


def text_fields(fields: Fields) -> Fields:
    """The fields of the text model, from a config.json that has them in text_config, beside a vision_config."""
    tied = {name: fields.values[name] for name in ("tie_word_embeddings",) if name in fields.values}
    values = fields.values | fields.object("text_config").values | tied
    for name in ("rope_parameters", "rope_scaling"):
        rope = Fields(values, fields.source).object(name).values
        values[name] = {key: value for key, value in rope.items() if key not in ("mrope_section", "mrope_interleaved")}
    return Fields(values, fields.source)


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    return read_layers(fields, num_kv_heads=4)
