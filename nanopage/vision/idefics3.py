"""The images of Idefics3 and SmolVLM (Laurençon et al. 2024; Marafioti et al. 2025), as transformers prepares them.

An image is scaled to a size whose sides are multiples of `tile`, cut into tiles, and followed by a small picture of the
whole. Each of these squares is an item of its own; text between them says the row and the column.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nanopage.checks.fields import Fields
from nanopage.files.model_files import shown
from nanopage.vision.config import Pixels, SiglipConfig, read_pixels, read_preprocessor

if TYPE_CHECKING:
    from PIL.Image import Image

FAKE, IMAGE, WHOLE = "<fake_token_around_image>", "<image>", "<global-img>"
LONGEST = 4096  # pixels of a side of a scaled image


@dataclass(frozen=True)
class Idefics3Config:
    """tower: the vision tower. scale_factor: so many patches of a row and of a column become one token.
    image_token: its id."""

    tower: SiglipConfig
    scale_factor: int
    image_token: int
    whole = False


@dataclass(frozen=True)
class Idefics3Images:
    """Cuts images up.

    tile: pixels of a side of a tile. longest: of the longer side of a scaled image; None: images are not scaled first.
    splits: whether images are cut. tokens, patches: of each tile.
    """

    pixels: Pixels
    tile: int
    longest: int | None
    splits: bool
    tokens: int
    patches: int
    placeholder = IMAGE

    def read(self, image: "Image") -> tuple[str, list[np.ndarray]]:
        """The text in place of an image's placeholder, and the squares that its runs of placeholders stand for: uint8
        [3, tile, tile]."""
        tile, run = self.tile, IMAGE * self.tokens
        if self.longest is not None:
            image = image.resize(_shrunk(*_scaled(*image.size, self.longest)), self.pixels.resample)
        whole_text = f"{FAKE}{WHOLE}{run}{FAKE}"
        if self.splits:
            image = image.resize(_multiple(*image.size, tile), self.pixels.resample)
        columns, rows = (length // tile for length in image.size)
        if not self.splits or image.size == (tile, tile):
            return whole_text, [_square(image, tile, self.pixels)]
        boxes = [(x * tile, y * tile, (x + 1) * tile, (y + 1) * tile) for y in range(rows) for x in range(columns)]
        text = "".join(
            "".join(f"{FAKE}<row_{row + 1}_col_{column + 1}>{run}" for column in range(columns)) + "\n"
            for row in range(rows)
        )
        squares = [_array(image.crop(box)) for box in boxes]
        return f"{text}\n{whole_text}", [*squares, _square(image, tile, self.pixels)]

    def count(self, array: np.ndarray) -> tuple[int, int]:
        """As in `vision.reader.Images`."""
        return self.tokens, self.patches


def read_images(path: Path, config: Idefics3Config) -> Idefics3Images:
    """Read how a model's images are prepared. Raises: ValueError naming the file and the field."""
    fields, processor = read_preprocessor(path)
    tower, scale = config.tower, config.scale_factor
    tile, longest = _longest_edge(fields, "max_image_size", 364), _longest_edge(fields, "size", 4 * 364)
    side = tile // tower.patch_size
    if not side or side % scale:
        raise fields.error(
            "max_image_size", f"{tile} gives {side} patches a side, which is not a multiple of scale_factor={scale}"
        )
    tokens = (side // scale) ** 2
    if (length := processor.values.get("image_seq_len", tokens)) != tokens:
        raise processor.error("image_seq_len", f"is {shown(length)}, but an image of {tile} pixels has {tokens} tokens")
    return Idefics3Images(
        pixels=read_pixels(fields, resample=1),
        tile=tile,
        longest=longest if fields.flag("do_resize", True) else None,
        splits=fields.flag("do_image_splitting", True),
        tokens=tokens,
        patches=side**2,
    )


def _longest_edge(fields: Fields, name: str, default: int) -> int:
    sizes = fields.object(name)
    if unknown := sizes.values.keys() - {"longest_edge"}:
        raise fields.unsupported(name, f"with {shown(sorted(unknown)[0])}", ["longest_edge"])
    return sizes.size("longest_edge", default)


def _scaled(width: int, height: int, longest: int) -> tuple[int, int]:
    """The size with a longer side of `longest`; the other is even."""
    ratio = width / height
    if width >= height:
        height = int(longest / ratio)
        return longest, max(height + height % 2, 1)
    width = int(longest * ratio)
    return max(width + width % 2, 1), longest


def _shrunk(width: int, height: int) -> tuple[int, int]:
    """The size with no side longer than LONGEST."""
    ratio = width / height
    if width >= height and width > LONGEST:
        return LONGEST, max(int(LONGEST / ratio), 1)
    if height > width and height > LONGEST:
        return max(int(LONGEST * ratio), 1), LONGEST
    return width, height


def _multiple(width: int, height: int, tile: int) -> tuple[int, int]:
    """The size with sides that are multiples of `tile`: the longer side is rounded up first."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        return width, max(math.ceil(int(width / ratio) / tile), 1) * tile
    height = math.ceil(height / tile) * tile
    return max(math.ceil(int(height * ratio) / tile), 1) * tile, height


def _square(image: "Image", tile: int, pixels: Pixels) -> np.ndarray:
    return _array(image.resize((tile, tile), pixels.resample))


def _array(image: "Image") -> np.ndarray:
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))
