"""The sequences of a step, as layers with a state see them: those with a single token, and those with several.

The two groups are computed one after the other. Tokens of the second group are divided into chunks, because what a
chunk adds to a state is a product of matrices. Only the states go from chunk to chunk (`pass_on`). The tokens of a
draft have chunks of their own, after which nothing is kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanopage.device import to_device

CHUNK = 64  # tokens of a chunk
SHORT = 16  # chunks may be smaller if no sequence has more tokens in the step, as with drafts


@dataclass(slots=True)
class Prompts:
    """Where the T tokens of B sequences are in M chunks of L tokens. All tensors are int64, the last two on the CPU and
    the others on the device.

    sequence  [T]     the sequence of each token
    starts    [B]     the first token of each sequence
    kept      [B]     how many of its tokens the new state is of: all but those of a draft
    tokens    [M, L]  the token in each place of the chunks; -1 behind the last one
    places    [T]     the place of each token, counted over all chunks
    begins    [M]     the sequence that begins with a chunk; -1: the chunk goes on from the one before
    ends      [B]     the chunk after which the new state of each sequence is
    """

    sequence: Tensor
    starts: Tensor
    kept: Tensor
    tokens: Tensor
    places: Tensor
    begins: Tensor
    ends: Tensor

    def tensors(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.__slots__]

    def chunked(self, x: Tensor) -> Tensor:
        """x [T, ...] -> [M, L, ...]. Places behind the last token of a chunk hold an arbitrary one."""
        return x[self.tokens.clamp(min=0)]

    def padded(self, x: Tensor) -> Tensor:
        """x [T, n] -> [M, n, L], with zeros behind the last token of a chunk."""
        return self.chunked(x).masked_fill((self.tokens < 0)[..., None], 0).mT

    def pass_on(self, compute: Callable[..., tuple[Tensor, Tensor]], states: Tensor, *chunks: Tensor) -> list[Tensor]:
        """Pass states from chunk to chunk.

        Args:
            compute: computes a chunk, of the state before it and of its part of `chunks`: the output, and the state
                after it.
            states: of each sequence before its first chunk, [B, ...].
            chunks: [M, ...] each.

        Returns: the outputs [M, ...], and the states after the chunks `ends`, [B, ...].
        """
        if torch.compiler.is_compiling():

            def step(state: Tensor, part: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
                begins, *rest = part
                first = states.index_select(0, begins.clamp(min=0)[None])[0]
                out, state = compute(torch.where(begins < 0, state, first), *rest)
                return state, (out, state.clone())

            from torch._higher_order_ops import scan  # imports the compiler

            _, (outs, after) = scan(step, states[0].clone(), (self.begins, *chunks))
            return [outs, after[self.ends]]
        outs, after, ends = [], [], {*self.ends.tolist()}
        state = states[0]
        for index, begins in enumerate(self.begins.tolist()):
            state = state if begins < 0 else states[begins]
            out, state = compute(state, *(chunk[index] for chunk in chunks))
            outs.append(out)
            if index in ends:
                after.append(state)
        return [torch.stack(outs), torch.stack(after)]


@dataclass(slots=True)
class Sequences:
    """Sequences of a step that follow each other: B sequences, whose tokens are T rows.

    sources, targets  int64 [B], as in StatePages
    begin    whether a sequence may begin here, without a state
    prompts  their tokens, if they have several. None: each has one
    """

    num_rows: int
    sources: Tensor
    targets: Tensor
    begin: bool = True
    prompts: Prompts | None = None


def divide(pages: Any) -> list[Sequences]:
    """The sequences of a step, at most two groups: those with a single token, which come first, and the others.

    Args: pages: StatePages, which keep the result.
    """
    if pages.divided is None:
        counts, device = pages.counts, pages.sources.device
        first = int(np.searchsorted(counts > 1, True))
        pages.divided = []
        for which, make in ((slice(first), None), (slice(first, None), make_prompts)):
            if num_rows := int(counts[which].sum()):
                begin = not pages.starts[which].all()
                prompts = make and make(counts[which], pages.kept[which], device)
                blocks = pages.sources[which].contiguous(), pages.targets[which].contiguous()
                pages.divided.append(Sequences(num_rows, *blocks, begin, prompts))
    return pages.divided


def make_prompts(counts: np.ndarray, kept: np.ndarray, device: torch.device) -> Prompts:
    """Args: counts, kept: int64 [B], as in StatePages."""
    total, numbers = int(counts.sum()), np.arange(len(counts))
    pieces = np.stack([kept, counts - kept], axis=1)  # of each sequence: the known tokens, and its draft
    size = CHUNK if (longest := int(pieces.max())) > SHORT else min(CHUNK, longest)
    num_chunks = -(-pieces // size)
    padding = (num_chunks * size - pieces).ravel()
    places = np.arange(total) + np.repeat(padding.cumsum() - padding, pieces.ravel())
    tokens, begins = np.full(num_chunks.sum() * size, -1), np.full(num_chunks.sum(), -1)
    firsts = num_chunks.sum(1).cumsum() - num_chunks.sum(1)
    tokens[places], begins[firsts] = np.arange(total), numbers
    arrays = [np.repeat(numbers, counts), counts.cumsum() - counts, kept, tokens.reshape(-1, size)]
    on_device = [to_device(torch.from_numpy(np.ascontiguousarray(array)), device) for array in (*arrays, places)]
    on_cpu = [torch.from_numpy(array) for array in (begins, firsts + num_chunks[:, 0] - 1)]
    return Prompts(*on_device, *on_cpu)
