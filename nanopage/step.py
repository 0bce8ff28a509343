"""The messages between the engine and its workers. In each step, the engine sends a Batch and gets a BatchResult back.
Masks that are not known when the Batch is sent follow it (`Executor.add_masks`).

All are plain data. LocalExecutor passes them as objects. ProcessExecutor sends them to other processes as MessagePack
(distributed/messages.py).

A worker keeps a table with a row for each running sequence (state/sequence_table.py). The engine assigns the rows: a
sequence gets a free row when it begins to run, and gives it back when it ends or gives up its blocks. A Batch holds a
sequence's tokens and sampling settings once, when the sequence begins to run. Later Batches hold only changes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

NO_TOKEN = -1  # sampled where the largest logit is NaN or infinite
NO_BLOCK = -1  # in a block table, in place of a block that no window reaches any more. Nothing reads it


@dataclass(slots=True)
class SamplingSettings:
    """What the sampler needs to know about a sequence. Fields mean the same as in `SamplingParams`.

    bad_words_token_ids  token ids of each word
    dry_breaker_ids      the tokens with a text of `dry_sequence_breakers`
    ending_token_ids     not sampled before `min_tokens`
    logprobs             how many top log-probabilities to return besides the sampled token's; None returns none
    prompt_logprobs      the same for each token of the prompt but the first
    pooling_type         "CLS", "LAST" or "MEAN": pool the hidden states of the prompt; None: sample tokens
    token_types          which text of a pair each token of the prompt belongs to, for encoders; None: all to the first
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: float = 2.0
    dry_breaker_ids: list[int] = field(default_factory=list)
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: list[int] | None = None
    bad_words_token_ids: list[list[int]] = field(default_factory=list)
    min_tokens: int = 0
    ending_token_ids: list[int] = field(default_factory=list)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    pooling_type: str | None = None
    token_types: list[int] | None = None

    @property
    def needs_all_positions(self) -> bool:
        """Whether every token of the prompt must be computed, even those in the prefix cache."""
        return self.prompt_logprobs is not None or self.pooling_type == "MEAN"


# The settings that the sampler keeps on the device (SamplingTable.numbers), in this order. Add new ones at the end.
NUMBERS = tuple(name for name, kind in SamplingSettings.__annotations__.items() if kind is float)


@dataclass(slots=True)
class Item:
    """An input that is no token, such as an image (see nanopage/items).

    kind      "embeds", "prefix" (items/prefixes.py), or that of an encoder of the model
    position  of its first token in the prompt
    length    how many tokens of the prompt it takes the place of. 0: of none; an encoder-decoder model attends to it
    hash      of kind and payload, 32 bytes
    payload   what an encoder reads, or the rows themselves, or K and V
    cost      how much of its encoder's budget for a step it takes, in tokens. With length 0: the positions to attend to
    whole     whether its tokens see each other, so that no chunk of a prompt may cut it
    given     whether the payload is K and V of its tokens, so that no step computes them. It is then the first item
    """

    kind: str
    position: int
    length: int
    hash: bytes
    payload: dict[str, np.ndarray] = field(compare=False)
    cost: int = 0
    whole: bool = False
    given: bool = False


@dataclass(slots=True)
class NewSequence:
    """A sequence that begins to run, for the first time or again: all its tokens, and how to sample it."""

    row: int
    token_ids: list[int]
    num_prompt_tokens: int
    seed: int
    sampling: SamplingSettings
    adapter_slot: int = -1  # of the workers' slots for adapters; -1: it has no adapter
    items: list[Item] = field(default_factory=list)


@dataclass(slots=True)
class AdapterLoad:
    """The adapter in the directory `path` is to be loaded into a slot."""

    slot: int
    path: str


@dataclass(slots=True)
class Fork:
    """A sequence that begins as a copy of another: the first `num_tokens` tokens, the settings and the adapter. Its
    blocks follow in `blocks`, when it first runs."""

    parent: int  # row
    row: int
    num_tokens: int
    seed: int


@dataclass(slots=True)
class BlockUpdate:
    """The entries of a row's block table from index `first` on: for each logical block, the physical block of each kind
    of layers (see layer_kinds.py)."""

    row: int
    first: int
    blocks: list[int]


@dataclass(slots=True)
class Batch:
    """One step's work. A worker applies `loads` first, and then the other fields in the order of their declaration.
    Here, the everyday fields are explained first.

    new, blocks          changes of the sequence table: sequences that begin to run, and their blocks
    rows                 the B sequences that run, by their rows of that table, those with one token first
    starts, counts       for each of `rows`, the position of its first token and the number of its tokens
    sampled_from         for each token to sample, the index of the token whose logits it comes from, among all tokens
                         of the step: first those of `rows[0]`, then those of `rows[1]`, and so on
    sampled_rows         for each of `sampled_from`, the row that the sampled token is appended to

    For example, `rows` are [3, 7], `starts` [20, 0] and `counts` [1, 6]: row 3 is a decode, and row 7 computes a prompt
    of 6 tokens. Then `sampled_from` is [0, 6], and `sampled_rows` is [3, 7]. The prompt is in `new`. Its block is in
    `blocks`, and in `cleared` because the step fills only a part of it. The other fields are empty in such a step. Skip
    them for a first reading:

    swap_out, swap_in    [(block, host block)], [(host block, block)]: blocks to be copied to and from host memory
    copies               [(from, to)]: blocks to be copied on the device. All are read before any is written
    cleared              blocks to be filled with zeros. Ignored on a GPU (see KVCache.move)
    loads                adapters to be loaded. No running sequence has what was in their slots
    forks                sequences that begin as copies of others. In the step of the
                         fork, its first token is sampled from its parent's logits
    tokens               [(row, position, token id)] that not every worker knows: the next tokens of beams, which the
                         engine has chosen; drafts, which it guesses; with several workers, all sampled tokens, because
                         one worker samples. With a draft of 3, a row has 4 tokens, and a token is sampled after each.
                         The row's next tokens are these, up to and including the first that differs from the draft
    masks                index in `sampled_rows` -> the tokens that the row may get, as bits: token i is bit i % 8 of
                         byte i // 8. Other rows may get any token
    awaits_masks         whether more masks follow this batch (see `Executor.add_masks`)
    """

    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    cleared: list[int] = field(default_factory=list)
    loads: list[AdapterLoad] = field(default_factory=list)
    new: list[NewSequence] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    blocks: list[BlockUpdate] = field(default_factory=list)
    tokens: list[tuple[int, int, int]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    sampled_from: list[int] = field(default_factory=list)
    sampled_rows: list[int] = field(default_factory=list)
    masks: dict[int, bytes] = field(default_factory=dict)
    awaits_masks: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


LogprobTable = dict[int, tuple[float, int]]
"""Token id -> (natural log-probability, rank from 1): the token itself first, then the top ones."""


@dataclass(slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt tokens of a row from position `start` on."""

    row: int
    start: int
    tables: list[LogprobTable]


@dataclass(slots=True)
class PooledStates:
    """What pooling has made of the tokens of a row from position `start` on: the last hidden state or the scores of the
    classes, or with "MEAN" the sum of the hidden states. `values`: float32, as bytes."""

    row: int
    start: int
    values: bytes


@dataclass(slots=True)
class EncoderCache:
    """The outputs of encoders that a worker keeps. queries, hits: items that steps have looked up there, and found."""

    entries: int = 0
    num_bytes: int = 0
    queries: int = 0
    hits: int = 0


@dataclass(slots=True)
class BatchResult:
    """The results of a Batch.

    token_ids        one for each of its `sampled_rows`; NO_TOKEN where the logits were not finite
    logprobs         index into token_ids -> its table, for the sequences that requested logprobs
    prompt_logprobs  of the prompts that requested them
    pooled           of the prompts that are pooled. Their `token_ids` are 0, or NO_TOKEN where a value is not finite
    failed_loads     index in `loads` -> why the adapter could not be loaded
    encoder_cache    of the worker, after the step. None: its prompts have no items
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[int, LogprobTable] = field(default_factory=dict)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    pooled: list[PooledStates] = field(default_factory=list)
    failed_loads: dict[int, str] = field(default_factory=dict)
    encoder_cache: EncoderCache | None = None
    prepare_seconds: float = 0.0  # moving blocks, the table
    model_seconds: float = 0.0  # inputs and forward pass; on a GPU, its launch
    sample_seconds: float = 0.0
    wait_seconds: float = 0.0  # the time that the host spent waiting for the results
    device_seconds: float = 0.0  # inputs, forward pass and sampling on a GPU; 0 on a CPU


@dataclass(slots=True)
class Capacity:
    """How much the workers can hold once the model is loaded.

    windows: of each kind of layers (see layer_kinds.py). An encoder has none, so its sequences need no blocks.
    """

    device: str
    dtype: str
    num_blocks: int
    num_host_blocks: int
    max_model_len: int
    windows: tuple[int | None, ...] = (None,)


class WorkerDiedError(RuntimeError):
    """A worker has died, hangs, or has failed where the others wait for it. No worker of its engine can go on."""


class Executor(Protocol):
    """Takes batches to the workers and results back (worker/executor.py).

    Steps run in the order in which they are submitted, so the engine may submit a step before it has the result of the
    previous step.
    """

    def start(self) -> Capacity:
        """Load the model and size the KV cache.

        Raises: ValueError for options that the model or the device does not allow; MemoryError.
        """

    def submit(self, batch: Batch) -> None:
        """Start a step; on a GPU, or in another process, without waiting for it.

        Raises: any Exception if the step fails; the engine calls `discard`. WorkerDiedError if all later steps will
            fail as well.
        """

    def add_masks(self, masks: dict[int, bytes]) -> None:
        """Give the last submitted batch the rest of its masks, which it awaits (see `Batch.masks`). The engine finds
        them while the workers run the model. Raises: as `submit`."""

    def result(self) -> BatchResult:
        """Wait for the oldest step whose result has not been fetched, and return the result. Raises: as `submit`."""

    def discard(self) -> None:
        """Forget the steps whose results have not been fetched, after an exception or Ctrl-C at any point.

        Steps that are running must end before a step that is submitted later begins, and a later `result` must never
        return theirs. The engine then sends every sequence as new.
        """

    def rest(self) -> None:
        """Use the time for other work, in the background: no request is left."""

    def check(self) -> None:
        """Raises: WorkerDiedError if a worker has ended since the last step."""

    def compile(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Compile what can be compiled, and wait for it.

        Args: on_progress: called from time to time with the number of parts that are compiled, and of all parts.
        Raises: RuntimeError if that fails.
        """

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method of every worker's `Wings.standby` (standby/worker.py), between two steps.

        Raises: WorkerDiedError; the error of a worker, once all have ended the call. The workers then go on.
        """

    def shutdown(self) -> None: ...
