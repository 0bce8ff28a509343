"""What layers need to know about a step: a StepContext, with the attention of each kind of layers.

kernels/reference.py spells attention out. Two classes compute it: `kernels.grouped_attention.GroupedAttention` in
plain PyTorch, and `kernels.paged_attention.TritonAttention` on a GPU. Compiled layers on a CPU take the fields of a
GroupedAttention, and compute with cpu/flash_attention.cpp.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from nanopage.kernels.reference import PLAIN, Scoring


class Attention(Protocol):
    """Computes the attention of all layers of one kind in one step. Knows where the K and V of every token are.

    slot_mapping  int64 [T], on the device: where K and V of each token go; -1 for padding
    """

    slot_mapping: Tensor

    def write(self, k: Tensor, v: Tensor, kv_cache: Tensor, scales: tuple[float, float] = (1.0, 1.0)) -> None:
        """Write the K and V of this step's tokens to the cache.

        Args:
            k, v: [T, num_kv_heads, head_dim], k rotated.
            kv_cache: one layer's [2, num_blocks, num_kv_heads, head_dim * block_size] (see state/pages.py); written
                in place.
            scales: of K and V in a cache in fp8 (see state/pages.py); of no effect with another dtype.
        """

    def attend(self, q: Tensor, kv_cache: Tensor, scoring: Scoring = PLAIN, out: Tensor | None = None) -> Tensor:
        """Compute causal attention of each token over its own sequence, whose K and V the cache already has.

        Args:
            q: [T, num_heads, head_dim], rotated.
            kv_cache: as in `write`.
            scoring: the layer's.
            out: filled and returned, contiguous. None: a new tensor.

        Returns: [T, num_heads, head_dim]
        """


@dataclass(slots=True)
class StepContext:
    """What layers need to know about a step of T tokens, in addition to their hidden states. The way that runs a step
    makes it, and `Decoder.forward` adds the rotations.

    positions   int64 [T], of each token in its sequence; [T, 3] where an image has three axes (see items/axes.py)
    attentions  of each kind of layers (see state/layer_kinds.py); with a state, StatePages (worker/state_pages.py)
    kinds       of each layer, the index of its kind in `attentions`
    kv_caches   of each layer, [2, num_blocks, num_kv_heads, head_dim * block_size]; written in place
    rows        int64: the tokens whose hidden states are wanted after the last layer. None: all
    adapters    int64 [T], the adapter slot of each token, -1 for none. None: no token has one
    embeds      (indices int64 [N], rows [N, hidden_size]): the input of the first layer for these tokens, in place of
                their embeddings. None: no token is of an item
    taps        layers -> their inputs [T, hidden_size], which `Decoder.run_layers` puts there; the number of layers
                stands for the output of the last one. Empty: no wing wants them
    rotations   cos and sin of each token, for each rope of the model, which computes them (see RotaryEmbedding)
    """

    positions: Tensor
    attentions: Sequence[Any]
    kinds: Sequence[int]
    kv_caches: Sequence[Tensor]
    rows: Tensor | None = None
    adapters: Tensor | None = None
    embeds: tuple[Tensor, Tensor] | None = None
    taps: dict[int, Any] = field(default_factory=dict)
    rotations: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def write(self, layer: Any, k: Tensor, v: Tensor) -> None:
        """Write K and V of the tokens to the cache of a layer. layer: its SelfAttention. k, v: as in Attention."""
        self.attention_of(layer).write(k, v, self.kv_caches[layer.index], layer.scoring.kv_scales)

    def attend(self, layer: Any, q: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute the attention of a layer. layer: its SelfAttention. q, out: as in Attention."""
        return self.attention_of(layer).attend(q, self.kv_caches[layer.index], layer.scoring, out)

    def attention_of(self, layer: Any) -> Attention:
        return self.attentions[self.kinds[layer.index]]

    def keep(self, layer: Any, *tensors: Tensor) -> Sequence[Tensor]:
        """Keep only `rows` of tensors [T, ..] in the last layer, and all rows in the others."""
        if self.rows is None or layer.index + 1 < len(self.kinds):
            return tensors
        if self.adapters is not None:
            self.adapters = self.adapters[self.rows]
        return [tensor[self.rows] for tensor in tensors]
