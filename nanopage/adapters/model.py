"""AdaptedDecoder: a decoder whose linear layers add the products of adapters (adapters/layers.py).

Without adapters, engines run a plain Decoder.
"""

from typing import Any

import torch
from torch import Tensor, nn

from nanopage.adapters.layers import Add, LoRAWeight, Running
from nanopage.layers.attention import StepContext
from nanopage.layers.mlp import MLP
from nanopage.models.decoder import Decoder

PLACES = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


def check_layers(decoder: Decoder) -> None:
    """Raises: ValueError for a family that lacks the linear layers of PLACES. Weights are not read."""
    layers: Any = decoder.layers
    for layer in layers:
        if type(getattr(layer, "mlp", None)) is not MLP or "q_proj" not in layer.self_attn.qkv_proj.parts:
            raise ValueError("enable_lora does not work with this model: its linear layers are of another kind")


class AdaptedDecoder(Decoder):
    """A loaded decoder with slots for adapters in its linear layers, except the head. Changes `decoder`.

    Args: num_slots, rank, add: as in LoRAWeight. dtype: of activations.
    """

    def __init__(self, decoder: Decoder, num_slots: int, rank: int, dtype: torch.dtype, device: torch.device, add: Add):
        nn.Module.__init__(self)  # not Decoder's: the modules are those of `decoder`
        self.running = Running()
        layers: Any = decoder.layers
        for layer in layers:
            for place in PLACES:
                linear = layer.get_submodule(place)
                linear.weight = LoRAWeight(linear, num_slots, rank, dtype, device, self.running, add)
        self.take(decoder)

    def forward(self, input_ids: Tensor, step: StepContext) -> Tensor:
        """As `Decoder.forward`."""
        self.running.step = step
        try:
            return super().forward(input_ids, step)
        finally:
            self.running.step = None  # it holds the KV cache
