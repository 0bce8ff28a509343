"""Sampler: logits of a whole batch to one token a sequence, on batch tensors throughout.

What nobody in the batch asks for is not computed: an all-greedy batch is one argmax.

Sampling is the Gumbel-max trick: the argmax of logits / temperature + Gumbel noise, which is that of
logits + temperature * noise, is a sample of the softmax (Maddison et al. 2014). The noise of a token is a pure function
of (seed, position, token id), a counter-based generator (Salmon et al. 2011): a seeded request samples the same tokens
whatever its neighbours, batch or preemptions are.

Top-k, top-p and min-p each say which logit is the smallest that may be sampled. Those are found among the top few
hundred logits of a row, and the noise is computed for those alone; only if they do not reach the line, for more.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from nanopage.request import NO_TOKEN, SampledToken, Sequence
from nanopage.worker.device import to_device, to_host

CANDIDATES = 256  # the first guess of how many of the top logits hold all that truncation keeps


class Sampler:
    """Callable: (logits [B, vocab_size], the B sequences) -> B sampled tokens, with log-probabilities where asked.

    The sequences' last tokens may be pending: of those that read their tokens (see Sequence) they must not be.

    Args:
        defer: whether it is for `Samples.settle` to find out if the first candidates of truncation were enough, so that
            here nothing waits for a GPU.
    """

    def __init__(self, defer: bool = False):
        self.defer = defer

    def __call__(self, logits: Tensor, sequences: list[Sequence]) -> "Samples":
        raw = at_least_float32(logits)
        doubts: list[Doubt] | None = [] if self.defer else None
        return Samples(sample(constrain(raw, sequences), sequences, doubts), logits, sequences, doubts)


class Doubt(NamedTuple):
    """Rows that were sampled from their first candidates, and what samples them from as many as it takes."""

    exact: Tensor  # bool, on its way to the host: whether those were enough
    rows: Tensor | slice
    again: Callable[[], Tensor]


class Samples:
    """Sampled tokens on their way to the host; nothing waits for them before `settle` or `result`.

    Args:
        tokens: int64 [B], on the device.
        logits: [B, vocab_size] as the model made them; read if someone asks for log-probabilities.
        sequences: whose tokens they are.
        doubts: about some of them.
    """

    def __init__(self, tokens: Tensor, logits: Tensor, sequences: list[Sequence], doubts: "list[Doubt] | None" = None):
        self.tokens, self._doubts = tokens, doubts or []
        self.wanted = {row: seq.num_logprobs for row, seq in enumerate(sequences) if seq.num_logprobs is not None}
        self._send(logits)
        self._logits = logits if doubts else None  # they are large: kept only if they may be needed again

    def _send(self, logits: Tensor) -> None:
        coming = [self.tokens]
        if self.wanted:
            rows = to_device(list(self.wanted), self.tokens.device)
            top = top_logprobs(at_least_float32(logits[rows]), self.tokens[rows], max(self.wanted.values()))
            coming += top
        self._coming = [to_host(tensor) for tensor in coming]
        self._arrived = None
        if self.tokens.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    @torch.inference_mode()
    def settle(self) -> bool:
        """Sample again what was sampled from too few candidates, before anyone reads it. Waits for the device if there
        is a doubt. Returns whether `tokens` has changed."""
        doubts, self._doubts = self._doubts, []
        if doubts and self._arrived is not None:
            self._arrived.synchronize()
        wrong = [doubt for doubt in doubts if not bool(doubt.exact)]
        for doubt in wrong:
            self.tokens[doubt.rows] = doubt.again()
        if wrong:
            assert self._logits is not None
            self._send(self._logits)
        self._logits = None
        return bool(wrong)

    def result(self) -> list[SampledToken]:
        """Waits for the device."""
        self.settle()
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens = self._coming[0].tolist()
        if not self.wanted:
            return [SampledToken(token) for token in tokens]
        tables = tables_of([tokens[row] for row in self.wanted], self._coming[1:], list(self.wanted.values()))
        logprobs = dict(zip(self.wanted, tables, strict=True))
        return [SampledToken(token, logprobs.get(row)) for row, token in enumerate(tokens)]


def at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def with_sampled(input_ids: Tensor, sampled: Tensor) -> Tensor:
    """Put sampled tokens in the places of their placeholders (see Sequence): -row is sampled[row - 1].

    NO_TOKEN becomes any token: its sequence is about to end.
    """
    return torch.where(input_ids < 0, sampled[(-1 - input_ids).clamp_(min=0)].clamp_(min=0), input_ids)


def is_constrained(seq: Sequence) -> bool:
    """Whether anything changes the sequence's logits before temperature."""
    params = seq.params
    return (
        params.allowed_token_ids is not None
        or bool(seq.bad_words_token_ids or params.logit_bias or params.penalizes)
        or seq.num_output_tokens < params.min_tokens
    )


def constrain(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Apply everything that changes logits before temperature, in vLLM's order. Copies only if there is anything."""
    copied = False
    for row, seq in enumerate(sequences):
        if not is_constrained(seq):
            continue
        if not copied:
            logits, copied = logits.clone(), True
        params = seq.params
        values = logits[row]
        if params.allowed_token_ids is not None:
            allowed = to_device(params.allowed_token_ids, values.device)
            kept = values[allowed]
            values.fill_(-torch.inf)
            values[allowed] = kept
        for *before, last in seq.bad_words_token_ids:
            if not before or seq.token_ids[max(seq.num_prompt_tokens, seq.num_tokens - len(before)) :] == before:
                values[last] = -torch.inf
        if seq.num_output_tokens < params.min_tokens:
            values[to_device(list(seq.ending_token_ids), values.device, torch.int64)] = -torch.inf
        if params.logit_bias:
            ids = to_device(list(params.logit_bias), values.device)
            values[ids] += to_device(list(params.logit_bias.values()), values.device, values.dtype)
    penalized = [row for row, seq in enumerate(sequences) if seq.params.penalizes]
    if penalized:
        rows = to_device(penalized, logits.device)
        logits[rows] = _penalize(logits[rows], [sequences[row] for row in penalized])
    return logits


def _penalize(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    def column(name: str) -> Tensor:
        return logits.new_tensor([[getattr(seq.params, name)] for seq in sequences])

    seen = torch.zeros_like(logits, dtype=torch.bool)
    output_counts = torch.zeros_like(logits)
    for row, seq in enumerate(sequences):
        tokens = to_device(seq.token_ids, logits.device)
        seen[row, tokens] = True
        output = tokens[seq.num_prompt_tokens :]
        output_counts[row].index_add_(0, output, logits.new_ones(len(output)))
    repetition = column("repetition_penalty")
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - column("frequency_penalty") * output_counts
    return logits - column("presence_penalty") * (output_counts > 0)


def sample(logits: Tensor, sequences: list[Sequence], doubts: list[Doubt] | None = None) -> Tensor:
    """Token ids int64 [B]: greedy rows by argmax, the others by Gumbel-max over what truncation keeps; NO_TOKEN for a
    row whose largest logit is not finite.

    Args:
        doubts: takes those about rows that are truncated; without it, they are made sure of here.
    """
    if all(seq.params.greedy for seq in sequences):
        return argmax(logits)
    kinds: dict[str, list[int]] = {}
    for row, seq in enumerate(sequences):
        kind = "greedy" if seq.params.greedy else "truncated" if seq.params.truncates else "plain"
        kinds.setdefault(kind, []).append(row)
    tokens = torch.empty(len(sequences), dtype=torch.int64, device=logits.device)
    for kind, chosen in kinds.items():
        rows = slice(None) if len(kinds) == 1 else to_device(chosen, logits.device)
        part, some = logits[rows], [sequences[row] for row in chosen]
        if kind == "greedy":
            tokens[rows] = argmax(part)
            continue
        temperatures = to_device([seq.params.temperature for seq in some], logits.device, logits.dtype)
        seeds = to_device([seq.seed for seq in some], logits.device)
        # The sequence's length is the position of the token to be sampled.
        positions = to_device([seq.num_tokens for seq in some], logits.device)
        if kind == "plain":
            tokens[rows] = gumbel_max(part, temperatures, seeds, positions)
            continue
        scaled = part / temperatures[:, None]
        if doubts is None:
            tokens[rows] = sample_truncated(scaled, some, seeds, positions)
            continue
        values, ids, exact = truncate_among(CANDIDATES, scaled, some)
        tokens[rows] = among(values, ids, seeds, positions)
        again = partial(sample_truncated, scaled, some, seeds, positions)
        doubts.append(Doubt(to_host(exact), rows, again))
    return tokens


def gumbel_max(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """A sample of each row of [B, vocab_size] at its temperature, at 0 its argmax: int64 [B]; NO_TOKEN as `argmax`.

    Args: temperatures, seeds, positions: [B].
    """
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return argmax(logits + temperatures[:, None] * gumbel_noise(seeds, positions, ids))


def sample_truncated(scaled: Tensor, sequences: list[Sequence], seeds: Tensor, positions: Tensor) -> Tensor:
    """A sample of each row of what `truncate` keeps: int64 [B]."""
    return among(*truncate(scaled, sequences), seeds, positions)


def among(values: Tensor, ids: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """A sample of each row of candidates, values and ids [B, C], the largest first: int64 [B]."""
    best = (values + gumbel_noise(seeds, positions, ids)).argmax(dim=-1, keepdim=True)
    return torch.where(values[:, 0].isfinite(), ids.gather(1, best).squeeze(1), NO_TOKEN)


def argmax(logits: Tensor) -> Tensor:
    """The largest of each row of [B, vocab_size], the first of equals: int64 [B]. NO_TOKEN where it is not finite: the
    row holds NaN, infinity, or nothing else than -infinity.

    Of blocks first, then within one: torch's argmax is not vectorized on a CPU and takes ten times as long, and
    Inductor's gives a whole row to one of a GPU's programs.
    """
    size = 1 if logits.is_cuda and not torch.compiler.is_compiling() else math.gcd(logits.shape[-1], 256)
    if size < 16:
        best = logits.argmax(dim=-1, keepdim=True)
        largest = logits.gather(1, best)
    else:
        blocks = logits.unflatten(-1, (-1, size))
        largest = blocks.amax(dim=-1)
        block = largest.argmax(dim=-1, keepdim=True)  # [B, 1]
        within = blocks.take_along_dim(block[..., None], dim=1).argmax(dim=-1)
        best, largest = block * size + within, largest.gather(1, block)
    return torch.where(largest.isfinite(), best, NO_TOKEN).squeeze(1)


def truncate(scaled: Tensor, sequences: list[Sequence]) -> tuple[Tensor, Tensor]:
    """Top-k, top-p and min-p on logits already divided by temperature.

    Returns: (values, ids), both [B, C]: the C largest logits of each row, in order, those left out being -inf, and
    their token ids. The order of application is vLLM's: min-p, then top-k, then top-p on what is left.
    Tokens tied with the last one kept are kept: the result does not depend on the order of equal logits.
    """
    size = CANDIDATES
    while True:
        values, ids, exact = truncate_among(size, scaled, sequences)
        if bool(exact):
            return values, ids
        size *= 8


def truncate_among(size: int, scaled: Tensor, sequences: list[Sequence]) -> tuple[Tensor, Tensor, Tensor]:
    """`truncate` with the `size` largest of each row as candidates; and whether they hold all that is kept: bool []."""
    vocab_size = scaled.shape[-1]
    size = min(size, vocab_size)
    top_ks = [seq.params.top_k if 0 < seq.params.top_k < vocab_size else vocab_size for seq in sequences]
    top_k = to_device(top_ks, scaled.device)[:, None]
    top_p = to_device([seq.params.top_p for seq in sequences], scaled.device, scaled.dtype)[:, None]
    min_p = to_device([seq.params.min_p for seq in sequences], scaled.device, scaled.dtype)[:, None]
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
    if scaled.is_cuda or not bool(complete.all()):  # to ask a GPU takes longer than to have it compute
        total = torch.where(complete, total, (scaled - values[:, :1]).exp().sum(dim=-1, keepdim=True))
    # Keep a token if the mass before it has not reached top_p; the one that crosses is therefore kept.
    crossing = ((mass - weights < top_p * total) & kept).sum(dim=-1, keepdim=True).clamp(min=1) - 1
    edge = torch.where(top_p < 1, values.gather(1, crossing), -torch.inf)
    floor = torch.maximum(floor, edge)
    # A bound above the last candidate leaves nothing out that is not among the candidates. With a top_k beyond
    # them, what top-p is a share of is not known yet.
    exact = complete | ((last < floor) & (top_k >= vocab_size) & (min_p == 0))
    return values.masked_fill_(values < floor, -torch.inf), ids, exact.all()


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


def top_logprobs(logits: Tensor, tokens: Tensor, num: int) -> list[Tensor]:
    """Of each row of logits [R, vocab_size]: its token's log-probability and rank, [R] each, and the `num` highest
    log-probabilities and their token ids, [R, num] each. For NO_TOKEN, what comes out is meaningless."""
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens[:, None].clamp(min=0))
    ranks = (logprobs > chosen).sum(dim=-1).add_(1)
    return [chosen.squeeze(1), ranks, *logprobs.topk(min(num, logprobs.shape[-1]), dim=-1)]


def tables_of(tokens: list[int], top: list[Tensor], wanted: list[int]) -> list[dict[int, tuple[float, int]]]:
    """For each row: token id -> (log-probability, rank), its token and then as many of the top ones as it wants.

    Args: `top`: from `top_logprobs` of these tokens, on the CPU.
    """
    tables = []
    for token, chosen, rank, values, ids, n in zip(tokens, *(tensor.tolist() for tensor in top), wanted, strict=True):
        table = {token: (chosen, rank)}
        for place, (token_id, value) in enumerate(zip(ids[:n], values[:n], strict=True), start=1):
            table.setdefault(token_id, (value, place))
        tables.append(table)
    return tables
