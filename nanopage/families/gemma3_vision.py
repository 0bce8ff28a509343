"""Gemma 3 with images (Gemma Team 2025): the text model of gemma3.py, and SigLIP's tower. An image is always scaled to
the size of the tower, whose hidden states are averaged over squares of patches. The tokens of an image see each other
(see vision/whole.py)."""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopage.checks.fields import Fields
from nanopage.config.model import ModelConfig
from nanopage.families import gemma3
from nanopage.families.gemma3 import make_layer
from nanopage.layers.norm import RMSNorm
from nanopage.reading.names import renamed
from nanopage.vision.config import read_siglip, read_token
from nanopage.vision.gemma3 import Gemma3Config, read_images
from nanopage.vision.siglip import SiglipTower

__all__ = ["make_layer", "read_images"]

ARCHITECTURES = ("Gemma3ForConditionalGeneration",)
ENCODER = "model.encoders.image."
NAMES = {  # in checkpoints of transformers 4 and 5: here
    r"^language_model\.(?=lm_head\.)": "",
    r"^(model\.)?language_model\.(model\.)?": "model.",
    r"^(model\.)?vision_tower\.(vision_model\.)?": f"{ENCODER}vision_tower.",
    r"^(model\.)?multi_modal_projector\.": f"{ENCODER}multi_modal_projector.",
    r"\.vision_tower\.head\.": None,  # SigLIP's own, for whole images
}
rename = partial(renamed, names=NAMES)
DEFAULTS = {  # of text_config, which is often left short
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131_072,
    "eos_token_id": 1,
}


def text_fields(fields: Fields) -> Fields:
    """As in idefics3.py."""
    tied = {"tie_word_embeddings": fields.values.get("tie_word_embeddings", True)}
    return Fields(DEFAULTS | fields.values | fields.object("text_config").values | tied, fields.source)


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py."""
    special = gemma3.read_config(fields, "Gemma3ForCausalLM")
    if special["logit_softcap"]:  # transformers reads the field and ignores it in this model
        raise fields.unsupported("final_logit_softcapping", "of Gemma 3 with images")
    tokens, token = fields.size("mm_tokens_per_image", 256), read_token(fields, "image_token_index", 262_144)
    vision = fields.object("vision_config")
    tower = read_siglip(Fields(vision.values, f"{fields.source}: vision_config"), 16, 12, 12)
    side = math.isqrt(tokens)
    if side**2 != tokens or tower.side % side:
        raise fields.error("mm_tokens_per_image", f"{tokens} is not the square of a divisor of {tower.side} patches")
    windows = [window for window in special["sliding_windows"] if window is not None]
    if min(windows, default=tokens) < tokens:
        raise fields.error("sliding_window", f"is less than the {tokens} tokens of an image")
    return special | {"encoders": {"image": Gemma3Config(tower, tokens, token)}}


def make_encoders(config: ModelConfig) -> dict[str, nn.Module]:
    """What computes the rows of images."""
    return {"image": Gemma3Encoder(config.encoders["image"], config.hidden_size)}


class Gemma3Encoder(nn.Module):
    """Makes the rows of images. The matrix of the projector is [size of the tower, size of the text model]."""

    def __init__(self, config: Gemma3Config, hidden_size: int):
        super().__init__()
        self.config, self.vision_tower, tower = config, SiglipTower(config.tower), config.tower
        self.multi_modal_projector: Any = nn.Module()
        self.multi_modal_projector.mm_soft_emb_norm = RMSNorm(tower.hidden_size, tower.layer_norm_eps, 1.0)
        matrix = nn.Parameter(torch.empty(tower.hidden_size, hidden_size))
        self.multi_modal_projector.mm_input_projection_weight = matrix

    def forward(self, payload: dict[str, Tensor]) -> Tensor:
        """payload: as of SiglipTower. Returns: [N, tokens, hidden_size]"""
        side, projector = self.config.tower.side, self.multi_modal_projector
        x = self.vision_tower(payload, torch.arange(side**2, device=payload["pixels"].device))
        pooled = F.avg_pool2d(x.mT.unflatten(2, (side, side)), side // math.isqrt(self.config.tokens))
        return projector.mm_soft_emb_norm(pooled.flatten(2).mT) @ projector.mm_input_projection_weight
