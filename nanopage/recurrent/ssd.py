"""State space duality (Dao & Gu 2024): how the states of Mamba-2's heads change with each token, and what they say.

The state of a head is a matrix S [P, N]. Each token decays it, adds a product to it, and reads it:

    S_t = exp(d_t) S_{t-1} + x_t b_tᵀ        y_t = S_t c_t        x_t [P], b_t and c_t [N], d_t a number up to 0

The tokens of a prompt are divided into chunks, in which the same is a product of matrices, as in attention. With D_ij,
the sum of d from j + 1 to i, and S before a chunk of the tokens 1 to L:

    y_i = exp(D_i0) S c_i + Σ_{j<=i} exp(D_ij) (c_iᵀ b_j) x_j        S_L = exp(D_L0) S + Σ_j exp(D_Lj) x_j b_jᵀ

So the result does not depend on how a prompt is divided into chunks or steps, except for rounding.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanopage.device import to_device

CHUNK = 64  # tokens of a chunk, at most


def scan(x: Tensor, decay: Tensor, b: Tensor, c: Tensor, state: Tensor, pages: Any) -> tuple[Tensor, Tensor]:
    """Run the T tokens of a step of B sequences. Those with a single token come first. All tensors have one dtype.

    Args:
        x: [T, G, R, P], of G groups of R heads.
        decay: d [T, G, R].
        b, c: [T, G, N]; the heads of a group share them.
        state: [B, G, R, P, N], before the step.
        pages: of the layer's states (StatePages).

    Returns: y [T, G, R, P], and the states after the step, without the tokens of drafts.
    """
    if x.shape[0] == state.shape[0]:
        return decode(x, decay, b, c, state)
    first = int((pages.counts > 1).argmax())  # the first prompt
    one, more = ([tensor[which] for tensor in (x, decay, b, c, state)] for which in (slice(first), slice(first, None)))
    known = pages.kept
    pieces = np.stack([known, pages.counts - known], axis=1)
    decoded, scanned = decode(*one), scan_prompts(pieces[first:], *more)
    return torch.cat([decoded[0], scanned[0]]), torch.cat([decoded[1], scanned[1]])


def decode(x: Tensor, decay: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """As `scan`, of one token of each sequence."""
    state = torch.addcmul(state * decay.exp()[..., None, None], x[..., None], b[:, :, None, None])
    return torch.einsum("zgrpn,zgn->zgrp", state, c), state


def scan_prompts(
    pieces: np.ndarray, x: Tensor, decay: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """As `scan`, of any number of tokens.

    Args: pieces: int64 [B, 2], the tokens of each sequence that the new state is of, and the tokens of its draft.
    """
    size = min(CHUNK, int(pieces.max()))
    num_chunks = -(-pieces // size)
    padding = (num_chunks * size - pieces).flatten()  # behind the tokens of each piece; it leaves states as they are
    shifts = np.repeat(padding.cumsum() - padding, pieces.flatten())
    places = to_device(torch.from_numpy(np.arange(len(x)) + shifts), x.device)

    def chunks(tensor: Tensor) -> Tensor:  # [M, L, ...]
        padded = tensor.new_zeros(int(num_chunks.sum()) * size, *tensor.shape[1:])
        return padded.index_copy_(0, places, tensor).unflatten(0, (-1, size))

    x, b, c, decay = chunks(x), chunks(b), chunks(c), chunks(decay).movedim(1, -1)
    # Not as differences of sums from the start: these round off what adjacent tokens say of each other.
    within = decay[..., None].expand(*decay.shape, size).tril(-1).cumsum(-2).exp().tril()  # exp(D) [M, G, R, L, L]
    scores = torch.einsum("mign,mjgn->mgij", c, b)[:, :, None] * within
    added = torch.einsum("mjgrp,mjgn->mgrpn", x * within[..., -1, :].movedim(-1, 1)[..., None], b)
    kept = decay.cumsum(-1).exp()  # of the state before a chunk, at each token
    before, after = _pass_on(added, kept[..., -1], state, num_chunks)
    y = torch.einsum("mgrij,mjgrp->migrp", scores, x)
    y += torch.einsum("mign,mgrpn->migrp", c, before) * kept.movedim(-1, 1)[..., None]
    return y.flatten(0, 1)[places], after


def _pass_on(added: Tensor, kept: Tensor, state: Tensor, num_chunks: np.ndarray) -> tuple[Tensor, Tensor]:
    """Pass states from chunk to chunk.

    Args:
        added: [M, G, R, P, N], what each chunk adds; overwritten.
        kept: [M, G, R], the share of the state before the chunk that is left after it.
        state: [B, G, R, P, N], before the first chunks.
        num_chunks: [B, 2], of the known tokens of each sequence and of its draft, which follow each other.

    Returns: the states before each chunk, and the states after the known tokens.
    """
    before: list[Tensor] = []
    after: list[Tensor] = []
    for current, (known, drafted) in zip(state, num_chunks.tolist(), strict=True):
        for number in range(1, known + drafted + 1):
            chunk = len(before)
            before.append(current)
            current = added[chunk].addcmul_(current, kept[chunk, ..., None, None])
            if number == known:
                after.append(current)
    return torch.stack(before), torch.stack(after)
