"""Sequence and SequenceGroup: what the engine knows of a completion, and of a request.

A request for one completion is a group with one sequence. With `n` or beams, the group has several sequences, which
start with the same prompt and share its blocks.
"""

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import numpy as np

from nanopage.outputs import RequestMetrics
from nanopage.step import Item, LogprobTable, SamplingSettings


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class TokenMask(Protocol):
    """Decides which tokens a sequence may get next. Before `free_until` output tokens, it allows all of them."""

    @property
    def free_until(self) -> int: ...

    def allowed(self, output_token_ids: list[int]) -> bytes | None:
        """The tokens that may follow the output, as the bits of `Batch.masks`; empty: all; None: all from now on. They
        depend on nothing but the output, so a preemption or an exception leaves nothing to restore.

        Raises: ValueError if no token may follow, or if it takes too long to find out which.
        """

    def follow(self, output_token_ids: list[int], draft: list[int]) -> list[bytes]:
        """The tokens that may follow the output, and the tokens that may follow each token of a draft behind it. Ends
        at the first token of the draft that is not allowed, that ends the output, or that no mask can be found for.

        Returns: 1 + n masks, as `allowed` returns them, for the first n tokens of the draft.
        Raises: ValueError as `allowed`, never because of the draft.
        """


class Search(Protocol):
    """Chooses the sequences of a group that go on, and their tokens (beams/requests.py)."""

    @property
    def finished(self) -> bool: ...

    def choose(self, group: "SequenceGroup") -> tuple[list["Sequence"], list[tuple["Sequence", "Sequence"]]]:
        """Choose when all live sequences have `candidates`. Returns the sequences that end, and (parent, sequence) for
        each that forks from another."""

    def adopt(self, group: "SequenceGroup") -> None:
        """Put the choice into the state of the sequences, if it is not there yet."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """Weights that a request adds to the model's. With different adapters, no blocks are shared: see `cache_salt`.

    path: the directory that the workers load it from.
    """

    adapter_id: int
    path: str


@dataclass(slots=True, eq=False)
class Sequence:
    """One completion while it runs.

    `token_ids` are the known tokens, of the prompt and the output. `num_in_flight` further tokens are sampled by
    submitted steps whose results the engine has not read. The first `num_computed_tokens` of all these tokens have been
    submitted: a step that is submitted later finds their K and V in the cache. A sequence with one token left to
    compute is decoding; with more, it is in prefill.

    Args:
        seq_id: unique in the engine.
        token_ids: the prompt.
        settings: for the worker's sampler.
        eos_token_ids, stop_token_ids: they end the sequence, once it has `settings.min_tokens` output tokens.
        max_total_tokens: most tokens, prompt and output.
        num_logprobs: how many top log-probabilities the outputs show; None for none.
        token_mask: decides which tokens may come next; None allows all.
    """

    seq_id: int
    token_ids: list[int]
    settings: SamplingSettings
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    max_total_tokens: int = 2**62
    num_logprobs: int | None = None
    cache_salt: str = ""
    token_mask: TokenMask | None = None

    num_prompt_tokens: int = 0
    num_in_flight: int = 0
    num_computed_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[LogprobTable] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    block_hashes: list[bytes] = field(default_factory=list)  # of its first full blocks, computed when needed

    group: "SequenceGroup" = field(init=False)

    # Of a sequence with drafts
    takes_drafts: bool = True
    draft_state: Any = None  # what the drafter keeps of it

    # What the worker knows of it
    row: int | None = None  # in the sequence table, while it runs
    num_sent_blocks: int = 0  # entries of its block table
    parent: "Sequence | None" = None  # the sequence it was forked from, until it runs

    # Of a beam
    dormant: bool = False  # not one of the present beams
    candidates: dict[int, float] = field(default_factory=dict)  # for its next token, until all beams have candidates

    def __post_init__(self):
        self.token_ids = list(self.token_ids)
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def keys(self) -> list[int]:
        """What the prefix cache compares: the known tokens, and other numbers in place of those of items."""
        keys = self.group.keys
        return keys + self.token_ids[len(keys) :] if keys else self.token_ids

    @property
    def num_tokens(self) -> int:
        """Known tokens and tokens in flight."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def awaits_tokens(self) -> bool:
        """Whether its mask depends on tokens in flight."""
        mask, end = self.token_mask, self.num_tokens - self.num_prompt_tokens
        return self.num_in_flight > 0 and mask is not None and end >= mask.free_until

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def full(self) -> bool:
        """Whether it has reached its length limit, counting tokens in flight."""
        return self.num_tokens >= self.max_total_tokens

    def append(self, token_id: int, logprobs: LogprobTable | None) -> None:
        """Append a token that was in flight."""
        total, end = self.cumulative_logprob, len(self.token_ids)
        if logprobs is not None:
            total += logprobs[token_id][0]
            if self.num_logprobs is not None:
                del self.logprobs[self.num_output_tokens :]  # left by a call that was interrupted
                self.logprobs.append(logprobs)
        # One statement of plain assignments: no signal handler can run in the middle.
        self.token_ids[end:], self.cumulative_logprob, self.num_in_flight = (token_id,), total, self.num_in_flight - 1

    def take(self, token_id: int, logprobs: LogprobTable | None) -> tuple[str, int | None] | None:
        """Take the token that has been sampled. A beam keeps the candidates in `logprobs` instead, for its search.
        Returns: as `find_ending`."""
        if self.group.beam_search is not None:
            assert logprobs is not None
            self.candidates = {candidate: logprob for candidate, (logprob, _) in logprobs.items()}
            return None
        self.append(token_id, logprobs)
        return self.find_ending()

    def find_ending(self) -> tuple[str, int | None] | None:
        """(finish_reason, stop_reason) if the last token ends the sequence. A stop token wins over the length, as in
        vLLM."""
        last = self.token_ids[-1]
        if self.num_output_tokens >= self.settings.min_tokens:
            if last in self.eos_token_ids:
                return "stop", None
            if last in self.stop_token_ids:
                return "stop", last
        return ("length", None) if len(self.token_ids) >= self.max_total_tokens else None

    def restart(self) -> None:
        """Forget its K and V, and the tokens in flight."""
        self.num_in_flight = self.num_computed_tokens = 0
        self.candidates = {}
        self.leave_table()

    def leave_table(self) -> None:
        """The worker no longer knows it."""
        self.row = self.parent = None
        self.num_sent_blocks = 0

    def __repr__(self) -> str:
        return f"Sequence({self.seq_id}, {self.num_computed_tokens}/{self.num_tokens} computed)"


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request: the sequences that start with its prompt. The scheduler admits, preempts and swaps it whole.

    At first, and again after a preemption by recomputation, only the leader (the first live sequence) has blocks. It
    computes the `shared_len` tokens that all live sequences start with. Then the others fork from it.

    Args:
        seqs: equal prompts, different seeds. For a beam search, `width` sequences, of which only the first is live.
        priority: lower runs first.
        beam_search: chooses the next beams, if the request is a beam search.
        ranks: whether completions compete, so that none can be returned before all have ended.
        adapter: needs one of the workers' slots while the group runs.
        items, keys: see TokenizedPrompt.
    """

    request_id: str
    seqs: list[Sequence]
    priority: int = 0
    beam_search: Search | None = None
    ranks: bool = False
    adapter: Adapter | None = None
    items: list[Item] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)

    adapter_slot: int = -1  # while it runs
    status: Status = Status.WAITING
    order: int = -1  # of arrival; set by the scheduler
    last_event: str | None = None  # the kind of its last RequestEvent
    forked: bool = field(init=False)
    shared_len: int = field(init=False)
    num_cached_tokens: int = 0  # of the prompt, when it was first scheduled
    error: str | None = None  # why the request could not be completed
    marks: list[int] = field(default_factory=list)  # where steps end in what its sequences share (`PrefixCache.marks`)
    read_as_it_comes: bool = True  # whether tokens become text before the request ends
    prompt_logprobs: list[LogprobTable] = field(default_factory=list)
    pooled: np.ndarray | None = None  # what has been pooled of the prompt: float64 [size]
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(time.perf_counter()))

    def __post_init__(self):
        for seq in self.seqs:
            seq.group = self
            seq.dormant = self.beam_search is not None and seq is not self.seqs[0]
        self.forked, self.shared_len = len(self.seqs) == 1, self.seqs[0].num_prompt_tokens

    @property
    def live(self) -> list[Sequence]:
        if len(self.seqs) == 1:
            return [] if self.seqs[0].finish_reason is not None else self.seqs
        return [seq for seq in self.seqs if seq.finish_reason is None and not seq.dormant]

    @property
    def num_unfinished(self) -> int:
        """How many sequences may run at once, dormant beams included: a search may use them in any step."""
        return sum(seq.finish_reason is None for seq in self.seqs)

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def add_prompt_logprobs(self, start: int, tables: list[LogprobTable]) -> None:
        """Take in the tables of the prompt from position `start` on. After a preemption, some may be known already."""
        if not self.finished:
            self.prompt_logprobs += tables[len(self.prompt_logprobs) - (start - 1) :]

    def add_pooled(self, start: int, values: bytes) -> None:
        """Take in what has been pooled of the prompt's tokens from position `start` on. `start` = 0 begins anew."""
        vector = np.frombuffer(values, np.float32).astype(np.float64)
        adds_up = self.seqs[0].settings.pooling_type == "MEAN" and start > 0
        self.pooled = self.pooled + vector if adds_up and self.pooled is not None else vector

    def __repr__(self) -> str:
        return f"SequenceGroup({self.request_id!r}, {self.status.value}, {self.seqs})"


def common_length(seqs: list[Sequence]) -> int:
    """The number of tokens that all sequences have in common at their start. For a single sequence: all of its tokens,
    including those in flight."""
    if len(seqs) == 1:
        return seqs[0].num_tokens
    shortest = min(len(seq.token_ids) for seq in seqs)
    for i in range(seqs[0].num_prompt_tokens, shortest):
        if len({seq.token_ids[i] for seq in seqs}) > 1:
            return i
    return shortest
