"""OutputProcessor: tokens to text, stop strings, and the RequestOutputs that a step returns.

A request's tokens become text after every step if its output is streamed or a stop string may end it. Otherwise they
become text once, when the request has ended. An exception may interrupt everything here at any point: counters say what
has been read and reported, so the next call continues from there.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable

from nanopage.engine.scheduler import Scheduler
from nanopage.engine.sequence import Sequence, SequenceGroup
from nanopage.outputs import CompletionOutput, Logprob, RequestOutput
from nanopage.params import BeamSearchParams, PoolingParams, RequestOutputKind, SamplingParams
from nanopage.step import LogprobTable
from nanopage.text.detokenizer import IncrementalDetokenizer
from nanopage.text.tokenizer import Tokenizer


@dataclasses.dataclass(slots=True)
class Completion:
    """A sequence and its text.

    `num_read` output tokens are in the text and in `logprobs`. The outputs returned so far have `num_reported` of
    these tokens and `num_chars` characters. `reading` is true while tokens are read, and stays true if an exception
    interrupts that.
    """

    seq: Sequence
    detokenizer: IncrementalDetokenizer | None
    logprobs: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)
    num_read: int = 0
    reading: bool = False
    num_reported: int = 0
    num_chars: int = 0
    output: CompletionOutput | None = None  # its last output, once the completion has ended


@dataclasses.dataclass(slots=True)
class Request:
    """A group, and what its outputs need beside it."""

    group: SequenceGroup
    params: SamplingParams | BeamSearchParams | PoolingParams
    prompt: str | None
    prompt_token_ids: list[int]
    completions: list[Completion]
    fill: Callable[[RequestOutput], None] | None = None  # adds what does not come from a completion
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    encoder: tuple[str | None, list[int] | None] = (None, None)  # see TokenizedPrompt

    @property
    def streams(self) -> bool:
        """Whether it has outputs before it ends."""
        params = self.params
        kind = params.output_kind if isinstance(params, SamplingParams) else RequestOutputKind.FINAL_ONLY
        return kind is not RequestOutputKind.FINAL_ONLY and not self.group.ranks

    @property
    def is_read_as_it_comes(self) -> bool:
        return self.streams or (isinstance(self.params, SamplingParams) and bool(self.params.stop))


class OutputProcessor:
    """Makes the outputs of a scheduler's requests.

    Args:
        scheduler: ends the sequences whose stop strings are found.
        tokenizer: None if the model has none. Texts are then empty.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer | None):
        self.scheduler, self.tokenizer = scheduler, tokenizer
        self.requests: dict[str, Request] = {}
        self.outputs: list[RequestOutput] = []  # not returned yet
        self._news: dict[str, None] = {}  # ids of requests that have something to report

    def add(self, request: Request) -> None:
        request.group.read_as_it_comes = request.is_read_as_it_comes
        self.requests[request.group.request_id] = request

    def read(self, groups: Iterable[SequenceGroup]) -> None:
        """Make text of the new tokens of these groups."""
        for group in groups:
            request = self.requests.get(group.request_id)
            if request is None or request.group is not group:  # it has ended; another request may have its id
                continue
            if group.read_as_it_comes or group.finished:
                self._read(request)
                if group.finished or request.streams:
                    self._news[group.request_id] = None

    def read_aborted(self, request_id: str) -> None:
        """Report on a request now, even if it reports only at its end."""
        self._read(self.requests[request_id])
        self._news[request_id] = None

    def report(self) -> None:
        """Make an output for each request that has news."""
        outputs = []
        for request_id in self._news:
            if (request := self.requests.get(request_id)) is None:
                continue
            try:
                outputs.append(self._output(request))
            except Exception:
                if request.group.error is None:
                    raise
                outputs.append(self._request_output(request, []))
        self.outputs += outputs
        self._remember(outputs)
        self._news.clear()

    def take(self) -> list[RequestOutput]:
        """The outputs that have not been returned yet."""
        outputs, self.outputs = self.outputs, []
        return outputs

    def take_of(self, request_id: str) -> RequestOutput | None:
        """The output of a request that has not been returned yet, if there is one. If an exception has left several,
        the last one."""
        mine = [output for output in self.outputs if output.request_id == request_id]
        for before, output in itertools.pairwise(mine):
            output.supersede(before)
        self.outputs = [output for output in self.outputs if output.request_id != request_id]
        return mine[-1] if mine else None

    def recover(self) -> list[tuple[SequenceGroup, Exception]]:
        """Catch up after an exception. Returns the groups whose text cannot be made, and why."""
        self._remember(self.outputs)
        failed = []
        for request in list(self.requests.values()):
            group = request.group
            try:
                if group.finished or group.read_as_it_comes:
                    self._read(request)
                unreported = any(c.num_read > c.num_reported for c in request.completions)
                if group.finished or (unreported and request.streams):
                    self._news[group.request_id] = None
                    self._output(request)
            except Exception as error:
                failed.append((group, error))
        return failed

    # Text

    def _read(self, request: Request) -> None:
        if request.group.error is not None and any(completion.reading for completion in request.completions):
            return  # reading this request has failed
        for completion in request.completions:
            seq, detokenizer = completion.seq, completion.detokenizer
            if completion.reading and detokenizer is not None:
                detokenizer.restart()
                completion.num_read = 0
            completion.reading = True
            while completion.num_read < seq.num_output_tokens:
                if completion.num_read == 0 and seq.finished and not request.is_read_as_it_comes:
                    self._read_all(request, completion)
                else:
                    self._read_token(request, completion)
                    completion.num_read += 1
            completion.reading = False

    def _read_token(self, request: Request, completion: Completion) -> None:
        seq, params, detokenizer = completion.seq, request.params, completion.detokenizer
        assert isinstance(params, SamplingParams)
        number = completion.num_read + 1
        if seq.logprobs:
            del completion.logprobs[number - 1 :]
            completion.logprobs.append(self._decoded(seq.logprobs[number - 1], params))
        last = number == seq.num_output_tokens
        if detokenizer is None or (last and self._is_hidden(seq, params)):
            return
        searching = number >= params.min_tokens and not (last and _ended_by_token(seq))
        stop = detokenizer.add(seq.token_ids[seq.num_prompt_tokens + number - 1], searching)
        if stop is None:
            return
        if seq.finished:  # the length, or a later token of the same step, has ended it, but a stop string wins
            seq.finish_reason, seq.stop_reason = "stop", stop
        else:
            self.scheduler.queues.finish(request.group, seq, "stop", stop)
        # A step with a draft may have appended more.
        if seq.logprobs:
            kept = zip(seq.output_token_ids[:number], seq.logprobs[:number], strict=True)
            seq.cumulative_logprob = sum(table[token_id][0] for token_id, table in kept)
        del seq.logprobs[number:]
        del seq.token_ids[seq.num_prompt_tokens + number :]

    def _read_all(self, request: Request, completion: Completion) -> None:
        """Read all tokens at once, for a completion that has ended and has no stop strings."""
        seq, detokenizer = completion.seq, completion.detokenizer
        assert isinstance(request.params, SamplingParams)
        completion.logprobs = [self._decoded(table, request.params) for table in seq.logprobs]
        if detokenizer is not None:
            token_ids = seq.output_token_ids
            detokenizer.add_all(token_ids[:-1] if self._is_hidden(seq, request.params) else token_ids)
        completion.num_read = seq.num_output_tokens

    def _is_hidden(self, seq: Sequence, params: SamplingParams) -> bool:
        """Whether the last token has ended the sequence and is not part of the text."""
        return _ended_by_token(seq) and not params.include_stop_str_in_output

    def _decoded(self, table: LogprobTable, params: SamplingParams) -> dict[int, Logprob]:
        tokenizer = self.tokenizer if params.detokenize else None
        return {
            token_id: Logprob(logprob, rank, None if tokenizer is None else tokenizer.decode([token_id], False))
            for token_id, (logprob, rank) in table.items()
        }

    # Outputs

    def _remember(self, outputs: list[RequestOutput]) -> None:
        """Count what these outputs report."""
        for output in outputs:
            request = self.requests.get(output.request_id)
            if request is None:
                continue
            if not request.group.ranks:  # competing completions are reported only once
                for completion, made in zip(request.completions, output.outputs, strict=False):
                    completion.num_reported, completion.num_chars = len(made.token_ids), len(made.text)
                    completion.output = made if made.finish_reason else None
            if output.finished:
                del self.requests[output.request_id]

    def _output(self, request: Request) -> RequestOutput:
        """What a request has produced. Changes only the detokenizers of sequences that have ended, and keeps the
        prompt's log-probabilities."""
        group, completions = request.group, request.completions
        if group.ranks:
            assert isinstance(request.params, SamplingParams)
            completions = sorted(completions, key=lambda c: -c.seq.cumulative_logprob)[: request.params.n]
        outputs = [self._completion(index, completion) for index, completion in enumerate(completions)]
        wanted = group.seqs[0].settings.prompt_logprobs is not None
        if wanted and request.prompt_logprobs is None and group.metrics.token_times:
            assert isinstance(request.params, SamplingParams)
            tables = group.prompt_logprobs
            request.prompt_logprobs = [None, *(self._decoded(table, request.params) for table in tables)]
        output = self._request_output(request, outputs)
        if request.fill is not None:
            request.fill(output)
        return output

    def _request_output(self, request: Request, outputs: list[CompletionOutput]) -> RequestOutput:
        group = request.group
        return RequestOutput(
            group.request_id,
            request.prompt,
            request.prompt_token_ids,
            outputs,
            group.finished,
            group.metrics,
            group.num_cached_tokens,
            request.prompt_logprobs,
            group.error,
            encoder_prompt=request.encoder[0],
            encoder_prompt_token_ids=request.encoder[1],
        )

    def _completion(self, index: int, completion: Completion) -> CompletionOutput:
        seq, detokenizer = completion.seq, completion.detokenizer
        if completion.output is not None:  # it has ended, but its siblings have not
            return dataclasses.replace(completion.output, delta="")
        output = CompletionOutput(index, "", seq.output_token_ids, None, None, seq.finish_reason, seq.stop_reason)
        if detokenizer is not None:
            if seq.finished and not completion.reading:
                detokenizer.finish()
            output.text = detokenizer.text if seq.finished else detokenizer.certain_text()
            output.delta = output.text[completion.num_chars :]
        if seq.settings.logprobs is not None:
            output.cumulative_logprob = seq.cumulative_logprob
        if seq.num_logprobs is not None:
            output.logprobs = list(completion.logprobs)
        return output


def _ended_by_token(seq: Sequence) -> bool:
    return seq.finish_reason == "stop" and not isinstance(seq.stop_reason, str)
