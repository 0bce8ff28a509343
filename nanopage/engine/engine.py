"""LLMEngine: requests in, outputs out, one step at a time."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator

import torch

from nanopage.config import EngineConfig
from nanopage.engine.beam_search import Hypothesis
from nanopage.engine.block_manager import BlockManager
from nanopage.engine.input_processor import Completion, InputProcessor, Prompt, Request, default_sampling_params
from nanopage.engine.scheduler import Batch, Scheduler
from nanopage.kernels.cpu.packed_linear import can_pack
from nanopage.model_files import exists
from nanopage.request import (
    BeamSearchParams,
    CompletionOutput,
    Logprob,
    RequestOutput,
    SamplingParams,
    SequenceGroup,
    StepStats,
)
from nanopage.sampling.sampler import Samples
from nanopage.text.tokenizer import Tokenizer
from nanopage.weights import hub, loader
from nanopage.worker import jit
from nanopage.worker.aot import Graphs
from nanopage.worker.device import resolve_device, resolve_dtype, set_cuda_precision
from nanopage.worker.kv_cache import GIB, KVCache, block_bytes, num_blocks_that_fit, num_host_blocks
from nanopage.worker.model_runner import ModelRunner
from nanopage.worker.threads import limit_threads

logger = logging.getLogger("nanopage")


class LLMEngine:
    """A model, its scheduler and its runner.

        engine = LLMEngine(EngineConfig())
        engine.add_request("a", "Once upon a time", SamplingParams())
        while engine.has_unfinished_requests():
            for output in engine.step():
                ...

    Args:
        on_progress: called while weights load, with the number of those that have been read and of all.

    Raises:
        FileNotFoundError, ValueError: a model that is not there, is broken or is not supported.
        MemoryError: no room for its weights or its KV cache.
    """

    def __init__(self, config: EngineConfig, on_progress: Callable[[int, int], None] | None = None):
        self.config = config
        self.model_path = path = hub.resolve(None if config.model is None else str(config.model))
        self.device = resolve_device(config.device)
        checkpoint = loader.open_checkpoint(path)
        self.model_config = loader.read_config(checkpoint)
        self.default_sampling_params = SamplingParams()
        if config.generation_config == "auto":
            self.default_sampling_params = default_sampling_params(path)
        limit = self.model_config.max_position_embeddings
        if config.max_model_len is not None and config.max_model_len > limit:
            raise ValueError(f"max_model_len={config.max_model_len} is more than the model's {limit} positions")
        if config.quantization and self.device.type != "cpu":
            raise ValueError(
                f"quantization={config.quantization!r} works on a CPU only, and this engine is on {self.device}"
            )
        if self.device.type == "cuda" and config.block_size & (config.block_size - 1):
            raise ValueError(f"block_size={config.block_size} must be a power of two on a GPU")
        self.dtype, why = resolve_dtype(config.dtype, self.model_config.dtype, self.device)
        if why:
            logger.info(why)
        if self.device.type == "cpu":
            limit_threads()
        else:
            set_cuda_precision()
        dummy = config.load_format == "dummy"
        has_tokenizer = path.suffix == ".gguf" or exists(path / "tokenizer.json")
        self.tokenizer = None
        if has_tokenizer or not dummy:
            self.tokenizer = Tokenizer(checkpoint, self.model_config.vocab_size)
        model = loader.load_model(
            checkpoint, self.model_config, self.dtype, self.device, config.load_format, on_progress
        )
        del checkpoint  # the vocabulary of a .gguf file takes tens of megabytes
        longest = config.max_model_len or limit
        if self.device.type == "cuda":
            num_blocks = self._prepare_gpu(model, longest)
        else:
            num_blocks = num_blocks_that_fit(config, self.model_config, longest, self.dtype, self.device)
        self.max_model_len = self._fit_length(longest, num_blocks * config.block_size)
        size = block_bytes(self.model_config, config.block_size, self.dtype)
        host_blocks = num_host_blocks(config, num_blocks, size)
        self.kv_cache = self._make_cache(num_blocks, host_blocks)
        graphs = None
        if not config.enforce_eager and self.device.type == "cpu" and can_pack(self.dtype):
            graphs = Graphs(path, self.model_config, self.dtype, config.block_size, config.quantization)
        elif not config.enforce_eager and self.device.type == "cpu":
            name = str(self.dtype).removeprefix("torch.")
            logger.info(f"{name} on {self.device.type} runs eagerly: there is no compiled code for it yet")
        self.runner = ModelRunner(model, self.kv_cache, self.device, graphs, config.quantization, config.max_num_seqs)
        if self.device.type == "cuda" and not config.enforce_eager:
            self.runner.capture_graphs(self.max_model_len)
        self.input_processor = InputProcessor(
            config, self.model_config, path, self.tokenizer, self.max_model_len, num_blocks
        )
        block_manager = BlockManager(num_blocks, config.block_size, config.enable_prefix_caching, host_blocks)
        self.scheduler = Scheduler(
            block_manager, config.max_num_seqs, config.max_num_batched_tokens, config.preemption_mode
        )
        self.last_step = StepStats()
        self.listeners: list[Callable[[StepStats], None]] = []
        on_gpu = self.device.type == "cuda"
        self.async_scheduling = on_gpu if config.async_scheduling is None else config.async_scheduling
        self._launched: tuple[Batch, Samples] | None = None  # the last batch, until its tokens are taken in
        self._scheduled: Batch | None = None  # the batch that is being launched
        self._requests: dict[str, Request] = {}
        self._news: dict[str, None] = {}  # ids of requests that have something to report
        self._outputs: list[RequestOutput] = []  # made, and not returned yet
        self._in_call = False  # true between calls, too, if an exception ended the last one
        self._num_submitted = 0
        tokens = num_blocks * config.block_size
        gib = num_blocks * size / GIB
        kinds = [kind for kind in ("dummy" if dummy else None, config.quantization) if kind]
        weights = f" with {' '.join(kinds)} weights" if kinds else ""
        logger.info(
            f"{path.name} in {str(self.dtype).removeprefix('torch.')}{weights} on {self.device.type}; KV cache "
            f"{gib:.2f} GiB = {tokens:,} tokens = {tokens / self.max_model_len:.1f} requests of "
            f"{self.max_model_len:,} tokens"
        )

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> "LLMEngine":
        """vLLM's way to make an engine."""
        return cls(engine_args)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a request; `step` will report on it under `request_id`.

        Args:
            prompt: text, token ids, or a dict (see `Prompt`).
            params: default SamplingParams().
            priority: lower goes first, with scheduling_policy="priority".

        Raises:
            ValueError, TypeError: an id that is in use, an empty prompt, one that leaves no room for output, a token
                id outside the vocabulary, more completions than could ever run, text without a tokenizer, by name.
                Nothing is queued then.
        """
        self.submit(self.make_request(request_id, prompt, params, priority))

    def make_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | None = None,
        priority: int = 0,
    ) -> Request:
        """Check everything about a request without queueing it. Raises as `add_request`."""
        if isinstance(request_id, str) and request_id in self._requests:
            raise ValueError(f"request_id {request_id!r} is in use")
        return self.input_processor.make_request(request_id, prompt, params, priority)

    def submit(self, request: Request) -> None:
        """Queue what `make_request` made. Raises ValueError if its id has come into use meanwhile."""
        group = request.group
        if group.request_id in self._requests:
            raise ValueError(f"request_id {group.request_id!r} is in use")
        group.metrics.arrival_time = time.perf_counter()
        if not self._requests:  # between requests, not within one: the graphs round otherwise
            self.runner.use_graphs()
        self._num_submitted += 1
        if self._num_submitted >= 2:  # a single question is answered before compiling can pay
            self.runner.make_graphs()
        with self._call():
            self._requests[group.request_id] = request
            self.scheduler.add(group)

    def step(self) -> list[RequestOutput]:
        """Run one batch. Returns an output for each request that got a token, finished or not; for a beam search, and
        for `best_of` more than `n`, only when it has finished. `last_step` says what the step did.

        With async scheduling the batch is launched before the tokens of the one before it are looked at, and the
        outputs are that one's. A sequence that has ended by then runs once too often; that token is dropped.

        If the batch fails, its requests run again, one at a time. Those that fail alone end with
        `RequestOutput.error`; the others get the tokens that they would have got. A KeyboardInterrupt can come at any
        point: the next call goes on with every request.

        At its end a step calls each of `listeners` with its StepStats. A listener may raise: the step is complete by
        then, and the next call of `step` or `abort` returns the outputs.
        """
        stats, started, unfinished = StepStats(), time.perf_counter(), len(self._requests)
        with self._call():
            suspect = next(iter(self.scheduler.suspects), None)
            try:
                if self.scheduler.has_unfinished() or self._launched is not None:
                    self._run_batch(stats)
                else:  # only outputs are left
                    self._count(Batch(), stats)
                self._report()
            except Exception as error:
                self._isolate(error, suspect)
                self._count(Batch(), stats)
        stats.finished = unfinished - len(self._requests)
        stats.seconds = time.perf_counter() - started
        for listener in self.listeners:
            listener(stats)
        outputs, self._outputs = self._outputs, []
        return outputs

    def abort(self, request_id: str, index: int | None = None) -> RequestOutput | None:
        """End a request now, or only its completion `index`, and free the blocks.

        Returns: what it has so far; None if there is no such request or completion (it may just have finished).
        Raises: ValueError for the `index` of a beam search or of `best_of` more than `n`, whose completions have no
            place before all have ended.
        """
        self._recover()
        request = self._requests.get(request_id)
        if request is not None and index is not None:
            if request.group.beam_search is not None or request.group.params.ranks:
                raise ValueError(f"index={index}: completions that compete can only be aborted all together")
            if not 0 <= index < len(request.completions) or request.completions[index].seq.finished:
                return None
        with self._call():
            if request is not None:
                seq = None if index is None else request.completions[index].seq
                self.scheduler.finish(request.group, seq, "abort")
                self._news[request_id] = None
                self._report()
        outputs = [output for output in self._outputs if output.request_id == request_id]
        if not outputs:
            return None
        *earlier, output = outputs  # earlier ones are of steps that could not return them
        for i, completion in enumerate(output.outputs):
            completion.delta = "".join(before.outputs[i].delta for before in earlier) + completion.delta
        self._outputs = [output for output in self._outputs if output.request_id != request_id]
        return output

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, for instance after the weights were changed. Running requests go on."""
        self.scheduler.block_manager.reset_prefix_cache()

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests or self._outputs)

    # One step

    def _run_batch(self, stats: StepStats) -> None:
        started = time.perf_counter()
        batch = self._scheduled = self.scheduler.schedule()
        stats.schedule_seconds = time.perf_counter() - started
        launched = batch, self.runner.launch(batch, stats)
        self._complete(stats)
        self.scheduler.advance(batch)
        self._launched, self._scheduled = launched, None
        must_wait = self.scheduler.suspects or any(seq.reads_its_tokens for s in batch.sequences for seq in s.samplers)
        if must_wait or not self.async_scheduling:
            self._complete(stats)
        self._count(batch, stats)

    def _complete(self, stats: StepStats) -> None:
        """Wait for the batch that was launched last, take in its tokens, and make text of them."""
        if self._launched is None:
            return
        batch, samples = self._launched
        started = time.perf_counter()
        sampled = samples.result()
        arrived = time.perf_counter()
        taken = self.scheduler.update(batch, sampled)
        self._launched = None
        for group in batch.groups:
            if group.request_id in self._requests:
                self._news[group.request_id] = None
                self._read_tokens(self._requests[group.request_id])
        stats.wait_seconds += arrived - started
        stats.output_seconds += time.perf_counter() - arrived
        stats.output_tokens += len(taken)

    # Failures

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """What changes the engine's state happens in here. After an exception the next call recovers first."""
        self._recover()
        self._in_call = True
        yield
        self._in_call = False

    def _recover(self) -> None:
        """If an exception has ended the last call, begin every request again from the tokens that it has."""
        if not self._in_call:
            return
        self._launched = self._scheduled = None
        self.scheduler.restart([request.group for request in self._requests.values()])
        self._remember(self._outputs)
        for request in list(self._requests.values()):
            try:
                self._read_tokens(request)
                if request.group.finished or any(c.num_read > c.num_reported for c in request.completions):
                    self._news[request.group.request_id] = None
                    self._output(request)
            except Exception as error:
                self._fail(request.group, f"making its text failed: {type(error).__name__}: {error}")
        self._in_call = False

    def _isolate(self, error: Exception, suspect: SequenceGroup | None) -> None:
        """A batch has failed. Have each of its requests run alone. If it was of a suspect alone, end that request."""
        message = f"{type(error).__name__}: {error}"
        batches = [batch for batch in (self._scheduled, self._launched and self._launched[0]) if batch]
        groups = list({id(s.group): s.group for batch in batches for s in batch.sequences}.values())
        groups = groups or [request.group for request in self._requests.values()]
        self._recover()
        self._in_call = True
        if suspect is not None:
            self._fail(suspect, message)
            return
        self.scheduler.suspects = [group for group in groups if not group.finished]
        count = len(self.scheduler.suspects)
        logger.warning(f"a step failed: {message}; running its {count} requests one at a time", exc_info=error)

    def _fail(self, group: SequenceGroup, message: str) -> None:
        """End a request because of an error."""
        logger.warning(f"request {group.request_id} ended by an error: {message}")
        self.scheduler.fail(group, message)
        self._news[group.request_id] = None

    # Outputs

    def _read_tokens(self, request: Request) -> None:
        """Make text of a request's new tokens, and end the sequences whose stop strings it completes."""
        if request.group.beam_search is not None or request.group.error is not None:
            return
        for completion in request.completions:
            if completion.reading and completion.detokenizer is not None:
                completion.detokenizer.restart()
                completion.num_read = 0
            completion.reading = True
            while completion.num_read < completion.seq.num_known_output_tokens:
                self._read_token(request, completion)
                completion.num_read += 1
            completion.reading = False

    def _read_token(self, request: Request, completion: Completion) -> None:
        seq, params, detokenizer = completion.seq, completion.seq.params, completion.detokenizer
        number = completion.num_read + 1
        last = seq.finished and number == seq.num_known_output_tokens
        if seq.logprobs:
            del completion.logprobs[number - 1 :]
            completion.logprobs.append(self._decoded(seq.logprobs[number - 1]))
        ended_by_token = last and seq.finish_reason == "stop" and not isinstance(seq.stop_reason, str)
        if detokenizer is None or (ended_by_token and not params.include_stop_str_in_output):
            return
        token_id = seq.token_ids[seq.num_prompt_tokens + number - 1]
        stop = detokenizer.add(token_id, number >= params.min_tokens and not ended_by_token)
        if stop is not None and seq.finished:  # it was the last token allowed, too
            seq.finish_reason, seq.stop_reason = "stop", stop
        elif stop is not None:
            self.scheduler.finish(request.group, seq, "stop", stop)

    def _report(self) -> None:
        """Make outputs of what is new."""
        outputs = []
        for request_id in self._news:
            if (request := self._requests.get(request_id)) is None:
                continue
            group = request.group
            if group.finished or not (group.beam_search or group.params.ranks):
                try:
                    outputs.append(self._output(request))
                except Exception:
                    if group.error is None:
                        raise
                    outputs.append(self._request_output(request, []))
        self._outputs += outputs
        self._remember(outputs)
        self._news.clear()

    def _remember(self, outputs: list[RequestOutput]) -> None:
        """Note what these outputs have reported."""
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is None:
                continue
            if request.group.beam_search is None and not request.group.params.ranks:
                for completion, made in zip(request.completions, output.outputs, strict=False):
                    completion.num_reported, completion.num_chars = len(made.token_ids), len(made.text)
                    completion.output = made if made.finish_reason else None
            if output.finished:
                del self._requests[output.request_id]

    def _output(self, request: Request) -> RequestOutput:
        """What a request has produced. Changes nothing but detokenizers that have come to their end."""
        group = request.group
        if group.beam_search is not None:
            outputs = self._beams(request)
        else:
            completions = request.completions
            if group.params.ranks:
                completions = sorted(completions, key=lambda c: -c.seq.cumulative_logprob)[: group.params.n]
            outputs = [self._completion(index, completion) for index, completion in enumerate(completions)]
        if group.params.prompt_logprobs is not None and request.prompt_logprobs is None and group.metrics.token_times:
            request.prompt_logprobs = [None, *map(self._decoded, group.prompt_logprobs)]
        return self._request_output(request, outputs)

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
        )

    def _completion(self, index: int, completion: Completion) -> CompletionOutput:
        seq, detokenizer = completion.seq, completion.detokenizer
        if completion.output is not None:  # it has ended before, its siblings have not
            return dataclasses.replace(completion.output, delta="")
        output = CompletionOutput(index, "", seq.output_token_ids, None, None, seq.finish_reason, seq.stop_reason)
        if detokenizer is not None:
            if seq.finished and seq.finish_reason != "error":
                detokenizer.finish()
            output.text = detokenizer.text if seq.finished else detokenizer.certain_text()
            output.delta = output.text[completion.num_chars :]
        if seq.num_logprobs is not None:
            output.cumulative_logprob = seq.cumulative_logprob
        if seq.params.logprobs is not None:
            output.logprobs = list(completion.logprobs)
        return output

    def _beams(self, request: Request) -> list[CompletionOutput]:
        """The hypotheses of a beam search, best first, and after them the live beams if it did not come to its end."""
        search, params = request.group.beam_search, request.params
        assert search is not None and isinstance(params, BeamSearchParams)
        hypotheses = list(search.hypotheses)
        if not search.finished:
            beams = [seq for seq in request.group.seqs if not seq.dormant]
            reason = "abort" if request.group.error is None else "error"
            hypotheses += [Hypothesis(b.output_token_ids, b.cumulative_logprob, None, reason) for b in beams]
        return [
            CompletionOutput(
                index,
                self._decode(hypothesis.token_ids, params.skip_special_tokens) or "",
                hypothesis.token_ids,
                hypothesis.cumulative_logprob,
                finish_reason=hypothesis.finish_reason,
                score=hypothesis.score,
            )
            for index, hypothesis in enumerate(hypotheses[: params.width])
        ]

    def _count(self, batch: Batch, stats: StepStats) -> None:
        scheduler, manager = self.scheduler, self.scheduler.block_manager
        stats.waiting = sum(len(group.live) for group in scheduler.waiting)
        stats.running = sum(len(group.live) for group in scheduler.running)
        stats.swapped = sum(len(group.live) for group in scheduler.swapped)
        stats.stored_tokens = sum(seq.num_computed_tokens for group in scheduler.running for seq in group.live)
        stats.decode_tokens = sum(s.num_tokens for s in batch.sequences if s.start >= s.seq.num_prompt_tokens)
        stats.prefill_tokens = batch.num_tokens - stats.decode_tokens
        stats.context_tokens = sum(s.start + s.num_tokens for s in batch.sequences)
        stats.cached_tokens = batch.num_cached_tokens
        stats.cached_blocks = manager.num_cached_blocks
        stats.free_blocks = manager.num_free_blocks - stats.cached_blocks
        stats.used_blocks = manager.num_blocks - manager.num_free_blocks
        stats.preempted = len(batch.preempted)
        stats.swapped_out, stats.swapped_in = len(batch.swap_out), len(batch.swap_in)
        stats.copied = len(batch.copies)
        self.last_step = stats

    def _decoded(self, table: dict[int, tuple[float, int]]) -> dict[int, Logprob]:
        return {
            token_id: Logprob(logprob, rank, self._decode([token_id], skip_special_tokens=False))
            for token_id, (logprob, rank) in table.items()
        }

    def _decode(self, token_ids: list[int], skip_special_tokens: bool) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode(token_ids, skip_special_tokens)

    def _prepare_gpu(self, model, longest: int) -> int:
        """Compile the model, and find out how many blocks there is room for beside it and its largest step."""
        config, model_config = self.config, self.model_config
        if not config.enforce_eager:
            jit.compile_model(model, model_config, self.dtype, self.device)
        runner = ModelRunner(model, self._make_cache(1), self.device, max_num_seqs=config.max_num_seqs)
        step_bytes = runner.profile(config.max_num_batched_tokens, longest, not config.enforce_eager)
        del runner
        torch.cuda.empty_cache()
        return num_blocks_that_fit(config, model_config, longest, self.dtype, self.device, step_bytes)

    def _make_cache(self, num_blocks: int, num_host_blocks: int = 0) -> KVCache:
        block_size = self.config.block_size
        return KVCache(self.model_config, num_blocks, block_size, self.dtype, self.device, num_host_blocks)

    def _fit_length(self, longest: int, pool: int) -> int:
        """The max_model_len to use with a pool of that many tokens, so that any accepted request fits it alone."""
        if longest <= pool:
            return longest
        if self.config.max_model_len is not None:
            raise MemoryError(
                f"the KV cache holds {pool:,} tokens, less than one request of max_model_len={longest:,}: "
                "raise kv_cache_gib or gpu_memory_utilization, or lower max_model_len"
            )
        logger.info(f"max_model_len is {pool:,}, what the KV cache holds, not the model's {longest:,}")
        return pool
