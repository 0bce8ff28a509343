"""Top-k, top-p and min-p on a GPU: a Triton kernel that searches the floor of each row, in one launch for a batch.

Tokens whose logit is at least the floor may be sampled. sampling/truncation.py has the rules.

A program has one row. It keeps the four largest logits of each of LANES lanes, as integers in the same order ("keys"):

    token     0   1   2   3   4   5   6   7   8   ...        lane = token % LANES
    lane      0   1   2   3   0   1   2   3   0   ...        here 4 lanes instead of LANES

The guard is the largest of the fourth keys of all lanes. Above it, no token is missing. A key is tried by adding up the
weights of the tokens from it upwards. The weight is 1 for top-k, and exp((logit - largest) / temperature) for top-p.
Bisection over the keys finds the largest key at which the sum is large enough, in at most as many steps as a key has
bits. Weights are integers, so a sum does not depend on the order in which they are added.

A step above the guard adds up the tokens that were kept, which are in registers. A step below it reads the row again.
Where at most a few hundred tokens may be sampled, they are nearly always above the guard: then a row is read once, and
once more for the sum of all weights if only top-p is set. FlashInfer and vLLM also search a pivot instead of sorting.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LANES = 2048
UNROLLED = 4  # tiles of LANES tokens that are loaded at once
ONE = tl.constexpr(2.0**40)  # the weight of the most likely token; sums fit int64 for up to 2^23 tokens

# Bits at the end of a float32 that are 0 if it was a float of 16 bits.
ZERO_BITS = {torch.float64: 0, torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


# Tensors of the sequence table, and rows of it: they may begin anywhere.
TABLES = ["rows_ptr", "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr"]


@triton.jit
def to_key(x, ZEROS: tl.constexpr):
    """Integers in the order of x: its bits, inverted if it is negative."""
    WIDTH: tl.constexpr = x.dtype.primitive_bitwidth
    bits = x.to(tl.int64 if WIDTH == 64 else tl.int32, bitcast=True) >> ZEROS
    return bits ^ ((bits >> (WIDTH - 1)) & ((1 << (WIDTH - 1 - ZEROS)) - 1))


@triton.jit
def from_key(key, ZEROS: tl.constexpr):
    """The float whose key this is."""
    WIDTH: tl.constexpr = key.dtype.primitive_bitwidth
    bits = (key ^ ((key >> (WIDTH - 1)) & ((1 << (WIDTH - 1 - ZEROS)) - 1))) << ZEROS
    return bits.to(tl.float64 if WIDTH == 64 else tl.float32, bitcast=True)


@triton.jit
def load_keys(row_ptr, token, VOCAB_SIZE: tl.constexpr, ZEROS: tl.constexpr):
    """Keys of logits. NaN, and what is beyond the vocabulary, counts as -infinity."""
    x = tl.load(row_ptr + token, mask=token < VOCAB_SIZE, other=float("-inf"))
    x = x.to(tl.float64 if x.dtype == tl.float64 else tl.float32)
    return to_key(tl.where(x == x, x, float("-inf")), ZEROS)


@triton.jit
def weigh(keys, largest, scale, BY_MASS: tl.constexpr, ZEROS: tl.constexpr):
    """int64: 1 for each token, or its probability relative to the largest logit, in units of 1 / ONE."""
    if BY_MASS:
        weights = (tl.exp2((from_key(keys, ZEROS) - largest) * scale) * ONE).to(tl.int64)
    else:
        weights = tl.full(keys.shape, 1, tl.int64)
    return weights


@triton.jit
def sum_from(
    pivot, kept, weights, guard, row_ptr, largest, scale,
    BY_MASS: tl.constexpr, VOCAB_SIZE: tl.constexpr, LANES: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """The sum of the weights of all tokens whose key is at least `pivot`."""
    if pivot > guard:
        total = tl.sum(tl.where(kept >= pivot, weights, 0))
    else:
        sums = tl.zeros((LANES,), tl.int64)
        for start in range(0, VOCAB_SIZE, LANES):
            keys = load_keys(row_ptr, start + tl.arange(0, LANES), VOCAB_SIZE, ZEROS)
            sums += tl.where(keys >= pivot, weigh(keys, largest, scale, BY_MASS, ZEROS), 0)
        total = tl.sum(sums)
    return total


@triton.jit
def search(
    wanted, lowest, reached, highest, kept, weights, guard, row_ptr, largest, scale,
    BY_MASS: tl.constexpr, VOCAB_SIZE: tl.constexpr, LANES: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """The largest key, at least `lowest`, such that the weights of this key and of larger ones add up to `wanted`.

    Args:
        reached: the sum from `lowest` upwards, at least `wanted`.
        highest: the largest key of the row.
    """
    low, high = lowest, highest + 1
    pivot = tl.minimum(tl.maximum(guard, low) + 1, highest)  # first step: which side of the guard?
    while (low + 1 < high) & (reached > wanted):  # a smaller sum would not reach it
        total = sum_from(pivot, kept, weights, guard, row_ptr, largest, scale, BY_MASS, VOCAB_SIZE, LANES, ZEROS)
        enough = total >= wanted
        low = tl.where(enough, pivot, low)
        reached = tl.where(enough, total, reached)
        high = tl.where(enough, high, pivot)
        pivot = (low & high) + ((low ^ high) >> 1)  # their mean, without overflow
    return low


@triton.jit(do_not_specialize_on_alignment=TABLES)
def floor_kernel(
    logits_ptr,
    rows_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    out_ptr,
    VOCAB_SIZE: tl.constexpr,
    LANES: tl.constexpr,
    UNROLLED: tl.constexpr,
    ZEROS: tl.constexpr,
):
    program = tl.program_id(0)
    row = tl.load(rows_ptr + program)
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    out_ptr += program
    tl.store(out_ptr, float("-inf"))
    if (temperature == 0) | ((top_k >= VOCAB_SIZE) & (top_p >= 1) & (min_p <= 0)):
        return
    row_ptr = logits_ptr + program.to(tl.int64) * VOCAB_SIZE
    lane = tl.arange(0, LANES)
    nothing = to_key(tl.full((LANES,), float("-inf"), out_ptr.dtype.element_ty), ZEROS)
    first, second, third, fourth = nothing, nothing, nothing, nothing  # the largest keys of each lane
    for start in range(0, VOCAB_SIZE, LANES * UNROLLED):
        for tile in tl.static_range(UNROLLED):
            key = load_keys(row_ptr, start + tile * LANES + lane, VOCAB_SIZE, ZEROS)
            first, key = tl.maximum(first, key), tl.minimum(first, key)
            second, key = tl.maximum(second, key), tl.minimum(second, key)
            third, key = tl.maximum(third, key), tl.minimum(third, key)
            fourth = tl.maximum(fourth, key)
    kept = tl.join(tl.join(first, second), tl.join(third, fourth))
    lowest, highest, guard = tl.min(nothing), tl.max(first), tl.max(fourth)
    largest = from_key(highest, ZEROS)
    if tl.abs(largest) == float("inf"):  # no token can be sampled
        return

    if min_p > 0:
        bound = (largest.to(tl.float64) + temperature * tl.log(min_p)).to(largest.dtype)
        least = to_key(bound, ZEROS)  # a logit of 16 bits may be below the bound
        lowest = tl.maximum(lowest, least + (from_key(least, ZEROS) < bound).to(least.dtype))
    if top_k < VOCAB_SIZE:
        ones = weigh(kept, largest, 0.0, False, ZEROS)
        every = tl.full((), VOCAB_SIZE, tl.int64)
        lowest = search(
            top_k, lowest, every, highest, kept, ones, guard, row_ptr, largest, 0.0, False, VOCAB_SIZE, LANES, ZEROS
        )  # fmt: skip
    if top_p < 1:
        scale = (1.4426950408889634 / temperature).to(largest.dtype)  # log2(e): exponentials are powers of two
        masses = weigh(kept, largest, scale, True, ZEROS)
        total = sum_from(lowest, kept, masses, guard, row_ptr, largest, scale, True, VOCAB_SIZE, LANES, ZEROS)
        wanted = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
        lowest = search(
            wanted, lowest, total, highest, kept, masses, guard, row_ptr, largest, scale, True, VOCAB_SIZE, LANES, ZEROS
        )  # fmt: skip
    tl.store(out_ptr, from_key(lowest, ZEROS))


@torch.library.triton_op("nanopage::find_floors", mutates_args=())
def find_floors(
    logits: Tensor, rows: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """The floor of each row: float32 or float64 [B]. -inf if its temperature is 0, or nothing truncates it: such a row
    costs a program that returns at once.

    Args:
        logits: [B, vocab_size], of any floating type, contiguous.
        rows: of the sequence table, int64 [B].
        temperature, top_k, top_p, min_p: of all rows of the sequence table.
    """
    num_rows = logits.shape[0]  # len() would compile the number in
    floors = logits.new_empty(num_rows, dtype=torch.promote_types(logits.dtype, torch.float32))
    limits = temperature, top_k, top_p, min_p
    # So that torch.compile can trace the launch. A kernel in Triton's interpreter cannot be traced.
    traced = isinstance(floor_kernel, triton.JITFunction)
    kernel = torch.library.wrap_triton(floor_kernel) if traced else floor_kernel
    kernel[num_rows,](logits, rows, *limits, floors, **floor_options(logits))
    return floors


def floor_options(logits: Tensor) -> dict[str, int]:
    """The constants that floor_kernel is specialized on, and the number of warps of a program."""
    vocab_size = logits.shape[1]
    lanes = min(LANES, triton.next_power_of_2(vocab_size))
    constants = {"VOCAB_SIZE": vocab_size, "LANES": lanes, "UNROLLED": UNROLLED, "ZEROS": ZERO_BITS[logits.dtype]}
    return constants | {"num_warps": 16}
