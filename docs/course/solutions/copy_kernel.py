"""Exercise of chapter 5, solved."""

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
    pair, head = tl.program_id(0), tl.program_id(1)
    source, target = tl.load(pair_ptr + 2 * pair), tl.load(pair_ptr + 2 * pair + 1)
    lane = tl.arange(0, LANES)
    inside = lane < PAGE
    for kv in range(2):
        pages = cache_ptr + kv * kv_stride + head * head_stride + lane
        tl.store(pages + target * block_stride, tl.load(pages + source * block_stride, mask=inside), mask=inside)


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
