"""Images in the messages of a conversation. A template sees only where they are. The images go into the prompt."""

import re
from typing import Any

from nanopage.files.model_files import shown

IMAGE = {"type": "image"}  # what is left of an image in a message
KINDS = ("image_url", "image")
DETAILS = (None, "auto", "high")  # an image always keeps all of its detail


def take_images(messages: Any) -> tuple[Any, list[Any]]:
    """Messages with IMAGE in place of each image, and the images in order.

    Args: messages: of which parts may be {"type": "image_url", "image_url": {"url": ...}}, {"type": "image", "image":
        an image or a URL} or {"type": "image", "url": ...}. Messages of another form stay as they are.
    Raises: TypeError, ValueError naming the part.
    """
    images: list[Any] = []
    if not isinstance(messages, list):
        return messages, images
    taken = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and any(is_image(part) for part in content):
            if message.get("role") != "user":
                raise ValueError(f"messages[{index}]['content'] has an image, but only the role 'user' may send some")
            parts = []
            for place, part in enumerate(content):
                if is_image(part):
                    images.append(_image_of(part, f"messages[{index}]['content'][{place}]"))
                    part = IMAGE
                parts.append(part)
            message = message | {"content": parts}
        taken.append(message)
    return taken, images


def is_image(part: Any) -> bool:
    """Whether a part of a message is an image."""
    return isinstance(part, dict) and part.get("type") in KINDS


def _image_of(part: dict, name: str) -> Any:
    """The image of a part, or its URL."""
    given = [key for key in ("image_url", "image", "url") if part.get(key) is not None]
    if len(given) != 1 or len(part) > 2:
        raise ValueError(f"{name} must have 'type' and either 'image_url', 'image' or 'url', not {shown(sorted(part))}")
    image = part[given[0]]
    if given == ["image_url"] and isinstance(image, dict):
        if unknown := image.keys() - {"url", "detail"}:
            raise ValueError(f"{name}['image_url'] has {shown(min(unknown))}, which is not supported")
        if image.get("detail") not in DETAILS:
            raise ValueError(f"{name}['image_url']['detail'] must be 'auto' or 'high', not {shown(image['detail'])}")
        image = image.get("url")
    if given != ["image"] and not isinstance(image, str):
        raise TypeError(f"{name}[{given[0]!r}] must be a URL, not {shown(image)}")
    return image


def for_template(messages: list[dict], template: str) -> list[dict]:
    """Messages with contents as a template reads them: as strings, or as lists of parts.

    Raises: ValueError if there are images, and the template knows none.
    """
    if not re.search(r"""["']image["']""", template):
        for index, message in enumerate(messages):
            if isinstance(message["content"], list):
                raise ValueError(f"messages[{index}]['content'] has an image, but the chat template knows none")
        return messages
    if re.search(r"\bis\s+string\b", template):  # it tells them apart
        return messages
    return [
        message
        if isinstance(message["content"], list)
        else message | {"content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    ]
