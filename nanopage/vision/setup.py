"""What reads the images of prompts, for an engine whose model sees images."""

from pathlib import Path

from nanopage.config.model import ModelConfig
from nanopage.config.options import SIZES, EngineConfig
from nanopage.files.model_files import shown
from nanopage.models.meta import family_of
from nanopage.text.tokenizer import Tokenizer
from nanopage.vision.reader import MOST_IMAGES, ImageReader
from nanopage.vision.sources import Sources, check_directory

OPTIONS = ("limit_mm_per_prompt", "allowed_local_media_path", "allowed_media_domains")


def make_image_reader(
    config: EngineConfig, model_config: ModelConfig, path: Path, tokenizer: Tokenizer | None
) -> ImageReader | None:
    """What reads the `multi_modal_data` of prompts. None if the model sees no images, has no tokenizer, or
    makes embeddings.

    Raises: ValueError naming an option, or a field of the model's files.
    """
    if "image" not in model_config.encoders:
        for option in config.given(*OPTIONS):
            raise ValueError(f"{option}, but {path} sees no images")
        return None
    if tokenizer is None or model_config.pooling is not None:
        return None
    limits = config.limit_mm_per_prompt or {}
    if unknown := limits.keys() - {"image"}:
        raise ValueError(f"limit_mm_per_prompt has {shown(min(map(str, unknown)))}: this model takes only 'image'")
    most = limits.get("image", MOST_IMAGES)
    if not isinstance(most, int) or isinstance(most, bool) or most < 0:
        raise ValueError(f"limit_mm_per_prompt: image must be an integer of at least 0, not {shown(most)}")
    image = model_config.encoders["image"]
    images = family_of(model_config).read_images(path, image)
    step = config.max_num_batched_tokens
    if image.whole and step is not None and step < images.tokens:
        raise ValueError(f"max_num_batched_tokens={step} is less than the {images.tokens} tokens of an image")
    for option in config.given(*SIZES, "distributed_executor_backend") if image.whole else ():
        raise ValueError(f"{option} does not work with {path.name}: the tokens of an image see each other")
    domains = frozenset(domain.lower() for domain in config.allowed_media_domains or ())
    sources = Sources(check_directory(config.allowed_local_media_path), domains)
    return ImageReader(images, image, tokenizer, sources.fetch, most)
