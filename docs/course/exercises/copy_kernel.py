"""Exercise of chapter 5: a Triton kernel that copies blocks.

    pytest -x docs/course/exercises/test_copy_kernel.py

Forked sequences share blocks (chapter 2), and a sequence that writes to a shared block gets a copy of it first. On a
GPU, the copy is a kernel. Write it: one program for each pair of blocks and each KV head, which copies the page of K
and the page of V.

A layer's cache is [2, num_blocks, kv_heads, head_dim * block_size]: K and V, then the blocks, then the heads. A page,
the K or the V of one block and one head, is contiguous. The strides of the other axes are arguments: a cache can be a
view of a larger one. The number of elements of a page need not be a power of two, but tl.arange takes only powers of
two, so lanes beyond the page must be masked.

docs/course/experiments/kernel.py has a kernel to learn from. As there, the kernel runs in Triton's interpreter; print()
in a kernel works there, and so does breakpoint().
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def copy_kernel(
    cache_ptr,
    pair_ptr,  # int64 [pairs, 2], contiguous: from, to
    kv_stride,  # from K to V
    block_stride,  # from a block to the next
    head_stride,  # from a head to the next
    PAGE: tl.constexpr,  # elements of a page
    LANES: tl.constexpr,  # PAGE rounded up to a power of two
):
    """A program: pair tl.program_id(0), head tl.program_id(1)."""
    raise NotImplementedError("exercise 5")


def copy_blocks(cache: Tensor, pairs: Tensor) -> None:
    """Copy blocks within one layer's cache.

    Args:
        cache: [2, num_blocks, kv_heads, head_dim * block_size].
        pairs: int64 [pairs, 2]: from, to. No block is both copied and written to.
    """
    page = cache.shape[3]
    copy_kernel[len(pairs), cache.shape[2]](
        cache, pairs, *cache.stride()[:3], PAGE=page, LANES=triton.next_power_of_2(page)
    )
