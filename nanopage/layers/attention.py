"""Attention as the models see it: an object made for each step, which knows where every token's K and V are.

There is one class for each way to compute it: `kernels.reference.ReferenceAttention` in plain torch,
`kernels.cpu.flash_decoding.FlashDecoding` for compiled decodes on a CPU, and `kernels.paged_attention.TritonAttention`.
"""

from typing import Protocol

from torch import Tensor


class Attention(Protocol):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, window: int | None = None) -> Tensor:
        """Write k and v to the cache, then causal attention of each token over its own sequence.

        Args:
            q: [T, num_heads, head_dim], rotated.
            k, v: [T, num_kv_heads, head_dim], k rotated.
            kv_cache: one layer's [2, num_blocks, num_kv_heads, head_dim * block_size] (see kernels/pages.py); written
                in place.
            window: attend only to the last `window` tokens, itself included.

        Returns: [T, num_heads, head_dim]
        """
