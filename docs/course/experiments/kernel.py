"""Two Triton kernels in the interpreter: nanopage's, which writes K and V to pages, and a small one that reads them.

python docs/course/experiments/kernel.py
"""

import os
from dataclasses import dataclass

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: kernels then run on the CPU, one program at a time

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanopage.kernels import cache_write
from nanopage.state import pages

HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 4, 4, 3
LENGTHS = {"A": 6, "B": 3}  # tokens of two sequences
TABLES = {"A": [2, 0], "B": [1]}


@triton.jit
def attend_kernel(
    q_ptr,  # [sequences, HEAD_DIM]
    k_ptr,  # pages [HEAD_DIM, BLOCK_SIZE]
    v_ptr,  # pages [BLOCK_SIZE, HEAD_DIM]
    table_ptr,  # [sequences, max_blocks]
    length_ptr,  # [sequences]
    out_ptr,  # [sequences, HEAD_DIM]
    trace_ptr,  # [sequences, max_blocks, 2 + BLOCK_SIZE]: highest, total and the scores after each block, to look at
    max_blocks,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program for each sequence: attention of one query over the pages of its block table."""
    sequence = tl.program_id(0)
    length = tl.load(length_ptr + sequence)
    dim, offset = tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK_SIZE)
    q = tl.load(q_ptr + sequence * HEAD_DIM + dim)
    highest = tl.full((), float("-inf"), tl.float32)  # the largest score so far
    total = tl.zeros((), tl.float32)  # the sum of exp(score - highest) so far
    acc = tl.zeros((HEAD_DIM,), tl.float32)  # the sum of exp(score - highest) * v so far
    for index in range(tl.cdiv(length, BLOCK_SIZE)):
        page = tl.load(table_ptr + sequence * max_blocks + index) * HEAD_DIM * BLOCK_SIZE
        written = index * BLOCK_SIZE + offset < length
        k = tl.load(k_ptr + page + dim[:, None] * BLOCK_SIZE + offset[None, :], mask=written[None, :], other=0.0)
        v = tl.load(v_ptr + page + offset[:, None] * HEAD_DIM + dim[None, :], mask=written[:, None], other=0.0)
        scores = tl.where(written, tl.sum(q[:, None] * k, 0) * scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 0))
        weights = tl.exp(scores - higher)
        faded = tl.exp(highest - higher)  # what was added up so far was relative to a smaller `highest`
        total = total * faded + tl.sum(weights, 0)
        acc = acc * faded + tl.sum(weights[:, None] * v, 0)
        highest = higher
        trace = trace_ptr + (sequence * max_blocks + index) * (2 + BLOCK_SIZE)
        tl.store(trace, highest)
        tl.store(trace + 1, total)
        tl.store(trace + 2 + offset, scores)
    tl.store(out_ptr + sequence * HEAD_DIM + dim, acc / total)


def slots() -> dict[str, list[int]]:
    """The slot of each token of each sequence."""
    return {
        name: [TABLES[name][i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(length)]
        for name, length in LENGTHS.items()
    }


def write(k: Tensor, v: Tensor) -> Tensor:
    """Write k and v [tokens of A, then of B, HEAD_DIM] with nanopage's kernel: a program for each token.

    Returns: the cache of a layer with one head, [2, NUM_BLOCKS, 1, HEAD_DIM * BLOCK_SIZE]. What is not written is NaN.
    """
    cache = torch.full((2, NUM_BLOCKS, 1, HEAD_DIM * BLOCK_SIZE), torch.nan)
    slot_mapping = torch.tensor([slot for of_sequence in slots().values() for slot in of_sequence])
    cache_write.write(k[:, None], v[:, None], cache, slot_mapping)
    return cache


@dataclass
class Seen:
    """What a program has seen in each block of its sequence, in order."""

    blocks: list[int]
    highest: list[float]
    total: list[float]
    scores: list[list[float]]


def attend(q: Tensor, cache: Tensor) -> tuple[Tensor, dict[str, Seen]]:
    """Attention of a query [sequences, HEAD_DIM] for each sequence. Returns: [sequences, HEAD_DIM], what was seen."""
    most = max(map(len, TABLES.values()))
    tables = torch.tensor([table + [0] * (most - len(table)) for table in TABLES.values()])
    out, trace = torch.empty_like(q), torch.full((len(LENGTHS), most, 2 + BLOCK_SIZE), torch.nan)
    lengths = torch.tensor(list(LENGTHS.values()))
    arguments = q, cache[0], cache[1], tables, lengths, out, trace, most, HEAD_DIM**-0.5
    attend_kernel[(len(LENGTHS),)](*arguments, HEAD_DIM=HEAD_DIM, BLOCK_SIZE=BLOCK_SIZE)
    seen = {}
    for (name, table), rows in zip(TABLES.items(), trace.tolist(), strict=True):
        used = rows[: len(table)]
        seen[name] = Seen(table, [row[0] for row in used], [row[1] for row in used], [row[2:] for row in used])
    return out, seen


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """q of each sequence, and k and v of each token: small numbers, so that all scores are simple."""
    number = torch.arange(sum(LENGTHS.values()))
    k = torch.stack((number - 2, 3 * number % 4 - 1, number % 2, number * 0), dim=1).float()
    v = (number[:, None] + torch.arange(HEAD_DIM)).float()
    return torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]]), k, v


def main() -> None:
    q, k, v = inputs()
    cache = write(k, v)
    print("write_kernel: a program for each token and head")
    program = 0
    for name, of_sequence in slots().items():
        for position, slot in enumerate(of_sequence):
            block, offset = divmod(slot, BLOCK_SIZE)
            print(f"  program {program}: token {position} of {name} to slot {slot} = block {block}, offset {offset}")
            program += 1
    k_pages, v_pages = pages.views(cache, HEAD_DIM)
    print("\nblock 0 has tokens 4 and 5 of A. K: a column for each token     V: a row for each token")
    for k_row, v_row in zip(k_pages[0, 0].tolist(), v_pages[0, 0].tolist(), strict=True):
        print("  ", " ".join(f"{x:5.1f}" for x in k_row), " " * 30, " ".join(f"{x:5.1f}" for x in v_row))
    print("\nattend_kernel: a program for each sequence")
    out, seen = attend(q, cache)
    for program, (name, trace) in enumerate(seen.items()):
        print(f"  program {program}: {name}")
        for block, highest, total, scores in zip(trace.blocks, trace.highest, trace.total, trace.scores, strict=True):
            shown = " ".join(f"{score:5.2f}" for score in scores)
            print(f"    block {block}: scores {shown}   highest {highest:5.2f}   total {total:.2f}")
    starts = dict(zip(LENGTHS, (0, LENGTHS["A"]), strict=True))
    for index, (name, start) in enumerate(starts.items()):
        end = start + LENGTHS[name]
        expected = (k[start:end] @ q[index] * HEAD_DIM**-0.5).softmax(0) @ v[start:end]
        for who, values in {"the kernel": out[index], "plain torch": expected}.items():
            print(f"  {name}, {who:11}: {' '.join(f'{x:.3f}' for x in values.tolist())}")


if __name__ == "__main__":
    main()
