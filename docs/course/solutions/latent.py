"""Exercise of chapter 10, solved."""

import torch
from torch import Tensor


def attend_with_k_and_v(q: Tensor, latents: Tensor, w_k: Tensor, w_v: Tensor, scale: float) -> Tensor:
    """As in the exercise."""
    k = torch.einsum("hkr,tr->htk", w_k, latents)
    v = torch.einsum("hvr,tr->htv", w_v, latents)
    weights = (scale * torch.einsum("hk,htk->ht", q, k)).softmax(-1)
    return torch.einsum("ht,htv->hv", weights, v)


def attend(q: Tensor, latents: Tensor, w_k: Tensor, w_v: Tensor, scale: float) -> Tensor:
    """The same, without K and V."""
    folded = torch.einsum("hk,hkr->hr", q, w_k)
    weights = (scale * folded @ latents.mT).softmax(-1)
    return torch.einsum("hr,hvr->hv", weights @ latents, w_v)
