"""The gated delta rule (Gated DeltaNet, Yang et al. 2024): linear attention whose state forgets, and corrects itself.

The state S of a head maps keys to values. Token t lets it decay by a_t, from 0 to 1, and moves what it returns for the
key k_t towards the value v_t, by a share of b_t:

    u_t = b_t (v_t - a_t S_{t-1}ᵀ k_t)         S_t = a_t S_{t-1} + k_t u_tᵀ         o_t = S_tᵀ q_t

A prompt is computed in chunks. Let g_t be the product of the decays from the chunk's beginning, where the state is S_0,
to token t. Unrolled, S_t is g_t S_0 + Σ_{s≤t} g_t/g_s k_s u_sᵀ. So all u of a chunk solve one unit triangular system,
and are U - W S_0 (the WY representation):

    u_t + Σ_{s<t} b_t g_t/g_s (k_tᵀ k_s) u_s = b_t v_t - b_t g_t S_0ᵀ k_t

U and W do not depend on the state: they are computed for all chunks at once. Only S_0 goes from chunk to chunk. So the
result does not depend on how a prompt is divided into steps, except for rounding.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, pages: Any
) -> tuple[Tensor, Tensor]:
    """Compute a step of T tokens of B sequences, those with a single token first. All tensors have the dtype of the
    state.

    Args:
        q, k: [T, heads, key_dim].
        v: [T, heads, value_dim].
        log_decay: log a, [T, heads].
        beta: b, [T, heads].
        state: S of each sequence before the step, [B, heads, key_dim, value_dim].
        pages: of the layer's states (StatePages).

    Returns: o [T, heads, value_dim], and the states after the step, without the tokens of drafts.
    """
    if q.shape[0] == state.shape[0]:
        return _single_tokens(state, q, k, v, log_decay, beta)
    counts, kept = pages.counts.tolist(), pages.kept.tolist()
    num_single = next((index for index, count in enumerate(counts) if count > 1), len(counts))
    sizes = [num_single]
    for count, known in zip(counts[num_single:], kept[num_single:], strict=True):
        sizes += [known, count - known]
    pieces: list[tuple[Tensor, ...]] = [*zip(*(x.split(sizes) for x in (q, k, v, log_decay, beta)), strict=True)]
    out, after = _single_tokens(state[:num_single], *pieces[0])
    outs, states = [out], [*after]
    for before, tokens, draft in zip(state[num_single:], pieces[1::2], pieces[2::2], strict=True):
        out, after = _chunks(before, *tokens)
        outs.append(out)
        states.append(after)
        if len(draft[0]):
            outs.append(_chunks(after, *draft)[0])
    return torch.cat(outs), torch.stack(states)


def _single_tokens(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """As `delta_rule`, of sequences that have one token each."""
    state = log_decay.exp()[..., None, None] * state
    u = beta[..., None] * (v - (k[..., None, :] @ state).squeeze(-2))
    state = state + k[..., None] * u[..., None, :]
    return (q[..., None, :] @ state).squeeze(-2), state


def _chunks(state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """As `delta_rule`, of one sequence, with its state [heads, key_dim, value_dim]."""
    num_tokens, size = len(q), min(CHUNK, len(q))

    def chunked(x: Tensor) -> Tensor:
        """[T, heads, ..] -> [heads, chunks, size, ..]. Zeros at the end leave the state as it is."""
        padded = F.pad(x, (*[0, 0] * (x.dim() - 1), 0, -num_tokens % size))
        return padded.unflatten(0, (-1, size)).movedim(2, 0)

    q, k, v, beta, log_decay = (chunked(x) for x in (q, k, v, beta[..., None], log_decay))
    g = log_decay.cumsum(-1).exp()[..., None]
    # g_t/g_s, 0 for s > t. Not from differences of the sums in g: these lose small decays behind large ones.
    ratios = log_decay[..., None].expand(*log_decay.shape, size).tril(-1).cumsum(-2).exp().tril()
    system, right = beta * ratios * (k @ k.mT), beta * torch.cat((v, g * k), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)  # never reads the diagonal
    u_0, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores, q, k = ratios * (q @ k.mT), g * q, ratios[..., -1, :, None] * k
    outs = []
    for index in range(q.shape[1]):
        u = u_0[:, index] - w[:, index] @ state
        outs.append(q[:, index] @ state + scores[:, index] @ u)
        state = g[:, index, -1:] * state + k[:, index].mT @ u
    return torch.cat(outs, dim=1)[:, :num_tokens].transpose(0, 1), state
