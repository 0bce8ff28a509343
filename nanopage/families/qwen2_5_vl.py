"""Qwen2.5-VL (Bai et al. 2025) and Qwen2-VL (Wang et al. 2024): Qwen2 with positions of three axes (items/axes.py), and
a vision tower for images of any size (vision/qwen2_tower.py). Videos are not supported."""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from nanopage.checks.fields import Fields
from nanopage.config.model import ModelConfig
from nanopage.config.rope import RopeConfig
from nanopage.families import qwen2
from nanopage.families.qwen2 import make_layer
from nanopage.files.model_files import shown
from nanopage.items.axes import SECTIONS, AxesRotary
from nanopage.models.decoder import Decoder
from nanopage.reading.names import renamed
from nanopage.reading.rope import read_rope
from nanopage.vision.config import read_token
from nanopage.vision.qwen2_tower import QwenTower
from nanopage.vision.qwen2_vl import read_images, read_tower

__all__ = ["make_layer", "read_images"]

ARCHITECTURES = ("Qwen2_5_VLForConditionalGeneration", "Qwen2VLForConditionalGeneration")
NAMES = {r"^(model\.)?visual\.": "model.encoders.image.", r"^model\.language_model\.": "model."}
rename = partial(renamed, names=NAMES)  # of transformers 4 and 5
DEFAULTS = {  # of the text model
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 151_645,
}


def text_fields(fields: Fields) -> Fields:
    """The fields of the text model, from a config.json that has them in text_config, or, if it is older, beside
    vision_config."""
    text = fields.object("text_config").values
    tied = [Fields(each, fields.source).flag("tie_word_embeddings") for each in (fields.values, text)]
    values = DEFAULTS | fields.values | text | {"tie_word_embeddings": any(tied)}
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    names = ("rope_scaling", "rope_parameters")
    rope = next(filter(None, (Fields(values, fields.source).object(name).values for name in names)), {})
    if rope.get("rope_type", rope.get("type")) == "mrope":  # the first name of an ordinary rope with sections
        rope |= {"rope_type": "default"}
    sections = {SECTIONS: rope.pop(SECTIONS, [16, 24, 24])}
    return Fields(values | sections | {"rope_scaling": None, "rope_parameters": rope}, fields.source)


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    head_dim, token = hidden_size // num_heads, read_token(fields, "image_token_id", 151_655)
    vision = Fields(fields.object("vision_config").values, f"{fields.source}: vision_config")
    tower = read_tower(vision, hidden_size, token, gated=architecture == ARCHITECTURES[0])
    rope = read_sections(fields, read_rope(fields, default_theta=1e6), head_dim)
    special = qwen2.read_config(fields, "Qwen2ForCausalLM")
    return special | {"head_dim": head_dim, "rope": rope, "encoders": {"image": tower}}


def read_sections(fields: Fields, rope: RopeConfig, head_dim: int) -> RopeConfig:
    """The rope with SECTIONS in its parameters. Raises: ValueError naming the field."""
    sections = fields.values[SECTIONS]
    whole = isinstance(sections, list) and all(type(size) is int and size >= 0 for size in sections)
    if not whole or sum(sections) != head_dim // 2:
        raise fields.error(SECTIONS, f"must be integers whose sum is {head_dim // 2}, got {shown(sections)}")
    return replace(rope, params=rope.params | {SECTIONS: sections})


def make_model(config: ModelConfig) -> Decoder:
    decoder: Any = Decoder(config, [make_layer(config, index) for index in range(config.num_layers)])
    decoder.rotary = AxesRotary(config.head_dim, config.rope)
    return decoder


def make_encoders(config: ModelConfig) -> dict[str, nn.Module]:
    """What computes the rows of images."""
    return {"image": QwenTower(config.encoders["image"], config.hidden_size)}
