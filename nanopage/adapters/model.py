"""AdaptedDecoder: a decoder whose linear layers add the products of adapters (adapters/layers.py).

Without adapters, engines run a plain Decoder.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nanopage.adapters.files import FUSED, module_shapes
from nanopage.adapters.layers import Add, LoRAWeight, Running
from nanopage.config.model import ModelConfig
from nanopage.experts.moe import Experts, MixtureOfExperts
from nanopage.layers.attention import StepContext
from nanopage.layers.linear import Linear
from nanopage.models.decoder import Decoder


def check_layers(decoder: Decoder, config: ModelConfig) -> None:
    """Raises: ValueError if adapters cannot change the linear layers of this family. Reads no weights."""
    layers: Any = decoder.layers
    for index, layer in enumerate(layers):
        if parts_of(layer).keys() != module_shapes(config, index).keys():
            raise ValueError("enable_lora does not work with this model: its linear layers are of another kind")


def parts_of(layer: nn.Module) -> dict[str, tuple[Linear, str]]:
    """The parts of the linear layers in a decoder layer, named as in `module_shapes`: (linear layer, part)."""
    found = {}
    for name, module in layer.named_modules():
        for part in module.parts if isinstance(module, Linear) else ():
            found[f"{name.rpartition('.')[0]}.{part}" if part else name] = module, part
    return found


class AdaptedExperts(Experts):
    """Experts whose LoRAWeights learn which tokens they compute."""

    def __init__(self, experts: Experts, running: Running):
        super().__init__(experts)
        self.running = running

    def chosen(self, numbers: Tensor, weights: Tensor) -> Iterator[tuple[nn.Module, Tensor, Tensor]]:
        """As `Experts.chosen`."""
        slots = self.running.slots()
        try:
            for expert, rows, scale in super().chosen(numbers, weights):
                self.running.of_expert = None if slots is None else slots[rows]
                yield expert, rows, scale
        finally:
            self.running.of_expert = None


class AdaptedDecoder(Decoder):
    """A loaded decoder with slots for adapters in its linear layers, except the head. Changes `decoder`.

    Args: num_slots, rank, add: as in LoRAWeight. dtype: the dtype of activations.
    """

    def __init__(self, decoder: Decoder, num_slots: int, rank: int, dtype: torch.dtype, device: torch.device, add: Add):
        nn.Module.__init__(self)  # not Decoder.__init__: the modules come from `decoder`
        self.running, self.parts = Running(), [parts_of(layer) for layer in decoder.layers]
        for module in [*decoder.layers.modules()]:
            if isinstance(module, Linear):
                module.weight = LoRAWeight(module, num_slots, rank, dtype, device, self.running, add)
            elif isinstance(module, MixtureOfExperts):
                assert isinstance(module.experts, Experts)
                module.experts = AdaptedExperts(module.experts, self.running)
        self.take(decoder)

    def forward(self, input_ids: Tensor, step: StepContext) -> Tensor:
        """As `Decoder.forward`."""
        self.running.step = step
        try:
            return super().forward(input_ids, step)
        finally:
            self.running.step = None  # the step holds the KV cache

    def fill(self, slot: int, layer: int, module: str, a: Tensor, b: Tensor) -> None:
        """Put the weights of an adapter for one module into a slot, B already scaled (see adapters/files.py)."""
        if module not in FUSED:
            linear, part = self.parts[layer][module]
            linear.weight.fill(slot, part, a, b)
            return
        (experts,) = (child for child in self.layers[layer].modules() if isinstance(child, AdaptedExperts))
        of_experts = a.unflatten(0, (len(experts), -1)), b.unflatten(1, (-1, len(experts))).movedim(2, 0)
        for expert, a, b in zip(experts, *of_experts, strict=True):
            linear = getattr(expert, module.rpartition(".")[2])
            if a.shape[1] != linear.in_features:  # from PEFT before 0.19
                a, b = b.T, a.T
            for part, rows in zip(linear.parts, b.split([*linear.parts.values()]), strict=True):
                linear.weight.fill(slot, part, a, rows)

    def clear(self, slot: int, value: float = 0.0) -> None:
        """Fill the weights of a slot with zeros, or with NaN."""
        for module in self.layers.modules():
            if isinstance(module, LoRAWeight):
                module.clear(slot, value)
