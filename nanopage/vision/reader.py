"""ImageReader: the images of prompts, as items. build.py attaches one to an engine whose model sees images."""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from nanopage.files.model_files import shown
from nanopage.items.items import make_item
from nanopage.step import Item
from nanopage.text.prompts import TokenizedPrompt
from nanopage.text.tokenizer import Tokenizer
from nanopage.vision.config import Pixels
from nanopage.vision.images import to_rgb

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_IMAGES = 16  # of a prompt, without limit_mm_per_prompt
PREPARED_BYTES = 128 * 2**20  # of images that are kept


class Images(Protocol):
    """How a model's images are prepared (vision/idefics3.py, vision/gemma3.py, vision/qwen2_vl.py).

    pixels: how the encoder prepares pixels. placeholder: what stands for an image in a prompt.
    """

    pixels: Pixels
    placeholder: str

    def read(self, image: "Image") -> tuple[str, list[np.ndarray]]:
        """The text in place of an image's placeholder, and what its tokens stand for: uint8 [3, height, width].

        Raises: ValueError for an image of a size that the model does not take.
        """

    def count(self, array: np.ndarray) -> tuple[int, int]:
        """How many tokens and how many patches an array of `read` has."""


class ImageConfig(Protocol):
    """image_token: the token of which several stand for an array of `Images.read`. whole: see `Item`."""

    image_token: int
    whole: bool


class ImageReader:
    """Puts the images of a prompt where its placeholders are.

    Args:
        images: how they are prepared.
        config: the model's, of its images.
        tokenizer: the model's.
        fetch: the image of a URL. Raises: ValueError.
        most: images of a prompt.

    Raises: ValueError if the tokenizer lacks the placeholder.
    """

    def __init__(
        self, images: Images, config: ImageConfig, tokenizer: Tokenizer, fetch: "Callable[[str], Image]", most: int
    ):
        self.images, self.config, self.tokenizer = images, config, tokenizer
        self.fetch, self.most = fetch, most
        place = tokenizer.backend.token_to_id(images.placeholder)
        if place is None:
            raise ValueError(f"the tokenizer has no token {images.placeholder!r}, which stands for an image")
        self.placeholder: int = place
        pixels = images.pixels  # (pixel * factor - mean) / std = pixel * scale + offset
        scale, offset = pixels.factor / np.array(pixels.std), -np.array(pixels.mean) / pixels.std
        self.prepared: OrderedDict[bytes, tuple[str, list[Item]]] = OrderedDict()  # by the image's pixels
        self.lock = threading.RLock()  # guards it: several threads read prompts, and arrays are freed at any time
        self.bytes_in_memory = 0  # of prepared images: of requests that have not ended, and kept ones
        self.scaling = {"scale": scale.astype(np.float32), "offset": offset.astype(np.float32)}

    def __call__(self, prompt: TokenizedPrompt, data: Any) -> None:
        """Add images to a prompt, which has a placeholder for each.

        Args: data: vLLM's {"image": an image or a list}; images are Pillow's, or URLs.
        Raises: TypeError, ValueError naming what is wrong.
        """
        given = self.check(data)
        if (found := prompt.token_ids.count(self.placeholder)) != len(given):
            placeholder = self.images.placeholder
            raise ValueError(f"the prompt has {placeholder!r} {found} times, but there are {len(given)} images")
        left, token_ids, merges = iter(given), list[int](), False
        for token_id in prompt.token_ids:
            if token_id == self.placeholder:
                text, items = self._prepare(next(left))
                self._append(prompt, token_ids, text, items)
                merges = text.endswith("\n")
            elif merges and (text := self._newlines(token_id)):
                self._append(prompt, token_ids, text, [])
            else:
                token_ids.append(token_id)
                merges = False
        prompt.token_ids = token_ids

    def _prepare(self, image: "Image") -> tuple[str, list[Item]]:
        """What takes the place of an image's placeholder: a text, and the items in it, at no position yet. The latest
        ones are kept, because each turn of a conversation has the images of the turns before it."""
        key = sha256(repr(image.size).encode() + image.tobytes()).digest()
        with self.lock:
            if key in self.prepared:
                self.prepared.move_to_end(key)
                return self.prepared[key]
        text, arrays = self.images.read(image)
        for array in arrays:
            self._count(array.nbytes)
            weakref.finalize(array, self._count, -array.nbytes)
        items = []
        for array in arrays:
            tokens, patches = self.images.count(array)
            items.append(make_item("image", 0, tokens, {"pixels": array} | self.scaling, patches))
            items[-1].whole = self.config.whole
        with self.lock:
            self.prepared[key] = text, items
            while len(self.prepared) > 1 and self._num_bytes() > PREPARED_BYTES:
                self.prepared.popitem(last=False)
        return text, items

    def _count(self, num_bytes: int) -> None:
        with self.lock:
            self.bytes_in_memory += num_bytes

    def _num_bytes(self) -> int:
        return sum(item.payload["pixels"].nbytes for _, items in self.prepared.values() for item in items)

    def _append(self, prompt: TokenizedPrompt, token_ids: list[int], text: str, items: list[Item]) -> None:
        """Append the tokens of a text to `token_ids`, and its items to a prompt. Newlines at the end of `token_ids` and
        at the start of the text become tokens together, as they would in a text."""
        while text.startswith("\n") and token_ids and (before := self._newlines(token_ids[-1])):
            text = before + text
            token_ids.pop()
        new = self.tokenizer.encode(text, add_special_tokens=False)
        places = [place for place, token_id in enumerate(new, len(token_ids)) if token_id == self.config.image_token]
        if len(places) != sum(item.length for item in items):
            raise ValueError(f"the tokenizer does not make the token {self.config.image_token} of an image's text")
        for item in items:
            prompt.items.append(replace(item, position=places[0]))
            del places[: item.length]
        token_ids += new

    def _newlines(self, token_id: int) -> str:
        """The text of a token, if it is only newlines."""
        text = self.tokenizer.backend.decode([token_id])
        return text if text.strip("\n") == "" else ""

    def check(self, data: Any) -> "list[Image]":
        """The RGB images of multi_modal_data. URLs are fetched. Raises: as `__call__`."""
        if not isinstance(data, dict):
            raise TypeError(f"multi_modal_data must be a dict, not {shown(data)}")
        if unknown := data.keys() - {"image"}:
            raise ValueError(f"multi_modal_data has {shown(min(map(str, unknown)))}: this model takes only 'image'")
        given = data.get("image")
        listed = given if isinstance(given, list | tuple) else [] if given is None else [given]
        self.check_number(listed)
        images = []
        for index, each in enumerate(listed):
            try:
                images.append(self.load(each))
            except (TypeError, ValueError) as error:
                raise type(error)(f"image {index}: {error}") from None
        return images

    def check_number(self, images: Sequence[Any]) -> None:
        """Raises: ValueError if there are too many images."""
        if len(images) > self.most:
            raise ValueError(f"{len(images)} images are more than {self.most}: see limit_mm_per_prompt")

    def load(self, image: Any) -> "Image":
        """The RGB image of a Pillow image or of a URL. Raises: TypeError, ValueError naming what is wrong."""
        return self.fetch(image) if isinstance(image, str) else to_rgb(image)
