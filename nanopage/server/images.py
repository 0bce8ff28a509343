"""Images in the messages of a call: refused by models that see none, and decoded before the prompt is read."""

from typing import Any

from nanopage.aio.async_llm import AsyncLLM
from nanopage.server.errors import ApiError, unsupported
from nanopage.text.image_parts import is_image

TOKENS = 1000  # of an image, roughly
MOST_BYTES = 2 << 30  # of images that have been cut up: a file of 100 bytes may become 13 MB


def places_of(messages: list[dict]) -> list[str]:
    """Where the images of messages are, in order, such as "messages[0].content[1]"."""
    return [
        f"messages[{index}].content[{place}]"
        for index, message in enumerate(messages)
        if isinstance(content := message.get("content"), list)
        for place, part in enumerate(content)
        if is_image(part)
    ]


def check_sight(llm: AsyncLLM, messages: list[dict]) -> None:
    """Raises: ApiError for an image, if the model sees none."""
    if (places := places_of(messages)) and "image" not in llm.engine.model_config.encoders:
        raise unsupported(places[0], "the model reads and writes text")


async def load_images(llm: AsyncLLM, prompt: dict, messages: list[dict]) -> None:
    """Decode the images of a prompt of `chat_prompt`, in threads of their own: downloads may take long.

    Raises: ApiError naming the part of the messages.
    """
    if "multi_modal_data" not in prompt:
        return
    reader: Any = llm.engine.input_processor.prompts.item_readers["multi_modal_data"]
    if reader.bytes_in_memory > MOST_BYTES:
        message = f"the images of other calls take {MOST_BYTES >> 30} GiB: try again"
        raise ApiError(503, message, code="too_many_images", retry_after=1)
    images, places = prompt["multi_modal_data"]["image"], places_of(messages)
    try:
        reader.check_number(images)
    except ValueError as error:
        raise ApiError(400, f"messages: {error}", param="messages") from None
    for index, place in enumerate(places):
        try:
            images[index] = await llm.in_loader(reader.load, images[index])
        except (TypeError, ValueError) as error:
            raise ApiError(400, f"{place}: {error}", param=place) from None


def text_of(messages: list[dict]) -> list[str]:
    """The contents of messages, to estimate their tokens. An image counts as TOKENS."""
    texts = []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            texts.append("    " * TOKENS if is_image(part) else str(part))
    return texts
