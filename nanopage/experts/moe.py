"""Mixtures of experts (Shazeer et al. 2017; Mixtral, Jiang et al. 2024): there are several feed-forward layers, the
experts, and a router chooses a few for each token. The output is the sum of their outputs, weighted by the router.

    x ─▶ gate ─▶ route ─▶ experts of each token, and their weights
    │                        │
    └────────────────────────┴─▶ experts ─▶ Σ weight * expert(x)   [+ shared expert, or sigmoid(its gate) * it]

Here each expert is an ordinary feed-forward layer, so whatever replaces the weights of linear layers (weight.py) also
replaces the weights of experts. On a GPU, `group_experts` fuses their weights before loading. On a CPU,
tiled_experts.py replaces the experts once more, if there is compiled code for them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopage.config.model import ExpertsConfig
from nanopage.experts.routing import route
from nanopage.layers.linear import Linear
from nanopage.layers.mlp import ACTIVATIONS, MLP


class Gate(nn.Module):
    """A matrix product that is never quantized, because rounding could change which experts are chosen.

    Shape: [T, hidden_size] -> [T, out_features]. A family may set `bias`, [out_features].
    """

    bias: nn.Parameter | None

    def __init__(self, hidden_size: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, hidden_size))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Router(Gate):
    """Chooses the experts of each token: [T, hidden_size] -> numbers and weights, as `route` returns them."""

    def __init__(self, hidden_size: int, config: ExpertsConfig):
        super().__init__(hidden_size, config.num_experts)
        self.num_chosen, self.normalize = config.num_chosen, config.normalize
        self.groups, self.scaling, self.is_plain = config.groups, config.scaling, config.is_plain
        self.e_score_correction_bias: nn.Parameter | None = None
        if config.corrected:  # float64: it is not rounded to the dtype of the model (see weights/allocation.py)
            self.e_score_correction_bias = nn.Parameter(torch.empty(config.num_experts, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if self.is_plain:
            return route(super().forward(x), self.num_chosen, self.normalize)
        exact = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(exact), self.weight.to(exact))  # as in transformers
        return route(logits, self.num_chosen, self.normalize, self.e_score_correction_bias, self.groups, self.scaling)


class MixtureOfExperts(nn.Module):
    """Takes the place of a feed-forward layer. Shape: [T, hidden_size] -> same.

    Args: expert: makes an expert of its sizes; its parts have the names of the checkpoint.
    """

    format = "experts"  # worker/jit.py compares the formats of layers

    def __init__(self, hidden_size: int, config: ExpertsConfig, expert: Callable[..., MLP] = MLP):
        super().__init__()
        self.gate = Router(hidden_size, config)
        self.experts: nn.Module = Experts(
            expert(hidden_size, config.intermediate_size) for _ in range(config.num_experts)
        )
        self.shared_expert: MLP | None = None
        self.shared_expert_gate: Gate | None = None
        self.shared_experts: MLP | None = None  # several in one
        if config.shared_size and config.shared_gate:
            self.shared_expert = MLP(hidden_size, config.shared_size)
            self.shared_expert_gate = Gate(hidden_size, 1)
        elif config.shared_size:
            self.shared_experts = MLP(hidden_size, config.shared_size)

    def forward(self, x: Tensor) -> Tensor:
        y = self.experts(x, self.gate)
        if self.shared_experts is not None:
            return y + self.shared_experts(x)
        if self.shared_expert is None or self.shared_expert_gate is None:
            return y
        return y + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)


class Experts(nn.ModuleList):
    """The experts, each with weights of its own. Experts of other workers are nn.Identity()."""

    def forward(self, x: Tensor, router: Router) -> Tensor:
        """Compute the weighted sum of the outputs of each token's experts. Reads the weights of chosen experts only.

        Args: x: [T, hidden_size].
        Returns: [T, hidden_size], the sum over this worker's experts.
        """
        y = torch.zeros_like(x)
        for expert, rows, scale in self.chosen(*router(x)):
            y.index_add_(0, rows, (expert(x[rows]) * scale).to(x.dtype))
        return y

    def chosen(self, numbers: Tensor, weights: Tensor) -> Iterator[tuple[nn.Module, Tensor, Tensor]]:
        """Each expert on this worker that has tokens, with these tokens, int64 [rows], and their weights, [rows, 1].

        Args: numbers, weights: as `route` returns them.
        """
        pairs = numbers.flatten()
        order = pairs.argsort(stable=True)
        counts = pairs.bincount(minlength=len(self)).tolist()
        tokens, scales = order // numbers.shape[1], weights.flatten()[order, None]
        for expert, rows, scale in zip(self, tokens.split(counts), scales.split(counts), strict=True):
            if len(rows) and not isinstance(expert, nn.Identity):
                yield expert, rows, scale

    def keep(self, rank: int, num_ranks: int) -> None:
        """Keep one of `num_ranks` equal ranges of experts."""
        each = len(self) // num_ranks
        for number in range(len(self)):
            if number // each != rank:
                self[number] = nn.Identity()


class GroupedExperts(nn.Module):
    """Experts for a GPU, with fused weights (see experts/grouped_linear.py). It does not synchronize with the GPU.

    gate_up_proj  [experts, 2 * intermediate_size, hidden_size]
    down_proj     [experts, hidden_size, intermediate_size]
    the same with _bias: [experts, outputs], or None

    Args: experts: on the meta device; adjacent ones.
    """

    def __init__(self, experts: Experts):
        from nanopage.experts import grouped_linear  # noqa: F401 (registers the operator; imports Triton)

        super().__init__()
        found: dict[int, Any] = {
            number: expert for number, expert in enumerate(experts) if not isinstance(expert, nn.Identity)
        }
        self.first = min(found)
        expert = found[self.first]
        self.swiglu: tuple[float, float] | None = getattr(expert, "swiglu", None)
        self.activation = next(name for name, function in ACTIVATIONS.items() if function is expert.activation)
        self.linears: dict[str, Linear] = {name: getattr(expert, name) for name in ("gate_up_proj", "down_proj")}
        for name, linear in self.linears.items():
            for each, of_one in ((name, linear.weight.matrix), (f"{name}_bias", linear.bias)):
                fused = None if of_one is None else nn.Parameter(of_one.new_empty(len(found), *of_one.shape))
                self.register_parameter(each, fused)

    def forward(self, x: Tensor, router: Router) -> Tensor:
        """As `Experts.forward`."""
        chosen, weights = router(x)
        biases = self.gate_up_proj_bias, self.down_proj_bias
        matrices = self.gate_up_proj, self.down_proj
        how = *biases, self.swiglu, self.activation
        return torch.ops.nanopage.grouped_experts(x, *matrices, chosen, weights, self.first, *how)

    def slots(self) -> Iterator[tuple[str, Tensor]]:
        """What the tensors of a checkpoint fill of each expert, under the names that they would have in `Experts`."""
        for name, linear in self.linears.items():
            for kind, fused in (("weight", getattr(self, name)), ("bias", getattr(self, f"{name}_bias"))):
                for index, of_one in enumerate(() if fused is None else fused.data):
                    for part, view in self._views(linear, of_one).items():
                        yield f"{self.first + index}.{part or name}.{kind}", view

    def _views(self, linear: Linear, of_one: Tensor) -> dict[str, Tensor]:
        """As `Linear.slots`. `clamped_swiglu` needs alternating rows of gate and up, even if files store them apart."""
        if self.swiglu is None or type(linear) is not Linear:
            return linear.slots(of_one)
        return {part: of_one[index :: len(linear.parts)] for index, part in enumerate(linear.parts)}


def group_experts(model: nn.Module) -> None:
    """Replace the experts of a model on the meta device by grouped ones."""
    for mixture in [module for module in model.modules() if isinstance(module, MixtureOfExperts)]:
        assert isinstance(mixture.experts, Experts)
        mixture.experts = GroupedExperts(mixture.experts)
