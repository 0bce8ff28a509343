"""Part: the part of a model that one of several workers has.

A worker of tensor parallelism (Megatron-LM, Shoeybi et al. 2019) has a slice of each divided matrix. A worker of
pipeline parallelism (GPipe, Huang et al. 2019) has a range of layers: the first stage has the embedding as well, the
last one the final norm and the head.

Shapes alone tell what is divided: the model of `divide` has the same parameters as the whole model, and some have fewer
rows or columns. A Linear with fewer inputs computes only a part of each sum, so its output must be summed over all
workers (`sums`). The same holds for a mixture of experts, which has a part of each expert, or some whole experts
(expert parallelism: GShard, Lepikhin et al. 2020). Model families need no code for this.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from nanopage.config.model import ModelConfig
from nanopage.distributed.division import divide, layers_of_stage
from nanopage.experts.moe import Experts, MixtureOfExperts
from nanopage.layers.linear import Linear
from nanopage.models.decoder import Decoder
from nanopage.models.meta import meta_model

Slice = tuple[slice, ...]
"""The part of a tensor that a worker has, in each dimension."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a worker has: slice `tp_rank` (of `tp_size`) of each layer of pipeline stage `pp_rank` (of `pp_size`)."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    expert_parallel: bool = False  # divide the experts among the workers instead of the columns of each expert

    @property
    def is_first(self) -> bool:
        """Whether this is the first stage."""
        return self.pp_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage."""
        return self.pp_rank == self.pp_size - 1

    @property
    def samples(self) -> bool:
        """Whether this worker samples the tokens."""
        return self.is_last and self.tp_rank == 0

    def config(self, whole: ModelConfig) -> ModelConfig:
        """The shape of this part. Raises: as `divide` and `layers_of_stage`."""
        mine, part = self._layers(whole), self._divided(whole)
        layers = slice(mine.start, mine.stop)
        experts = part.experts and replace(part.experts, layers=part.experts.layers[layers])
        windows = whole.sliding_windows[layers]
        return replace(part, num_layers=len(mine), sliding_windows=windows, experts=experts)

    def model(self, whole: ModelConfig) -> Decoder:
        """This part of each layer, on the meta device. Layers keep their numbers: layers of other stages are
        nn.Identity(). `strip` removes everything else that belongs to other stages."""
        model, mine = meta_model(self._divided(whole)), self._layers(whole)
        for index in range(whole.num_layers):
            if index not in mine:
                model.layers[index] = nn.Identity()
        if self.expert_parallel:
            for experts in [module for module in model.modules() if isinstance(module, Experts)]:
                experts.keep(self.tp_rank, self.tp_size)
        if self.tp_rank:
            divided: list[Any] = [module for _, module in sums(model, whole)]
            for module in divided:
                if isinstance(module, Linear):
                    module.bias = None  # the first worker adds it
                elif not self.expert_parallel:
                    for expert in module.experts:
                        expert.down_proj.bias = None
        return model

    def _divided(self, whole: ModelConfig) -> ModelConfig:
        return divide(whole, self.tp_size, self.expert_parallel)

    def _layers(self, whole: ModelConfig) -> range:
        return layers_of_stage(whole, self.pp_rank, self.pp_size)

    def strip(self, model: Decoder, tied: bool) -> None:
        """Remove the embedding, the norm and the head, where only other stages use them.

        Args: tied: whether the embedding and the head share a weight. Then the first and the last stage keep both, so
            that loading finds the shared weight. `Ranks.connect` then removes the unused one.
        """
        keeps_shared = tied and (self.is_first or self.is_last)
        if not self.is_first and not keeps_shared:
            model.embed_tokens = None  # type: ignore[assignment]
        if not self.is_last:
            model.norm = None  # type: ignore[assignment]
            if not keeps_shared:
                model.lm_head = None  # type: ignore[assignment]

    def slice_of(self, shape: tuple[int, ...], whole: tuple[int, ...]) -> Slice:
        """Where a tensor of `shape` is in the whole tensor. Several workers may have the same slice."""
        slices = []
        for size, whole_size in zip(shape, whole, strict=True):
            num_slices = whole_size // size
            first = self.tp_rank * num_slices // self.tp_size * size
            slices.append(slice(first, first + size))
        return tuple(slices)


WHOLE = Part()


def sums(model: Decoder, whole: ModelConfig) -> list[tuple[str, nn.Module]]:
    """The linear layers and mixtures of experts of a part whose outputs must be summed over all workers, each with
    its place. The layers inside such a mixture are not summed separately."""
    complete = dict(meta_model(whole).named_modules())
    found: list[tuple[str, nn.Module]] = []
    for place, module in model.named_modules():
        if found and isinstance(found[-1][1], MixtureOfExperts) and place.startswith(f"{found[-1][0]}."):
            continue
        if isinstance(module, MixtureOfExperts):
            partial = _num_weights(module) != _num_weights(complete[place])
        else:
            partial = isinstance(module, Linear) and module.in_features != complete[place].in_features
        if partial:
            found.append((place, module))
    return found


def _num_weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def keep_layers(model: Decoder) -> None:
    """Number the layers of a part from 0, and drop the layers of other stages."""
    model.layers = nn.ModuleList(layer for layer in model.layers if not isinstance(layer, nn.Identity))
    layers: Any = model.layers
    for index, layer in enumerate(layers):
        for module in layer.modules():
            if hasattr(module, "index"):
                module.index = index
