"""The images of Gemma 3 (Gemma Team 2025), as transformers prepares them: each becomes one square of a fixed size."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nanopage.files.model_files import shown
from nanopage.vision.config import Pixels, SiglipConfig, read_pixels, read_preprocessor

if TYPE_CHECKING:
    from PIL.Image import Image

BEGIN, IMAGE, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


@dataclass(frozen=True)
class Gemma3Config:
    """tower: the vision tower. tokens: of an image. image_token: the id of each."""

    tower: SiglipConfig
    tokens: int
    image_token: int
    whole = True


@dataclass(frozen=True)
class Gemma3Images:
    """Scales images. size: of a side, in pixels. tokens, patches: of an image."""

    pixels: Pixels
    size: int
    tokens: int
    patches: int
    placeholder = BEGIN

    def read(self, image: "Image") -> tuple[str, list[np.ndarray]]:
        """As in `vision.reader.Images`."""
        square = np.asarray(image.resize((self.size, self.size), self.pixels.resample))
        return f"\n\n{BEGIN}{IMAGE * self.tokens}{END}\n\n", [np.ascontiguousarray(square.transpose(2, 0, 1))]

    def count(self, array: np.ndarray) -> tuple[int, int]:
        """As in `vision.reader.Images`."""
        return self.tokens, self.patches


def read_images(path: Path, config: Gemma3Config) -> Gemma3Images:
    """Read how a model's images are prepared. Raises: ValueError naming the file and the field."""
    fields, processor = read_preprocessor(path)
    size, wanted = fields.object("size").values, config.tower.image_size
    if size != {"height": wanted, "width": wanted} and (size or wanted != 224):
        raise fields.error("size", f"must be a height and a width of {wanted}, the image_size of vision_config")
    if not fields.flag("do_resize", True):
        raise fields.unsupported("do_resize", "false", ["true"])
    if fields.values.get("do_pan_and_scan"):
        raise fields.unsupported("do_pan_and_scan", "true", ["false"])
    if (length := processor.values.get("image_seq_length", config.tokens)) != config.tokens:
        raise processor.error("image_seq_length", f"is {shown(length)}, but mm_tokens_per_image is {config.tokens}")
    return Gemma3Images(read_pixels(fields, resample=2), wanted, config.tokens, config.tower.side**2)
