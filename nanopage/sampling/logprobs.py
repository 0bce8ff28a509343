"""Log-probabilities of tokens and of the likeliest ones beside them."""

from torch import Tensor

from nanopage.step import LogprobTable


def top_logprobs(logits: Tensor, tokens: Tensor, num: int) -> list[Tensor]:
    """Of each row of logits [R, vocab_size]: its token's log-probability and rank, [R] each, and the `num` highest
    log-probabilities and their token ids, [R, num] each. For NO_TOKEN, what comes out is meaningless."""
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens[:, None].clamp(min=0))
    ranks = (logprobs > chosen).sum(dim=-1).add_(1)
    return [chosen.squeeze(1), ranks, *logprobs.topk(min(num, logprobs.shape[-1]), dim=-1)]


def make_tables(tokens: list[int], top: list[Tensor], counts: list[int]) -> list[LogprobTable]:
    """Of each token the table of its log-probability and those of as many of the top ones as `counts` says.

    Args: `top`: from `top_logprobs` of these tokens, on the CPU.
    """
    tables = []
    for token, chosen, rank, values, ids, count in zip(
        tokens, *(tensor.tolist() for tensor in top), counts, strict=True
    ):
        table = {token: (chosen, rank)}
        for place, (token_id, value) in enumerate(zip(ids[:count], values[:count], strict=True), start=1):
            table.setdefault(token_id, (value, place))
        tables.append(table)
    return tables
