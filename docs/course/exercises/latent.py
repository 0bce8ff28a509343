"""Exercise of chapter 10: latent attention without K and V.

    pytest -x docs/course/exercises/test_latent.py

In latent attention (DeepSeek-V2, 2024), a token keeps a single vector c of `rank` numbers, its latent. Each head h
makes its K and its V from c, with matrices of its own:

    k_h = W_K[h] c        v_h = W_V[h] c

    out_h = sum over tokens t of softmax_t(scale * q_h . k_h,t) * v_h,t

That is `attend_with_k_and_v` below. It makes K and V of all tokens of the context, for each head, in every step. But a
product of matrices may be bracketed in another way:

    q_h . (W_K[h] c)  =  (W_K[h]^T q_h) . c                sum_t w_t W_V[h] c_t  =  W_V[h] (sum_t w_t c_t)

So fold W_K into the query, attend to the latents as if they were K and V of a single head, and apply W_V to what comes
out. The result is the same, but for rounding. Fill in `attend`. The test also looks at the size of all tensors on the
way: none may have as many numbers as K or V would have.

(In the real thing, a token keeps some more numbers, which carry its position. See nanopage/families/deepseek.py.)
"""

import torch
from torch import Tensor


def attend_with_k_and_v(q: Tensor, latents: Tensor, w_k: Tensor, w_v: Tensor, scale: float) -> Tensor:
    """Attention of one query over T tokens, by making K and V.

    Args:
        q: [heads, k_size].
        latents: [T, rank].
        w_k: [heads, k_size, rank].
        w_v: [heads, v_size, rank].

    Returns: [heads, v_size].
    """
    k = torch.einsum("hkr,tr->htk", w_k, latents)
    v = torch.einsum("hvr,tr->htv", w_v, latents)
    weights = (scale * torch.einsum("hk,htk->ht", q, k)).softmax(-1)
    return torch.einsum("ht,htv->hv", weights, v)


def attend(q: Tensor, latents: Tensor, w_k: Tensor, w_v: Tensor, scale: float) -> Tensor:
    """The same, without K and V."""
    raise NotImplementedError("exercise 10")
