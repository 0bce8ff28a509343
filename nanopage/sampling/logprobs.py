"""Log-probabilities of tokens, and of the most likely tokens at the same positions."""

import itertools

import torch
from torch import Tensor

from nanopage.step import LogprobTable


def top_logprobs(logits: Tensor, tokens: Tensor, num: int) -> list[Tensor]:
    """The log-probability of one token in each row (meaningless for NO_TOKEN), and the `num` highest of each row.

    Args:
        logits: [R, vocab_size], of any floating type; computed in float32 at least.
        tokens: int64 [R].

    Returns: the tokens' log-probabilities and ranks, [R] each; the `num` highest log-probabilities and their token ids,
        [R, num] each.
    """
    logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens[:, None].clamp(min=0))
    ranks = (logprobs > chosen).sum(dim=-1).add_(1)
    return [chosen.squeeze(1), ranks, *logprobs.topk(min(num, logprobs.shape[-1]), dim=-1)]


def make_tables(tokens: list[int], top: list[Tensor]) -> list[LogprobTable]:
    """A table for each token: its own log-probability, and the highest ones of its row, each with its rank. Of equally
    likely tokens, the given one is first, so that the ranks of a table differ and have no gaps among the highest.

    Args: top: what `top_logprobs` returns for these tokens, on the CPU.
    """
    tables = []
    for token, chosen, rank, values, ids in zip(tokens, *(tensor.tolist() for tensor in top), strict=True):
        table = {token: (chosen, rank)}
        places = itertools.filterfalse(rank.__eq__, itertools.count(1))
        for token_id, value in zip(ids, values, strict=True):
            if token_id != token:
                table[token_id] = (value, next(places))
        tables.append(table)
    return tables
