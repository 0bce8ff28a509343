"""A worker with adapters: the slots in its model, and the AdapterLoader that fills them."""

import logging

from nanopage.adapters.layers import Add, lora_buffers
from nanopage.adapters.model import AdaptedDecoder
from nanopage.adapters.weights import AdapterLoader
from nanopage.device import GIB
from nanopage.models.decoder import Decoder
from nanopage.worker.setup import Setup
from nanopage.worker.ways import Wings

logger = logging.getLogger("nanopage")


def attach_adapters(setup: Setup, decoder: Decoder, wings: Wings, add: Add) -> AdaptedDecoder:
    """Give a loaded model slots for adapters. Returns: the model with slots.

    Args: add: adds the products of adapters on this device.
    """
    config = setup.config
    model = AdaptedDecoder(decoder, config.max_loras, config.max_lora_rank, setup.dtype, setup.device, add)
    size = sum(buffer.nbytes for buffer in lora_buffers(model)) / GIB
    logger.info(f"{config.max_loras} slots for adapters of rank {config.max_lora_rank}: {size:.3f} GiB")
    wings.load_adapters = AdapterLoader(model, setup.model_config, config.max_lora_rank).load
    return model
