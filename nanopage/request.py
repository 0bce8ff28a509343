"""The words every other file uses: what a user asks for, what is running, what comes back.

Pure Python: the scheduler and the block manager import this file and must never import torch.
"""

import copy
import time
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import Any

from nanopage.engine.beam_search import BeamSearch, BeamStep
from nanopage.vllm_options import BEAM_SEARCH, SAMPLING, accepts_options

MAX_STOP_CHARS = 16_384  # of all stop strings of a request: their trie takes some 250 bytes a character
MAX_LOGPROBS = 20  # vLLM's default `max_logprobs`: bounds the top-k a request can make the sampler compute
NO_TOKEN = -1  # sampled from logits whose largest is NaN or infinite


@accepts_options(SAMPLING)
@dataclass
class SamplingParams:
    """How to sample one request. Names, defaults and meanings are those of vLLM's `SamplingParams`.

    The parameters up to `prompt_logprobs` can be given by position, in vLLM's order. Options of vLLM that change
    nothing, such as structured_outputs=None, are accepted (see vllm_options.py).

    Args:
        n: completions per prompt, each with a seed of its own; the prompt is computed once and its blocks shared.
        best_of: sample so many and return the `n` with the highest cumulative log-probability, best first; None
            means `n`. Outputs come only at the end if it is more than `n`.
        temperature: divides the logits, in [0, 100]; 0 means greedy.
        top_p: keep the smallest set of most likely tokens whose mass reaches `top_p`, in (0, 1]. The token
            that crosses the line is kept, and so is every token tied with it (Holtzman et al. 2020).
        top_k: keep the `top_k` most likely tokens and those tied with the last; 0 or -1 keeps all.
        min_p: keep tokens at least `min_p` times as likely as the likeliest, in [0, 1].
        repetition_penalty: divides positive and multiplies negative logits of every token of the prompt or the
            output (Keskar et al. 2019), in [0.01, 100]; 1 is off.
        presence_penalty: subtracted from the logits of tokens already in the output, in [-2, 2].
        frequency_penalty: subtracted once per occurrence in the output, in [-2, 2].
        logit_bias: token id -> number in [-100, 100] added to its logit.
        allowed_token_ids: only these ids can be sampled.
        bad_words: strings whose token sequences can not be completed.
        seed: makes the request reproducible whatever runs beside it; None draws from the engine's seed.
        max_tokens: most output tokens; None means up to the model's length.
        min_tokens: no end-of-sequence, stop token or stop string before this many output tokens.
        stop: strings that end the output; not part of it unless `include_stop_str_in_output`. The first to end in the
            text counts, of those that end together the longest. At most 16,384 characters in all.
        stop_token_ids: tokens that end the output.
        ignore_eos: go on after end-of-sequence tokens.
        include_stop_str_in_output: keep the stop string or stop token in the text.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: False leaves `text` empty and saves the work. A model without a tokenizer (see `load_format` in
            EngineConfig) has nothing to detokenize: its `text` is always empty.
        logprobs: also return the log-probabilities of the sampled token and of this many top tokens, up to 20.
            They are the model's own, before penalties, temperature and truncation.
        prompt_logprobs: the same for each prompt token but the first.

    Raises:
        ValueError, TypeError: a value out of range or of the wrong type, or an option that does not exist, by name.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    _: KW_ONLY  # from here on, vLLM's versions differ in their order
    best_of: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self):
        if self.stop is None:
            self.stop = []
        elif isinstance(self.stop, str):
            self.stop = [self.stop]
        self.stop = _list_of("stop", self.stop, str)
        self.stop_token_ids = _list_of(
            "stop_token_ids", [] if self.stop_token_ids is None else self.stop_token_ids, int
        )
        self.bad_words = _list_of("bad_words", [] if self.bad_words is None else self.bad_words, str)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _list_of("allowed_token_ids", self.allowed_token_ids, int)
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids must not be empty")
        for name in ("stop", "bad_words"):
            if any(not text for text in getattr(self, name)):
                raise ValueError(f"{name} must not contain an empty string")
        if (num_chars := sum(map(len, self.stop))) > MAX_STOP_CHARS:
            raise ValueError(
                f"stop has {len(self.stop):,} strings with {num_chars:,} characters in all: at most {MAX_STOP_CHARS:,} "
                "characters are allowed"
            )
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise TypeError(f"logit_bias must be a dict of token id -> bias, not {self.logit_bias!r}")
            _list_of("logit_bias ids", list(self.logit_bias), int)
            for token_id, bias in self.logit_bias.items():
                _number(f"logit_bias[{token_id}]", bias, -100, 100)
            self.logit_bias = dict(self.logit_bias)

        _integer("n", self.n, 1)
        if self.best_of is not None:
            _integer("best_of", self.best_of, 1)
            if self.best_of < self.n:
                raise ValueError(f"best_of={self.best_of} is less than n={self.n}")
        _number("temperature", self.temperature, 0, 100)
        if self.greedy and self.num_sequences > 1:
            name = "n" if self.best_of is None else "best_of"
            raise ValueError(f"{name}={self.num_sequences} with temperature=0: greedy completions are all the same")
        _number("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise ValueError("top_p must be in (0, 1], got 0")
        _integer("top_k", self.top_k, -1)
        _number("min_p", self.min_p, 0, 1)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise ValueError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True")

    def clone(self) -> "SamplingParams":
        """A copy that shares nothing with this one."""
        return copy.deepcopy(self)

    @property
    def num_sequences(self) -> int:
        return self.n if self.best_of is None else self.best_of

    @property
    def ranks(self) -> bool:
        """Whether completions compete for being returned, so that none can be shown before all have ended."""
        return self.num_sequences > self.n

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5  # vLLM's threshold; smaller temperatures overflow the scaled logits

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p leaves tokens out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def penalizes(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@accepts_options(BEAM_SEARCH, {"beam_width": "width"})
@dataclass
class BeamSearchParams:
    """How to search one request's completions with `LLM.beam_search`. The meanings are those of transformers.

    Args:
        width: beams kept at every step, and completions returned (`num_beams`). `beam_width`, as in vLLM, is the same.
        max_tokens: most output tokens.
        length_penalty: a completion's score is its cumulative log-probability / its length ** length_penalty; the
            length counts the end-of-sequence token. In [-10, 10].
        early_stopping: True stops at `width` complete beams; False when no live beam scores better as it is; "never"
            when none could at any length.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        ValueError, TypeError: a value out of range or of the wrong type, by name.
    """

    width: int
    max_tokens: int = 16
    _: KW_ONLY
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    skip_special_tokens: bool = True

    def __post_init__(self):
        _integer("width", self.width, 1)
        _integer("max_tokens", self.max_tokens, 1)
        _number("length_penalty", self.length_penalty, -10, 10)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f'early_stopping must be True, False or "never", got {self.early_stopping!r}')
        if not isinstance(self.skip_special_tokens, bool):
            raise TypeError(f"skip_special_tokens must be True or False, not {self.skip_special_tokens!r}")

    @property
    def beam_width(self) -> int:
        return self.width


def _integer(name: str, value, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be {f'at least {low}' if high is None else f'in [{low}, {high}]'}, got {value}")


def _number(name: str, value, low: float, high: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {value!r}")
    # Comparisons, not math.isfinite, which an integer too large for a float would break.
    if not low <= value <= high:
        raise ValueError(f"{name} must be in [{low}, {high}], got {value}")


def _list_of(name: str, values, kind: type) -> list:
    if not isinstance(values, list | tuple | set | frozenset):
        raise TypeError(f"{name} must be a list of {kind.__name__}, not {values!r}")
    for value in values:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{name} must contain only {kind.__name__}, not {value!r}")
    return list(values)


@dataclass(slots=True)
class Logprob:
    """One token's log-probability (natural log), its rank in the vocabulary (1 = most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class SampledToken:
    """What the runner returns for one sequence that reached its last token.

    `token_id` is NO_TOKEN if the logits were not finite. `logprobs` maps token id -> (logprob, rank) for the sampled
    token first and then the top ones; None if not asked.
    """

    token_id: int
    logprobs: dict[int, tuple[float, int]] | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request in seconds on `time.perf_counter`'s clock; None until they happen.

    `token_times` has one entry for every step that brought the request tokens: with n = 1, one for each token.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    token_times: list[float] = field(default_factory=list)
    finished_time: float | None = None
    num_preemptions: int = 0

    @property
    def time_in_queue(self) -> float | None:
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def first_token_time(self) -> float | None:
        return self.token_times[0] if self.token_times else None

    @property
    def time_to_first_token(self) -> float | None:
        return self.token_times[0] - self.arrival_time if self.token_times else None


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class Sequence:
    """One completion while it lives: its tokens, how far its KV has been computed, and why it ended.

    `token_ids` is prompt + output. `num_computed_tokens` of them have their K and V in the cache; the rest are
    still to be run. A sequence whose every token is computed gets its next one sampled.

    While a token is on its way from the device, `pending` is true and the last of `token_ids` is its placeholder:
    `-row`, the row of the step's samples, counted from 1, in which it will be found (see Scheduler.advance).
    """

    def __init__(
        self,
        seq_id: int,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        seed: int = 0,
        eos_token_ids: frozenset[int] = frozenset(),
        max_total_tokens: int | None = None,
        cache_salt: str = "",
        bad_words_token_ids: list[list[int]] | None = None,
        num_candidates: int = 0,
    ):
        self.seq_id = seq_id
        self.request_id = request_id
        self.params = params
        self.seed = seed
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        limits = [n for n in (max_total_tokens, params.max_tokens and self.num_prompt_tokens + params.max_tokens) if n]
        self.max_total_tokens = min(limits) if limits else None
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        self.eos_token_ids = eos_token_ids
        self.cache_salt = cache_salt
        self.bad_words_token_ids = bad_words_token_ids or []
        self.num_candidates = num_candidates  # of a beam search, from which the group chooses; 0: not a beam

        self.dormant = False  # a beam that is not in use
        self.candidates: dict[int, float] = {}  # a beam's next tokens, until all beams have theirs
        self.num_computed_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.logprobs: list[dict[int, tuple[float, int]]] = []
        self.cumulative_logprob = 0.0

    @property
    def pending(self) -> bool:
        return self.token_ids[-1] < 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_known_output_tokens(self) -> int:
        """Those that are not pending."""
        return len(self.token_ids) - self.num_prompt_tokens - self.pending

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """Those that are known."""
        return self.token_ids[self.num_prompt_tokens : len(self.token_ids) - self.pending]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_logprobs(self) -> int | None:
        """How many top log-probabilities the sampler is to return beside the sampled token's; None for none at all."""
        if self.num_candidates:
            return self.num_candidates
        if self.params.logprobs is None and self.params.ranks:
            return 0
        return self.params.logprobs

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """The ids that must not be sampled before `min_tokens`."""
        return self.stop_token_ids | self.eos_token_ids

    @property
    def full(self) -> bool:
        """Whether it has all the tokens it may have; the last one may be pending."""
        return self.max_total_tokens is not None and self.num_tokens >= self.max_total_tokens

    @property
    def reads_its_tokens(self) -> bool:
        """Whether what is sampled next depends on the tokens before it by more than the model: they must be known."""
        completes_words = any(len(word) > 1 for word in self.bad_words_token_ids)
        return completes_words or bool(self.num_candidates) or self.params.penalizes

    def expect(self, row: int) -> None:
        """A token is on its way, in this row (from 1) of the step's samples."""
        self.token_ids.append(-row)

    def forget(self) -> None:
        """Nobody waits any more for a token that is on its way."""
        if self.pending:
            self.token_ids.pop()

    def restart(self) -> None:
        """Its K and V are gone, and so are results that were on their way."""
        self.forget()
        self.candidates = {}
        self.num_computed_tokens = 0

    def receive(self, sampled: SampledToken) -> None:
        """The token that was on its way."""
        total = self.cumulative_logprob
        if sampled.logprobs is not None:
            total += sampled.logprobs[sampled.token_id][0]
            if self.params.logprobs is not None:
                del self.logprobs[self.num_output_tokens - 1 :]  # of a call that was interrupted before the next line
                self.logprobs.append(sampled.logprobs)
        self.token_ids[-1], self.cumulative_logprob = sampled.token_id, total

    def stop_by_last_token(self) -> tuple[str, int | None] | None:
        """(finish_reason, stop_reason) if the last token ends the sequence; a stop wins over a length (as in vLLM)."""
        last = self.token_ids[-1]
        if self.num_output_tokens >= self.params.min_tokens:
            if last in self.eos_token_ids and not self.params.ignore_eos:
                return "stop", None
            if last in self.stop_token_ids:
                return "stop", last
        return ("length", None) if self.full else None

    def __repr__(self) -> str:
        return f"Sequence({self.request_id!r}, {self.num_computed_tokens}/{self.num_tokens} computed)"


class SequenceGroup:
    """A request: the sequences that began with its prompt. The scheduler admits, preempts and swaps it whole.

    At first, and again after a preemption by recomputation, only its leader (the first live sequence) has blocks:
    it computes the `shared_len` tokens that all live sequences begin with, then the others fork from it.

    Args:
        seqs: equal prompts, different seeds; for a beam search `width` sequences, of which only the first is awake.
        priority: lower runs first.
        beam_search: what chooses the next beams, if the request is one.
    """

    def __init__(self, seqs: list[Sequence], priority: int = 0, beam_search: BeamSearch | None = None):
        self.request_id = seqs[0].request_id
        self.seqs = seqs
        self.priority = priority
        self.beam_search = beam_search
        for seq in seqs[1:]:
            seq.dormant = beam_search is not None
        self.status = Status.WAITING
        self.order = -1  # of arrival; the scheduler numbers it
        self.forked = len(seqs) == 1
        self.shared_len = seqs[0].num_prompt_tokens
        self.num_cached_tokens = 0  # of the prompt, found in the prefix cache when first scheduled
        # What a beam search has decided and the sequences do not show yet: a step, and of each beam that goes on its
        # (sequence, tokens, cumulative log-probability).
        self.next_beams: tuple[BeamStep, list[tuple[Sequence, list[int], float]]] | None = None
        self.error: str | None = None  # why the request could not be completed
        self.prompt_logprobs: list[dict[int, tuple[float, int]]] = []
        self.metrics = RequestMetrics(time.perf_counter())

    @property
    def params(self) -> SamplingParams:
        return self.seqs[0].params

    @property
    def live(self) -> list[Sequence]:
        return [seq for seq in self.seqs if seq.finish_reason is None and not seq.dormant]

    @property
    def num_unfinished(self) -> int:
        """How many sequences it may run at once: a search wakes its dormant beams."""
        return sum(not seq.finished for seq in self.seqs)

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def __repr__(self) -> str:
        return f"SequenceGroup({self.request_id!r}, {self.status.value}, {self.seqs})"


@dataclass(slots=True)
class CompletionOutput:
    """One completion so far. `text` and `token_ids` are cumulative; `delta` is the text added since the last output.

    `finish_reason` is None while running, else "stop", "length", "abort" or "error" (RequestOutput.error says which);
    `stop_reason` is the stop string or stop token id that ended it (None for end-of-sequence). `cumulative_logprob` and
    `logprobs` are None unless asked (the former is there if completions compete); `score` is what a beam search ranks
    by.
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

    `tokens` are those of the prompt and of the completion, and `text` is theirs, with special tokens. It is None if
    the model has no tokenizer.
    """

    tokens: list[int]
    cum_logprob: float
    text: str | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(slots=True)
class RequestOutput:
    """What a request has produced so far. Field names are those of vLLM's `RequestOutput`.

    `prompt_logprobs[0]` is None: the first token has nothing before it. `error` says why a request could not be
    completed; the completions that had not ended by then have the finish_reason "error". `sequences` are the
    completions of `LLM.beam_search` as vLLM returns them; None for other requests.
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


@dataclass(slots=True)
class StepStats:
    """What one engine step did: progress bars, benches and metrics read this. Counts are of this step alone, but for
    queues and blocks, which are as the step left them. With async scheduling the tokens put out, the requests that
    finish and the waiting for them are those of the batch before."""

    waiting: int = 0  # sequences in each queue
    running: int = 0
    swapped: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    context_tokens: int = 0  # whose K and V attention reads: of each sequence all up to the step's last, shared or not
    stored_tokens: int = 0  # whose K and V the running sequences have in blocks, shared or not
    cached_tokens: int = 0  # found in the prefix cache instead of computed
    output_tokens: int = 0  # sampled; of a beam search, one for each live beam
    finished: int = 0  # requests
    free_blocks: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    preempted: int = 0  # requests
    swapped_out: int = 0  # blocks
    swapped_in: int = 0
    copied: int = 0
    seconds: float = 0.0  # the whole call of `step`, without its listeners
    schedule_seconds: float = 0.0
    model_seconds: float = 0.0  # batch preparation, memory operations and the forward pass (its launch, on a GPU)
    sample_seconds: float = 0.0
    wait_seconds: float = 0.0  # for the device
    output_seconds: float = 0.0  # stop conditions and text
    device_span: tuple[Any, Any] | None = None  # CUDA events before and after the batch's work; None on a CPU
