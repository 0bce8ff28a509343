"""The images of Qwen2-VL and Qwen2.5-VL (Wang et al. 2024; Bai et al. 2025), as transformers prepares them.

An image keeps its proportions, nearly: its sides become multiples of `unit` pixels, each square of which is a token.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nanopage.checks.fields import Fields
from nanopage.files.model_files import shown
from nanopage.vision.config import Pixels, read_pixels, read_preprocessor

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE = "<|image_pad|>"
LONGEST = 200  # times the shorter side
MOST_PIXELS = 2**26  # of a scaled image
DEFAULTS = {  # of the image processor: CLIP's numbers
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


@dataclass(frozen=True)
class QwenConfig:
    """The shape of a vision tower.

    merge_size: so many patches of a row and of a column become one token.
    frames: how often a patch repeats the image, which is a video that stands still.
    gated: whether layers are those of Qwen2.5-VL, with RMS norms, a gated feed-forward layer, and windows.
    window: pixels of a side of a window; 0: there are none. whole_layers: the layers in which patches attend beyond it.
    image_token: the id of each token of an image.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    merge_size: int
    frames: int
    activation: str
    theta: float
    gated: bool
    window: int
    whole_layers: frozenset[int]
    image_token: int
    whole = False

    @property
    def unit(self) -> int:
        """How many pixels of a side become a token."""
        return self.patch_size * self.merge_size


def read_tower(fields: Fields, text_size: int, token: int, gated: bool) -> QwenConfig:
    """Read vision_config. Args: text_size: hidden_size of the text model. Raises: ValueError naming the field."""
    size = fields.size("hidden_size", 3584) if gated else fields.size("embed_dim", 1280)
    inner = fields.size("intermediate_size", 3420) if gated else size * fields.size("mlp_ratio", 4)
    for name, value in (("in_channels", 3), ("out_hidden_size" if gated else "hidden_size", text_size)):
        default = 3 if name == "in_channels" else 3584
        if (found := fields.values.get(name, default)) != value:
            raise fields.unsupported(name, shown(found), [value])
    rope = fields.object("rope_parameters")
    if (kind := rope.values.get("rope_type", rope.values.get("type", "axial"))) != "axial":
        raise fields.unsupported("rope_parameters", f"of type {shown(kind)}", ["axial"])
    layers = fields.values.get("fullatt_block_indexes", [7, 15, 23, 31])
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise fields.error("fullatt_block_indexes", f"must be a list of integers, got {shown(layers)}")
    quick = not gated and fields.values.get("hidden_act", "quick_gelu") == "quick_gelu"
    config = QwenConfig(
        hidden_size=size,
        intermediate_size=inner,
        num_layers=fields.size("depth", 32),
        num_heads=fields.size("num_heads", 16),
        patch_size=fields.size("patch_size", 14),
        merge_size=fields.size("spatial_merge_size", 2),
        frames=fields.size("temporal_patch_size", 2),
        activation="quick_gelu" if quick else fields.activation("hidden_act"),
        theta=rope.number("rope_theta", fields.number("rope_theta", 10_000.0)),
        gated=gated,
        window=fields.size("window_size", 112) if gated else 0,
        whole_layers=frozenset(layers),
        image_token=token,
    )
    if size % config.num_heads or (head_dim := size // config.num_heads) % 4:
        raise fields.error("num_heads", f"must divide {size} into heads of a multiple of 4, for their rotation")
    if fields.values.get("head_dim") not in (None, head_dim):
        raise fields.unsupported("head_dim", shown(fields.values["head_dim"]), [head_dim])
    if gated and config.window < config.unit:
        raise fields.error("window_size", f"is less than {config.unit}, the pixels of a token")
    return config


@dataclass(frozen=True)
class QwenImages:
    """Scales images. least, most: pixels of a scaled image."""

    pixels: Pixels
    config: QwenConfig
    least: int
    most: int
    placeholder = IMAGE

    def read(self, image: "Image") -> tuple[str, list[np.ndarray]]:
        """As in `vision.reader.Images`. Raises: ValueError for an image that is too long."""
        image = image.resize(scaled(*image.size, self.config.unit, self.least, self.most), self.pixels.resample)
        array = np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))
        return IMAGE * self.count(array)[0], [array]

    def count(self, array: np.ndarray) -> tuple[int, int]:
        """As in `vision.reader.Images`."""
        tokens = math.prod(array.shape[1:]) // self.config.unit**2
        return tokens, tokens * self.config.merge_size**2


def scaled(width: int, height: int, unit: int, least: int, most: int) -> tuple[int, int]:
    """The size with sides that are multiples of `unit`, and about `least` to `most` pixels.

    Raises: ValueError if one side is much longer than the other.
    """
    if max(width, height) / min(width, height) > LONGEST:
        raise ValueError(f"an image has {width:,} x {height:,} pixels: a side is more than {LONGEST} times the other")
    sides = [round(side / unit) * unit for side in (width, height)]
    if math.prod(sides) > most:
        shrink = math.sqrt(width * height / most)
        sides = [max(unit, math.floor(side / shrink / unit) * unit) for side in (width, height)]
    elif math.prod(sides) < least:
        grow = math.sqrt(least / (width * height))
        sides = [math.ceil(side * grow / unit) * unit for side in (width, height)]
    return sides[0], sides[1]


def read_images(path: Path, config: QwenConfig) -> QwenImages:
    """Read how a model's images are prepared. Raises: ValueError naming the file and the field."""
    fields, _ = read_preprocessor(path)
    given = {name: value for name, value in fields.values.items() if value is not None}
    fields = Fields(DEFAULTS | given, fields.source)
    for name, default, wanted in (
        ("patch_size", 14, config.patch_size),
        ("merge_size", 2, config.merge_size),
        ("temporal_patch_size", 2, config.frames),
    ):
        if (value := fields.values.get(name, default)) != wanted:
            raise fields.error(name, f"is {shown(value)}, but {wanted} in vision_config")
    if not fields.flag("do_resize", True):
        raise fields.unsupported("do_resize", "false", ["true"])
    size = fields.object("size").values or {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    if unknown := size.keys() - {"shortest_edge", "longest_edge", "min_pixels", "max_pixels"}:
        raise fields.unsupported("size", f"with {shown(min(unknown))}", ["shortest_edge", "longest_edge"])
    least = _num_pixels(fields, "min_pixels", size, "shortest_edge")
    most = _num_pixels(fields, "max_pixels", size, "longest_edge")
    return QwenImages(read_pixels(fields, resample=3), config, least, most)


def _num_pixels(fields: Fields, name: str, size: dict[str, Any], older: str) -> int:
    """A number of pixels: the field `name`, or else `older` of the field size."""
    value = fields.values.get(name, size.get(older))
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_PIXELS:
        raise fields.error(name, f"(or size: {older}) must be an integer from 1 to {MOST_PIXELS:,}, got {shown(value)}")
    return value
