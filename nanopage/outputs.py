"""What comes back: outputs of requests, errors that carry them, and statistics of steps. Names are those of vLLM."""

from dataclasses import dataclass, field

import numpy as np

from nanopage.step import EncoderCache


@dataclass(slots=True)
class Logprob:
    """One token's log-probability (natural log), its rank in the vocabulary (1 = most likely) and its text.

    The sampled token is first among tokens that are equally likely. There is no text with detokenize=False.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request in seconds on `time.perf_counter`'s clock; None until they happen.

    `token_times` has one entry for each step in which the request got tokens: with n = 1 and without drafts, one for
    each token.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    token_times: list[float] = field(default_factory=list)
    finished_time: float | None = None
    num_preemptions: int = 0

    def count_step(self, now: float) -> None:
        """Record a step that gave the request tokens. Its results came at `now`."""
        if self.token_times[-1:] != [now]:
            self.token_times.append(now)

    @property
    def time_in_queue(self) -> float | None:
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def first_token_time(self) -> float | None:
        return self.token_times[0] if self.token_times else None

    @property
    def time_to_first_token(self) -> float | None:
        return self.token_times[0] - self.arrival_time if self.token_times else None


@dataclass(slots=True)
class CompletionOutput:
    """One completion so far. `text` and `token_ids` are cumulative; `delta` is the text added since the last output.

    `finish_reason` is None while running, else "stop", "length", "abort" or "error" (RequestOutput.error says why);
    `stop_reason` is the stop string or stop token id that ended it (None for end-of-sequence). `logprobs` and
    `cumulative_logprob` are None unless requested; where completions compete there is always a `cumulative_logprob`.
    `score` is what a beam search ranks by.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    delta: str = ""
    score: float | None = None


@dataclass(slots=True)
class BeamSearchSequence:
    """One completion of a beam search, in the shape of vLLM's class of the same name.

    `tokens` are the prompt's tokens and the completion's. `text` is their text, with special tokens; None if the model
    has no tokenizer.
    """

    tokens: list[int]
    cum_logprob: float
    text: str | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(slots=True)
class RequestOutput:
    """What a request has produced so far.

    `prompt_logprobs[0]` is None: the first token has nothing before it. `error` says why a request could not be
    completed; completions that had not ended by then have the finish_reason "error". `sequences` are the
    completions of `LLM.beam_search` as vLLM returns them; None for other requests, and if the search was interrupted.
    `encoder_prompt` and its token ids are what the encoder of an encoder-decoder model has read; None for other models.
    `pooled` is the vector that a request with PoolingParams makes, float32 [size]; such a request has no `outputs`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None
    sequences: list[BeamSearchSequence] | None = None
    pooled: np.ndarray | None = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None

    def supersede(self, unread: "RequestOutput") -> None:
        """Replace the previous output, which nobody has read: put its deltas before the deltas of this output."""
        for completion, before in zip(self.outputs, unread.outputs, strict=False):
            completion.delta = before.delta + completion.delta


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C during `LLM.generate`, `chat` or `beam_search`.

    Args:
        outputs: one entry for each prompt, in order: what the request had produced by then, or None if it had produced
            nothing. The `finish_reason` of a completion that had not ended is "abort".
    """

    def __init__(self, outputs: list[RequestOutput | None]):
        super().__init__()
        self.outputs = outputs


class GenerationError(RuntimeError):
    """`LLM.generate`, `chat` or `beam_search` ended by an error that does not belong to a single request.

    Args:
        outputs: as in GenerationInterrupted.
    """

    def __init__(self, message: str, outputs: list[RequestOutput | None]):
        super().__init__(message)
        self.outputs = outputs


class EngineAsleepError(RuntimeError):
    """The engine takes no requests: it sleeps, or has no weights."""


@dataclass(slots=True)
class RequestEvent:
    """A change of a request's state.

    kind: "added" to the queue; "started": it got blocks, for the first time or again; "preempted": it lost its blocks;
        "swapped out" to host memory, "swapped in" from there; "finished", whatever the reason.

    The other fields say why, where that applies; view/explain.py makes sentences of them. Comparisons of events ignore
    them.

    reason: why a request is preempted: "blocks"; "priority, blocks", "priority, sequences" or "priority, adapter" if a
        request of a higher priority lacks these; "alone" (requests run one at a time after a failed step), "restart"
        (after an exception) or "draft" (logits behind a draft were not finite). At the end: its `finish_reason`.
    cause: the id of the request that the blocks are taken for.
    needed, free: how many blocks, or sequences, were needed, and how many could be given out.
    tokens: when a request is added, the tokens of its prompt; when it starts, all its tokens.
    cached_tokens: how many of `tokens` were found in the prefix cache.
    host_full: it would have been swapped out, but host memory has too few blocks.
    """

    kind: str
    request_id: str
    reason: str = field(default="", compare=False)
    cause: str | None = field(default=None, compare=False)
    needed: int = field(default=0, compare=False)
    free: int = field(default=0, compare=False)
    tokens: int = field(default=0, compare=False)
    cached_tokens: int = field(default=0, compare=False)
    host_full: bool = field(default=False, compare=False)


@dataclass(slots=True)
class StepStats:
    """What one engine step did, for progress bars, benchmarks and metrics. `LLMEngine.step` says what listeners may do.

    Counts cover this step alone, except for queues and blocks, which show the state after it. With async scheduling,
    the output tokens, and the seconds of all phases but scheduling, belong to the previous batch.
    """

    waiting: int = 0  # sequences in each queue
    running: int = 0
    swapped: int = 0
    prefill_tokens: int = 0  # computed in chunks that begin in the prompt
    decode_tokens: int = 0  # computed in chunks that begin in the output, with drafts and what a preemption repeats
    context_tokens: int = 0  # whose K and V attention reads, the new ones included; summed over the batch's sequences
    stored_tokens: int = 0  # whose K and V are in blocks; summed over the running sequences
    cached_tokens: int = 0  # found in the prefix cache instead of computed
    output_tokens: int = 0  # sampled; for a beam search, one for each live beam; for a draft, the accepted ones
    num_drafts: int = 0  # sequences whose next tokens were drafted (see speculation/lookup.py)
    draft_tokens: int = 0  # of all drafts
    accepted_tokens: list[int] = field(default_factory=list)  # how many drafts had token 0 sampled, token 1, ...
    finished: int = 0  # requests
    free_blocks: int = 0  # without the cached ones
    used_blocks: int = 0
    cached_blocks: int = 0
    preempted: int = 0  # requests
    swapped_out: int = 0  # blocks
    swapped_in: int = 0
    copied: int = 0
    encoder_cache: EncoderCache | None = None  # after the last batch whose results came
    seconds: float = 0.0  # the whole call of `step`, without its listeners
    schedule_seconds: float = 0.0
    prepare_seconds: float = 0.0  # moving blocks, the worker's table
    model_seconds: float = 0.0  # inputs and forward pass (its launch, on a GPU)
    sample_seconds: float = 0.0
    wait_seconds: float = 0.0  # the time that the host spent waiting for the results
    device_seconds: float = 0.0  # inputs, forward pass and sampling on a GPU; 0 on a CPU
    update_seconds: float = 0.0  # stop conditions, queues
    output_seconds: float = 0.0  # text and outputs
    events: list[RequestEvent] = field(default_factory=list)  # since the previous step, in order

    def count_draft(self, num_tokens: int, num_accepted: int) -> None:
        """Count a draft, of which the first `num_accepted` tokens were sampled. Tokens behind a stop token do not
        count. Tokens behind a stop string do, because the engine finds the string later, in the text."""
        self.num_drafts += 1
        self.draft_tokens += num_tokens
        self.accepted_tokens += [0] * (num_accepted - len(self.accepted_tokens))
        for index in range(num_accepted):
            self.accepted_tokens[index] += 1
