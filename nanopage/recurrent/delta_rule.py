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

import torch
from torch import Tensor

from nanopage.recurrent.sequences import Prompts
from nanopage.recurrent.ssd import decays


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, prompts: Prompts | None
) -> tuple[Tensor, Tensor]:
    """Compute T tokens of B sequences. All tensors have the dtype of the state.

    Args:
        q, k: [T, heads, key_dim].
        v: [T, heads, value_dim].
        log_decay: log a, [T, heads].
        beta: b, [T, heads].
        state: S of each sequence before the step, [B, heads, key_dim, value_dim].
        prompts: as in Sequences.

    Returns: o [T, heads, value_dim], and the states after the step, without the tokens of drafts.
    """
    if prompts is None:
        # The state is read once for both products: S_tᵀ q is a S_{t-1}ᵀ q + (kᵀ q) u.
        decay, beta, key = log_decay.exp()[..., None], beta[..., None], k[..., None]
        of_k, of_q = (decay[..., None, :] * (torch.stack((k, q), dim=-2) @ state)).unbind(-2)
        u = beta * (v - of_k)
        return of_q + (k * q).sum(-1, keepdim=True) * u, decay[..., None] * state + key * u[..., None, :]
    q, k, v = (prompts.chunked(x).transpose(1, 2) for x in (q, k, v))  # [M, heads, L, ...]
    log_decay, beta = prompts.padded(log_decay), prompts.padded(beta)[..., None]
    ratios, g = decays(log_decay), log_decay.cumsum(-1).exp()[..., None]
    system, right = (beta * ratios * (k @ k.mT)).tril(-1), beta * torch.cat((v, g * k), dim=-1)
    u_0, w = (inverse(system) @ right).split([v.shape[-1], k.shape[-1]], dim=-1)
    scores, q, k = ratios * (q @ k.mT), g * q, ratios[..., -1, :, None] * k

    def compute(state: Tensor, *chunk: Tensor) -> tuple[Tensor, Tensor]:
        u_0, w, scores, q, k, g = chunk
        u = u_0 - w @ state
        return q @ state + scores @ u, g[:, -1:] * state + k.mT @ u

    out, after = prompts.pass_on(compute, state, u_0, w, scores, q, k, g)
    return out.transpose(1, 2).flatten(0, 1)[prompts.places], after


def inverse(below: Tensor) -> Tensor:
    """The inverse of 1 + `below`, strictly lower triangular matrices [..., L, L].

    By blocks: the inverse of [[A, 0], [C, B]] is [[A⁻¹, 0], [-B⁻¹ C A⁻¹, B⁻¹]], for all blocks of a size at once, from
    1 up. As accurate as substitution, and products of matrices alone.
    """
    places = torch.arange(below.shape[-1], device=below.device)
    result = torch.eye(below.shape[-1], dtype=below.dtype, device=below.device).expand(below.shape)
    for size in (1, 2, 4, 8, 16, 32):
        rows, columns = places[:, None] // size, places // size
        corner = below * ((rows == columns + 1) & (rows % 2 == 1))
        result = result - (corner if size == 1 else result @ corner @ result)
    return result
