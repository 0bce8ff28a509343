"""Sampler: logits of a whole batch to one token a sequence, on batch tensors throughout.

What nobody in the batch asks for is not computed: an all-greedy batch is one argmax.

Sampling is the Gumbel-max trick: the argmax of logits / temperature + Gumbel noise is a sample of the softmax
(Maddison et al. 2014). The noise of a token is a pure function of (seed, position, token id), a counter-based generator
(Salmon et al. 2011): a seeded request samples the same tokens whatever its neighbours, batch or preemptions are.

Top-k, top-p and min-p each say which logit is the smallest that may be sampled. Those are found among the top few
hundred logits of a row, and the noise is computed for those alone; only if they do not reach the line, for more.
"""

import math

import torch
from torch import Tensor

from nanopage.request import SampledToken, Sequence

CANDIDATES = 256  # the first guess of how many of the top logits hold all that truncation keeps


class Sampler:
    """Callable: (logits [B, vocab_size], the B sequences) -> B sampled tokens, with log-probabilities where asked."""

    def __call__(self, logits: Tensor, sequences: list[Sequence]) -> list[SampledToken]:
        raw = at_least_float32(logits)
        logits = constrain(raw, sequences)
        tokens = sample(logits, sequences).tolist()
        wanted = {row: seq.num_logprobs for row, seq in enumerate(sequences) if seq.num_logprobs is not None}
        if not wanted:
            return [SampledToken(token) for token in tokens]
        tables = top_logprobs(raw[list(wanted)], [tokens[row] for row in wanted], list(wanted.values()))
        logprobs = dict(zip(wanted, tables, strict=True))
        return [SampledToken(token, logprobs.get(row)) for row, token in enumerate(tokens)]


def at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def constrain(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Apply everything that changes logits before temperature, in vLLM's order. Copies only if there is anything."""
    copied = False
    for row, seq in enumerate(sequences):
        params = seq.params
        too_short = seq.num_output_tokens < params.min_tokens
        if params.allowed_token_ids is None and not (
            seq.bad_words_token_ids or too_short or params.logit_bias or params.penalizes
        ):
            continue
        if not copied:
            logits, copied = logits.clone(), True
        values = logits[row]
        if params.allowed_token_ids is not None:
            kept = values[params.allowed_token_ids]
            values.fill_(-torch.inf)
            values[params.allowed_token_ids] = kept
        for *before, last in seq.bad_words_token_ids:
            if not before or seq.token_ids[max(seq.num_prompt_tokens, seq.num_tokens - len(before)) :] == before:
                values[last] = -torch.inf
        if too_short:
            values[list(seq.ending_token_ids)] = -torch.inf
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=values.device)
            values[ids] += torch.tensor(list(params.logit_bias.values()), dtype=values.dtype, device=values.device)
    penalized = [row for row, seq in enumerate(sequences) if seq.params.penalizes]
    if penalized:
        logits[penalized] = _penalize(logits[penalized], [sequences[row] for row in penalized])
    return logits


def _penalize(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    def column(name: str) -> Tensor:
        return logits.new_tensor([[getattr(seq.params, name)] for seq in sequences])

    seen = torch.zeros_like(logits, dtype=torch.bool)
    output_counts = torch.zeros_like(logits)
    for row, seq in enumerate(sequences):
        tokens = torch.tensor(seq.token_ids, device=logits.device)
        seen[row, tokens] = True
        output = tokens[seq.num_prompt_tokens :]
        output_counts[row].index_add_(0, output, logits.new_ones(len(output)))
    repetition = column("repetition_penalty")
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - column("frequency_penalty") * output_counts
    return logits - column("presence_penalty") * (output_counts > 0)


def sample(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Token ids int64 [B]: greedy rows by argmax, the others by Gumbel-max over what truncation keeps."""
    if all(seq.params.greedy for seq in sequences):
        return argmax(logits)
    tokens = torch.empty(len(sequences), dtype=torch.int64, device=logits.device)
    if greedy := [row for row, seq in enumerate(sequences) if seq.params.greedy]:
        tokens[greedy] = argmax(logits[greedy])
    for truncates in (False, True):
        rows = [
            row
            for row, seq in enumerate(sequences)
            if not seq.params.greedy and seq.params.truncates == truncates
        ]  # fmt: skip
        if not rows:
            continue
        chosen = [sequences[row] for row in rows]
        temperatures = logits.new_tensor([[seq.params.temperature] for seq in chosen])
        scaled = (logits if len(rows) == len(sequences) else logits[rows]) / temperatures
        if truncates:
            values, ids = truncate(scaled, chosen)
        else:
            values, ids = scaled, torch.arange(logits.shape[-1], device=logits.device)
        # The sequence's length is the position of the token to be sampled.
        noise = gumbel_noise(
            torch.tensor([seq.seed for seq in chosen], device=logits.device),
            torch.tensor([seq.num_tokens for seq in chosen], device=logits.device),
            ids,
        )
        best = (values + noise).argmax(dim=-1, keepdim=True)
        tokens[rows] = ids.expand_as(values).gather(1, best).squeeze(1)
    return tokens


def argmax(logits: Tensor) -> Tensor:
    """The largest of each row of [B, vocab_size], the first of equals: int64 [B].

    Of blocks first, then within one: torch's argmax is not vectorized on a CPU and takes ten times as long.
    """
    size = math.gcd(logits.shape[-1], 256)
    if size < 16:
        return logits.argmax(dim=-1)
    blocks = logits.unflatten(-1, (-1, size))
    best = blocks.amax(dim=-1).argmax(dim=-1, keepdim=True)  # [B, 1]
    within = blocks.take_along_dim(best[..., None], dim=1).argmax(dim=-1)
    return (best * size + within).squeeze(1)


def truncate(scaled: Tensor, sequences: list[Sequence]) -> tuple[Tensor, Tensor]:
    """Top-k, top-p and min-p on logits already divided by temperature.

    Returns: (values, ids), both [B, C]: the C largest logits of each row, in order, those left out being -inf, and
    their token ids. The order of application is vLLM's: min-p, then top-k, then top-p on what is left.
    Tokens tied with the last one kept are kept: the result does not depend on the order of equal logits.
    """
    vocab_size = scaled.shape[-1]
    top_ks = [seq.params.top_k if 0 < seq.params.top_k < vocab_size else vocab_size for seq in sequences]
    top_k = torch.tensor(top_ks, device=scaled.device)[:, None]
    top_p = scaled.new_tensor([[seq.params.top_p] for seq in sequences])
    min_p = scaled.new_tensor([[seq.params.min_p] for seq in sequences])
    size = min(CANDIDATES, vocab_size)
    while True:
        values, ids = scaled.topk(size, dim=-1)
        last = values[:, -1:]
        floor = values[:, :1] + min_p.log()  # min_p of 0: -inf
        # The k-th largest is a bound if it is among the candidates.
        kth = values.gather(1, top_k.clamp(max=size) - 1)
        floor = torch.where(top_k <= size, torch.maximum(floor, kth), floor)
        kept = values >= floor
        complete = (last < floor) | (last == -torch.inf) | (size == vocab_size)
        # Mass relative to the likeliest. If the floor cuts within the candidates they hold it all, else the row does.
        weights = torch.where(kept, (values - values[:, :1]).exp(), 0)
        mass = weights.cumsum(dim=-1)
        total = mass[:, -1:]
        if not bool(complete.all()):
            total = torch.where(complete, total, (scaled - values[:, :1]).exp().sum(dim=-1, keepdim=True))
        # Keep a token if the mass before it has not reached top_p; the one that crosses is therefore kept.
        crossing = ((mass - weights < top_p * total) & kept).sum(dim=-1, keepdim=True).clamp(min=1) - 1
        edge = torch.where(top_p < 1, values.gather(1, crossing), -torch.inf)
        floor = torch.maximum(floor, edge)
        # A bound above the last candidate leaves nothing out that is not among the candidates. With a top_k beyond
        # them, what top-p is a share of is not known yet.
        exact = complete | ((last < floor) & (top_k >= vocab_size) & (min_p == 0))
        if bool(exact.all()):
            return values.masked_fill_(values < floor, -torch.inf), ids
        size = min(8 * size, vocab_size)


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Gumbel(0, 1) noise, float32 [B, C], a pure function of (seed, position, token id).

    Args: seeds, positions: int64 [B]; token_ids: int64 [C] or [B, C].
    """
    key = _mix64(_mix64(seeds) + positions)[:, None]
    # Two rounds of a 32-bit mixer, one for each half of the key; int32 because this is vocabulary-sized.
    bits = _mix32(token_ids.to(torch.int32) ^ key.to(torch.int32))
    bits = _mix32(bits ^ (key >> 32).to(torch.int32))
    uniform = ((bits >> 9) & 0x7FFFFF).to(torch.float32).add_(0.5).mul_(2.0**-23)  # in (0, 1): exact with 23 bits
    return uniform.log_().neg_().log_().neg_()


def _mix64(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64 (Steele et al. 2014) on int64, which wraps around."""
    x = x + -7046029254386353131  # 0x9E3779B97F4A7C15
    x = (x ^ ((x >> 30) & (2**34 - 1))) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ ((x >> 27) & (2**37 - 1))) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ ((x >> 31) & (2**33 - 1))


def _mix32(x: Tensor) -> Tensor:
    """The finalizer of MurmurHash3 (Appleby) on int32, which wraps around; `>>` copies the sign, hence the masks."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * -2048144789  # 0x85EBCA6B
    x = (x ^ ((x >> 13) & 0x7FFFF)) * -1028477387  # 0xC2B2AE35
    return x ^ ((x >> 16) & 0xFFFF)


def top_logprobs(logits: Tensor, tokens: list[int], wanted: list[int]) -> list[dict[int, tuple[float, int]]]:
    """For each row of logits [R, vocab_size]: token id -> (log-probability, rank), the given token and then the top."""
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks = (logprobs > chosen).sum(dim=-1).add_(1).tolist()
    values, ids = logprobs.topk(min(max(wanted), logprobs.shape[-1]), dim=-1)
    tables = []
    for row, (token, n) in enumerate(zip(tokens, wanted, strict=True)):
        table = {token: (chosen[row].item(), ranks[row])}
        for rank, (token_id, value) in enumerate(
            zip(ids[row, :n].tolist(), values[row, :n].tolist(), strict=True), start=1
        ):
            table.setdefault(token_id, (value, rank))
        tables.append(table)
    return tables
