"""Image files and Pillow images to RGB images, without trusting them.

Files are PNG, JPEG, WebP, GIF or BMP. An image is turned as its EXIF data say, and transparency becomes white, as in
transformers. Unlike there, 16 bits of gray are scaled to 8, not clipped.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from nanopage import escaped
from nanopage.files.model_files import shown

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_BYTES = 2**25  # of a file
MAX_PIXELS = 50_000_000  # 150 MB as RGB


def require_pillow() -> None:
    """Raises: ValueError if Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise ValueError("images need Pillow, which is not installed: pip install 'nanopage[vision]'") from None


def decode(data: bytes) -> Image.Image:
    """The RGB image in a file. Raises: ValueError saying what is wrong with it."""
    require_pillow()
    from PIL import Image

    if len(data) > MAX_BYTES:
        raise ValueError(f"the file has {len(data):,} bytes, more than {MAX_BYTES:,}")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.UnidentifiedImageError:
        raise ValueError(f"the file is not an image of the formats {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError:
        raise ValueError(f"the image has more than {MAX_PIXELS:,} pixels") from None
    except Exception as error:  # Pillow's decoders raise whatever Python raises
        raise _broken(error) from None
    return to_rgb(image)


def to_rgb(image: object) -> Image.Image:
    """A Pillow image in RGB, upright. Raises: TypeError, ValueError naming what is wrong."""
    require_pillow()
    from PIL import Image, ImageOps

    if not isinstance(image, Image.Image):
        raise TypeError(f"must be a PIL.Image.Image, not {shown(image)}")
    width, height = image.size
    if width * height > MAX_PIXELS:  # the pixels have not been read yet
        raise ValueError(f"the image has {width:,} x {height:,} pixels, more than {MAX_PIXELS:,}")
    if not width or not height:
        raise ValueError(f"the image has {width} x {height} pixels")
    try:
        # Photos in MPO have a second, smaller picture, which is no frame.
        animated = getattr(image, "is_animated", False) and image.format != "MPO"
        image.load()
        image = ImageOps.exif_transpose(image)
    except Exception as error:
        raise _broken(error) from None
    if animated:
        raise ValueError("the image is animated: send one frame")
    return _convert(image)


def _broken(error: Exception) -> ValueError:
    return ValueError(f"the image is broken: {escaped(str(error)[:200])}")


def _convert(image: Image.Image) -> Image.Image:
    from PIL import Image

    if image.mode == "F":
        raise ValueError("the image has floating-point pixels (mode F): convert it to 8 bits")
    if image.mode.startswith("I"):  # gray: 16 bits, or 32 bits with 16 in use
        image = Image.fromarray((np.clip(np.asarray(image), 0, 65535) >> 8).astype(np.uint8))
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")
