"""Images in a conversation. A message keeps the path and the SHA-256 of each file, which is not copied. A file is read
once: if it changes, the conversation goes on, but cannot be loaded again."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from nanopage.files.model_files import check_file

if TYPE_CHECKING:
    from PIL.Image import Image

    from nanopage.config.model import ModelConfig

FIELDS = {"path", "sha256"}  # of what a message keeps of an image
KINDS = {b"\x89PNG": "png", b"\xff\xd8": "jpeg", b"RIFF": "webp", b"GIF8": "gif", b"BM": "bmp"}  # by a file's beginning


@dataclass(frozen=True)
class ReadImage:
    """An image: `pixels` for an engine in this process, and `data`, its file, for a server."""

    pixels: Image
    data: bytes

    @property
    def url(self) -> str:
        """A data URL."""
        kind = next(kind for beginning, kind in KINDS.items() if self.data.startswith(beginning))
        return f"data:image/{kind};base64,{base64.b64encode(self.data).decode()}"


class Images:
    """The images that this process has read, by the SHA-256 of their files."""

    def __init__(self) -> None:
        self._read: dict[str, ReadImage] = {}

    def add(self, path: str) -> dict[str, str]:
        """Read an image. Returns what a message keeps of it. Raises: ValueError, OSError naming the file."""
        from nanopage.vision.images import MAX_BYTES, decode  # takes longer to import than a server to answer

        file = Path(path).expanduser().absolute()
        check_file(file)
        with open(file, "rb") as opened:
            data = opened.read(MAX_BYTES + 1)
        try:
            pixels = decode(data)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
        key = sha256(data).hexdigest()
        self._read[key] = ReadImage(pixels, data)
        return {"path": str(file), "sha256": key}

    def load(self, messages: list[dict]) -> None:
        """Read the images of messages again. Raises: as `add`; ValueError if one has changed."""
        for kept in images_of(messages):
            if kept["sha256"] not in self._read and self.add(kept["path"]) != kept:
                raise ValueError(f"{kept['path']} has changed since it was sent")

    def put(self, messages: list[dict]) -> list[dict]:
        """Messages with their images as parts, which come before the text."""
        put = []
        for message in messages:
            if own := message.get("images"):
                parts: list[dict] = [{"type": "image", "image": self._read[kept["sha256"]]} for kept in own]
                parts.append({"type": "text", "text": message["content"]})
                message = {"role": message["role"], "content": parts}
            put.append(message)
        return put

    def describe(self, kept: dict[str, str]) -> str:
        width, height = self._read[kept["sha256"]].pixels.size
        return f"{Path(kept['path']).name} ({width} x {height} pixels)"


def images_of(messages: list[dict]) -> list[dict[str, str]]:
    """What messages keep of their images."""
    return [kept for message in messages for kept in message.get("images", ())]


def sees_images(config: ModelConfig) -> bool:
    """Whether a model sees images, and writes text."""
    return "image" in config.encoders and config.pooling is None


def check_sight(sees: bool | None, name: str) -> None:
    """Raises: ValueError naming a model that sees no images. None: it is not known, so nothing is raised."""
    if sees is False:
        raise ValueError(f"{name} sees no images")


def check_images(images: object, name: str) -> None:
    """Check the images of a message in a session file. Raises: TypeError, ValueError."""
    if not isinstance(images, list) or not images:
        raise TypeError(f"{name} must be a list of images")
    for image in images:
        if not isinstance(image, dict) or image.keys() != FIELDS or not all(isinstance(v, str) for v in image.values()):
            raise ValueError(f"{name} must have {{'path': ..., 'sha256': ...}}, got {image!r:.200}")
