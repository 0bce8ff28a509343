"""Builds a model of any family, without memory for its weights. weights/loader.py fills it."""

from types import ModuleType

import torch

from nanopage.config.model import ModelConfig
from nanopage.layers.linear import Linear
from nanopage.models import find_family
from nanopage.models.decoder import Decoder


def family_of(config: ModelConfig) -> ModuleType:
    """Raises: ValueError for an unknown family."""
    family = find_family(config.architecture)
    if family is None:
        raise ValueError(f"architecture {config.architecture!r} is not supported")
    return family


def meta_model(config: ModelConfig) -> Decoder:
    """Build the model without memory for weights (on the meta device). Raises: as `family_of`."""
    family = family_of(config)
    with torch.device("meta"):
        if hasattr(family, "make_model"):  # it is more than a stack of layers
            model: Decoder = family.make_model(config)
        else:
            model = Decoder(config, [family.make_layer(config, index) for index in range(config.num_layers)])
        if config.encoders:
            model.encoders = torch.nn.ModuleDict(family.make_encoders(config))  # type: ignore[assignment]
        if (pooling := config.pooling) is not None and pooling.answers is None and not config.is_encoder:
            model.lm_head = None  # type: ignore[assignment]
            if pooling.task == "classify":
                model.score = Linear(config.hidden_size, pooling.num_labels)
        return model
