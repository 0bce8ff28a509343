"""Attention as models see it: an object that is made for each step and knows where the K and V of every token are.

The ways to compute attention, by class: `kernels.reference.ReferenceAttention` in plain PyTorch,
`kernels.paged_attention.TritonAttention` on a GPU, and `worker.cuda_graphs.PaddedAttention` for padded decodes on a
CPU, which only tests run. Compiled layers on a CPU take the fields of a ReferenceAttention, and compute with
cpu/flash_attention.cpp.
"""

from typing import Protocol

from torch import Tensor


class Attention(Protocol):
    """Computes the attention of all layers in one step.

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

    def attend(
        self,
        q: Tensor,
        kv_cache: Tensor,
        window: int | None = None,
        scales: tuple[float, float] = (1.0, 1.0),
        scale: float | None = None,
        softcap: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute causal attention of each token over its own sequence, whose K and V the cache already has.

        Args:
            q: [T, num_heads, head_dim], rotated.
            kv_cache, scales: as in `write`.
            window: attend only to the last `window` tokens, including the token itself. None: to all.
            scale: of the products of q and K, above 0. None: head_dim ** -0.5.
            softcap: scores become softcap * tanh(scores / softcap) (Gemma 2). 0: they stay.
            out: filled and returned, contiguous. None: a new tensor.

        Returns: [T, num_heads, head_dim]
        """
