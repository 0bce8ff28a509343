"""Images in a conversation. A message keeps the path and the SHA-256 of each file, which is not copied. A file is read
once: if it changes, the conversation goes on, but cannot be loaded again."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from nanopage.config.model import ModelConfig
from nanopage.files.model_files import check_file
from nanopage.vision.images import MAX_BYTES, decode

if TYPE_CHECKING:
    from PIL.Image import Image

FIELDS = {"path", "sha256"}  # of what a message keeps of an image


class Images:
    """The images that this process has read, by the SHA-256 of their files."""

    def __init__(self) -> None:
        self._read: dict[str, Image] = {}

    def add(self, path: str) -> dict[str, str]:
        """Read an image. Returns what a message keeps of it. Raises: ValueError, OSError naming the file."""
        file = Path(path).expanduser().absolute()
        check_file(file)
        with open(file, "rb") as opened:
            data = opened.read(MAX_BYTES + 1)
        try:
            image = decode(data)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
        key = sha256(data).hexdigest()
        self._read[key] = image
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
                content = parts_of(message["content"], [self._read[kept["sha256"]] for kept in own])
                message = {"role": message["role"], "content": content}
            put.append(message)
        return put

    def describe(self, kept: dict[str, str]) -> str:
        width, height = self._read[kept["sha256"]].size
        return f"{Path(kept['path']).name} ({width} x {height} pixels)"


def parts_of(text: str, images: list[Image]) -> list[dict]:
    """The content of a message with images."""
    return [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]


def images_of(messages: list[dict]) -> list[dict[str, str]]:
    """What messages keep of their images."""
    return [kept for message in messages for kept in message.get("images", ())]


def check_sight(config: ModelConfig, name: str) -> None:
    """Raises: ValueError naming a model that sees no images."""
    if "image" not in config.encoders or config.pooling is not None:
        raise ValueError(f"{name} sees no images")


def check_images(images: object, name: str) -> None:
    """Raises: TypeError, ValueError for what is not the images of a message of a session file."""
    if not isinstance(images, list) or not images:
        raise TypeError(f"{name} must be a list of images")
    for image in images:
        if not isinstance(image, dict) or image.keys() != FIELDS or not all(isinstance(v, str) for v in image.values()):
            raise ValueError(f"{name} must have {{'path': ..., 'sha256': ...}}, got {image!r:.200}")
