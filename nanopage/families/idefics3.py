"""Idefics3 and SmolVLM (Hugging Face 2024, 2025): Llama, and SigLIP's tower for images.

A square of an image becomes patches, of which the tower makes hidden states. The connector joins those of neighboring
patches (pixel shuffle, Shi et al. 2016) and projects them to the size of the text model.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanopage.checks.fields import Fields
from nanopage.config.model import ModelConfig
from nanopage.models import llama
from nanopage.models.llama import make_layer
from nanopage.reading.names import renamed
from nanopage.vision.config import read_siglip, read_token
from nanopage.vision.idefics3 import Idefics3Config, read_images
from nanopage.vision.siglip import SiglipTower

__all__ = ["make_layer", "read_images"]

ARCHITECTURES = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
NAMES = {r"^model\.text_model\.": "model.", r"^model\.(vision_model|connector)\.": r"model.encoders.image.\1."}
rename = partial(renamed, names=NAMES)  # in checkpoints: here


def text_fields(fields: Fields) -> Fields:
    """The fields of the text model, from a config.json that has them in text_config, beside vision_config."""
    text = fields.object("text_config")
    if text.values.get("model_type", "llama") != "llama":
        raise fields.unsupported("text_config", f"of the type {text.values['model_type']!r:.100}", ["llama"])
    # transformers takes only the outer field for the head.
    tied = {"tie_word_embeddings": fields.values.get("tie_word_embeddings", False)}
    return Fields(fields.values | text.values | tied, fields.source)


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    token = read_token(fields, "image_token_id", 128_257)
    vision = fields.object("vision_config")
    tower = read_siglip(Fields(vision.values, f"{fields.source}: vision_config"), 32, 12, 16)
    image = Idefics3Config(tower, fields.size("scale_factor", 2), token)
    return llama.read_config(fields, "LlamaForCausalLM") | {"encoders": {"image": image}}


def make_encoders(config: ModelConfig) -> dict[str, nn.Module]:
    """What computes the rows of images."""
    return {"image": Idefics3Encoder(config.encoders["image"], config.hidden_size)}


class Idefics3Encoder(nn.Module):
    """Makes the rows of squares of images."""

    def __init__(self, config: Idefics3Config, hidden_size: int):
        super().__init__()
        self.config, self.vision_model = config, SiglipTower(config.tower)
        joined = config.tower.hidden_size * config.scale_factor**2
        proj = nn.Linear(joined, hidden_size, bias=False)
        self.connector = nn.ModuleDict({"modality_projection": nn.ModuleDict({"proj": proj})})

    def forward(self, payload: dict[str, Tensor]) -> Tensor:
        """Compute the rows of the tokens of N squares.

        Args: payload: as of SiglipTower; the pixels are squares.
        Returns: [N, length, hidden_size]
        """
        pixels, tower, factor = payload["pixels"], self.config.tower, self.config.scale_factor
        side = pixels.shape[-1] // tower.patch_size
        x = self.vision_model(payload, _positions(side, tower.side, pixels.device))
        x = x.view(len(x), side // factor, factor, side // factor, factor, -1).transpose(2, 3)
        proj: nn.Module = self.connector["modality_projection"]["proj"]  # type: ignore[index]
        return proj(x.reshape(len(x), (side // factor) ** 2, -1))


def _positions(side: int, known_side: int, device: torch.device) -> Tensor:
    """The rows of `side` x `side` patches in position embeddings for `known_side` x `known_side`, as transformers
    computes them, rounding included."""
    boundaries = torch.arange(1 / known_side, 1.0, 1 / known_side, device=device)
    places = torch.arange(side, dtype=torch.float32, device=device) * (1.0 / torch.tensor(side, device=device))
    rows = torch.bucketize(places.clamp(max=1.0 - 1e-6), boundaries, right=True)
    return (rows[:, None] * known_side + rows).flatten()
