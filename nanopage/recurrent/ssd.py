"""State space duality (Dao & Gu 2024): how the states of Mamba-2's heads change with each token, and what they say.

The state of a head is a matrix S [P, N]. Each token decays it, adds a product to it, and reads it:

    S_t = exp(d_t) S_{t-1} + x_t b_tᵀ        y_t = S_t c_t        x_t [P], b_t and c_t [N], d_t a number up to 0

The tokens of a prompt are divided into chunks, in which the same is a product of matrices, as in attention. With D_ij,
the sum of d from j + 1 to i, and S before a chunk of the tokens 1 to L:

    y_i = exp(D_i0) S c_i + Σ_{j<=i} exp(D_ij) (c_iᵀ b_j) x_j        S_L = exp(D_L0) S + Σ_j exp(D_Lj) x_j b_jᵀ

So the result does not depend on how a prompt is divided into chunks or steps, except for rounding.
"""

import torch
from torch import Tensor

from nanopage.recurrent.sequences import Prompts


def scan(
    x: Tensor, decay: Tensor, b: Tensor, c: Tensor, state: Tensor, prompts: Prompts | None
) -> tuple[Tensor, Tensor]:
    """Run the T tokens of B sequences. All tensors have one dtype.

    Args:
        x: [T, G, R, P], of G groups of R heads.
        decay: d [T, G, R].
        b, c: [T, G, N]; the heads of a group share them.
        state: [B, G, R, P, N], before the step.
        prompts: as in Sequences.

    Returns: y [T, G, R, P], and the states after the step, without the tokens of drafts.
    """
    if prompts is None:
        state = torch.addcmul(state * decay.exp()[..., None, None], x[..., None], b[:, :, None, None])
        return torch.einsum("zgrpn,zgn->zgrp", state, c), state
    x, b, c = (prompts.chunked(tensor) for tensor in (x, b, c))  # [M, L, ...]
    decay = prompts.padded(decay.flatten(1)).unflatten(1, decay.shape[1:])  # [M, G, R, L]
    within = decays(decay)
    scores = torch.einsum("mign,mjgn->mgij", c, b)[:, :, None] * within
    left = within[..., -1, :].masked_fill((prompts.tokens < 0)[:, None, None], 0)  # of each token at the chunk's end
    added = torch.einsum("mjgrp,mjgn->mgrpn", x * left.movedim(-1, 1)[..., None], b)
    kept = decay.cumsum(-1).exp()  # of the state before a chunk, at each token

    def compute(state: Tensor, added: Tensor, kept: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.einsum("ign,grpn->grpi", c, state) * kept[:, :, None]
        return y, added + kept[..., -1, None, None] * state

    from_before, after = prompts.pass_on(compute, state, added, kept, c)
    y = torch.einsum("mgrij,mjgrp->migrp", scores, x) + from_before.movedim(-1, 1)
    return y.flatten(0, 1)[prompts.places], after


def decays(log_decay: Tensor) -> Tensor:
    """How much is left of token j at token i: the product of the decays from j + 1 to i, and 0 for a later token.
    log_decay [..., L] -> [..., L, L].

    Not from differences of sums from the start: these lose small decays behind large ones.
    """
    size = log_decay.shape[-1]
    return log_decay[..., None].expand(*log_decay.shape, size).tril(-1).cumsum(-2).exp().tril()
