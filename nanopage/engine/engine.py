"""LLMEngine: requests in, outputs out, one step at a time.

InputProcessor ─▶ Scheduler ─▶ Batch ─▶ executor ─▶ BatchResult ─▶ Scheduler ─▶ OutputProcessor
   requests        what runs            (workers)      tokens       what ends       outputs
"""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanopage.config.model import ModelConfig
from nanopage.config.options import EngineConfig
from nanopage.engine.block_manager import BlockManager
from nanopage.engine.input_processor import InputProcessor, default_sampling_params
from nanopage.engine.output_processor import OutputProcessor, Request
from nanopage.engine.recovery import restart
from nanopage.engine.schedule import Schedule
from nanopage.engine.scheduler import Scheduler
from nanopage.engine.sequence import SequenceGroup
from nanopage.inputs import Prompt
from nanopage.outputs import RequestOutput, StepStats
from nanopage.params import BeamSearchParams, PoolingParams, SamplingParams
from nanopage.speculation.drafts import Drafter
from nanopage.state.layer_kinds import BlockNeeds
from nanopage.step import Capacity, Executor, WorkerDiedError
from nanopage.text.tokenizer import Tokenizer
from nanopage.view.explain import Explained, Sentence, explain

if TYPE_CHECKING:
    from nanopage.engine.interface import Engine
    from nanopage.inputs import LoRARequest

logger = logging.getLogger("nanopage")


class LLMEngine:
    """Runs requests on the model of an executor. `nanopage.build.build_engine` makes an engine from options.

        engine = build_engine(EngineConfig())
        engine.add_request("a", "Once upon a time", SamplingParams())
        while engine.has_unfinished_requests():
            for output in engine.step():
                ...

    Not safe for threads: `LLM` puts a lock around it.

    Args:
        model_path: a directory or a .gguf file. Used for messages and for the sampling parameters it recommends.
        tokenizer: None if the model has none, which only load_format="dummy" allows.
        executor: runs the steps. The constructor starts it.
        make_drafter: makes what guesses tokens, with `config.speculation`, once it is known how much the workers hold.

    Raises: as `Executor.start`; ValueError for recommended sampling parameters that are not valid.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        model_path: Path,
        tokenizer: Tokenizer | None,
        executor: Executor,
        make_drafter: Callable[[Capacity], Drafter] | None = None,
    ):
        self.config, self.model_config, self.model_path, self.tokenizer = config, model_config, model_path, tokenizer
        self.default_sampling_params = SamplingParams()
        if config.generation_config == "auto":
            self.default_sampling_params = default_sampling_params(model_path)
        self.executor = executor
        self.capacity = capacity = executor.start()
        self.max_model_len = capacity.max_model_len
        budget = config.token_budget(capacity.device)
        self.input_processor = InputProcessor(
            config,
            model_config,
            model_path,
            tokenizer,
            capacity.max_model_len,
            capacity.num_blocks,
            BlockNeeds(capacity.windows, config.block_size, budget),
        )
        block_manager = BlockManager(
            capacity.num_blocks,
            config.block_size,
            config.enable_prefix_caching,
            capacity.num_host_blocks,
            capacity.windows,
        )
        drafter = None if make_drafter is None else make_drafter(capacity)
        self.scheduler = Scheduler(
            block_manager,
            config.max_num_seqs,
            budget,
            config.preemption_mode,
            config.pipeline_parallel_size,
            config.num_ranks > 1,
            drafter,
            config.max_loras if config.enable_lora else 0,
        )
        self.output_processor = OutputProcessor(self.scheduler, tokenizer, model_config.pooling)
        self.async_scheduling = config.async_scheduling
        if self.async_scheduling is None:
            self.async_scheduling = capacity.device == "cuda" and config.num_ranks == 1 and drafter is None
        self.last_step = StepStats()
        self.listeners: list[Callable[[StepStats], None]] = []
        self._scheduled: Schedule | None = None  # by `plan` or this call of step, until `advance` is done
        self.last_decided = Explained()  # what `last_step` has decided, for `explain`
        self._in_flight: deque[Schedule] = deque()  # submitted batches, oldest first, until `update` is done
        self._plan_seconds = 0.0  # that `plan` has taken for `_scheduled`; they count as the step's
        self._num_batches = 0  # that have been submitted
        self._most_in_flight = 2 if self.async_scheduling else config.pipeline_parallel_size
        self.dead_error: WorkerDiedError | None = None  # why no step can run any more
        self._in_call = False  # still true between calls if an exception ended the last call

    @property
    def cache_config(self) -> dict[str, int]:
        """The size of the KV cache, under vLLM's names."""
        return {"block_size": self.config.block_size, "num_gpu_blocks": self.capacity.num_blocks}

    @property
    def max_draft(self) -> int:
        """Most tokens of a draft; 0 without speculative decoding."""
        return 0 if self.config.speculation is None else self.config.speculation.num_speculative_tokens

    @staticmethod
    def from_engine_args(engine_args: Any) -> "Engine":
        """Make an engine of an `EngineArgs`, as in vLLM. Raises: as `nanopage.build.build_engine`."""
        return engine_args.create_engine()

    # Requests

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | PoolingParams | None = None,
        priority: int = 0,
        lora_request: "LoRARequest | None" = None,
    ) -> None:
        """Queue a request; `step` will report on it under `request_id`.

        Args:
            prompt: text, token ids, or a dict (see `Prompt`).
            params: default SamplingParams(). A model with runner="pooling" needs PoolingParams.
            priority: lower goes first, with scheduling_policy="priority".
            lora_request: an adapter, with enable_lora.

        Raises:
            ValueError, TypeError: an id that is in use, an empty prompt, a prompt as long as max_model_len, a token id
                outside the vocabulary, more completions than could ever run, text without a tokenizer, an adapter that
                does not fit the model. The message names the argument. Nothing is queued.
        """
        self.submit(self.input_processor.make_request(request_id, prompt, params, priority, lora_request))

    def submit(self, request: Request) -> None:
        """Queue a request of `input_processor.make_request`.

        Raises: ValueError if its id has come into use since; WorkerDiedError if no step can run any more.
        """
        group = request.group
        if self.dead_error is not None:
            raise self.dead_error
        self._recover()
        self._check_id(group.request_id)
        group.metrics.arrival_time = time.perf_counter()
        with self._call():
            self.output_processor.add(request)
            self.scheduler.add(group)

    def _check_id(self, request_id: str) -> None:
        """Raises: ValueError if an unfinished request has this id, or an output that has not been returned."""
        processor = self.output_processor
        if request_id in processor.requests or any(output.request_id == request_id for output in processor.outputs):
            raise ValueError(f"request_id {request_id!r} is in use")

    def abort(self, request_id: str, index: int | None = None) -> RequestOutput | None:
        """End a request now, or only its completion `index`, and free the blocks.

        The other requests go on, with one exception. If a step is planned (see `plan`), and either `index` is given or
        the requests of a failed step run one at a time, the plan is given up: every request starts again from the
        tokens that it has, and the prefix cache is empty. No token is lost or changes.

        Returns: its output so far; None if there is no such request or completion (it may just have finished).
        Raises: ValueError for an `index` with beam search or with `best_of` larger than `n`: these completions compete,
            and have no index before all have ended.
        """
        self._recover()
        request = self.output_processor.requests.get(request_id)
        if request is not None and index is not None:
            if request.group.beam_search is not None or request.group.ranks:
                raise ValueError(f"index={index}: completions that compete can only be aborted all together")
            if not 0 <= index < len(request.completions) or request.completions[index].seq.finished:
                return None
        if self._scheduled is not None and (index is not None or self.scheduler.queues.suspects):
            # A step is planned in which a sibling, or the blame for a failure, depends on what ends here: plan anew.
            self._in_call = True
        with self._call():
            if request is not None:
                seq = None if index is None else request.completions[index].seq
                self.scheduler.queues.finish(request.group, seq, "abort")
                self.output_processor.read_aborted(request_id)
                self.output_processor.report()
        self._rest_if_idle()
        outputs = self.output_processor.outputs
        mine = [output for output in outputs if output.request_id == request_id]
        if not mine:
            return None
        *earlier, output = mine  # the earlier ones are of steps that an exception ended
        for before in reversed(earlier):
            output.supersede(before)
        self.output_processor.outputs = [output for output in outputs if output.request_id != request_id]
        return output

    def has_unfinished_requests(self) -> bool:
        return bool(self.output_processor.requests or self.output_processor.outputs)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, for instance after a change of the weights. Running requests continue."""
        with self._call():
            self.scheduler.block_manager.reset_prefix_cache()

    def check_workers(self) -> None:
        """Look for workers that have died while no request runs. While one runs, `step` notices it.

        Raises: WorkerDiedError if a worker has ended. `dead_error` says the same from then on.
        """
        with self._call():
            try:
                self.executor.check()
            except WorkerDiedError as error:
                self._die(error)
                raise

    def shutdown(self) -> None:
        """Shut the workers down. The engine cannot be used afterwards."""
        self.executor.shutdown()

    # Steps

    def plan(self) -> bool:
        """Decide what the next call of `step` does, without running it. `explain` says what that is. Until then,
        requests can be added, and wait, or aborted: the tokens of those are dropped.

        Returns: whether there is anything to do.
        Raises: what the scheduler raises; the next call recovers, as after a failed `step`.
        """
        with self._call():
            if self._scheduled is None and self.scheduler.has_unfinished():
                started = time.perf_counter()
                self._scheduled = self.scheduler.schedule()
                self._plan_seconds = time.perf_counter() - started
        return self._scheduled is not None or bool(self._in_flight)

    def explain(self, name: Callable[[str], str] = str) -> list[str]:
        """What the last step did and why, or what the step of `plan` is about to do: a sentence for each decision.
        They are made when asked for, from the step's Schedule, its events and the state of the engine now.

        Args: name: what a sentence calls the request with this id.
        """
        return [sentence.text for sentence in self.sentences(name)]

    def sentences(self, name: Callable[[str], str] = str) -> list[Sentence]:
        """The sentences of `explain` with what they are about."""
        planned = None
        if self._scheduled is not None:
            planned = Explained(self._scheduled, events=self.scheduler.queues.events)
        return explain(self.scheduler, planned or self.last_decided, name)

    def step(self) -> list[RequestOutput]:
        """Run one batch. Returns an output for each request that got a token. A beam search, a request with `best_of`
        larger than `n` and a FINAL_ONLY request have only one output, when they finish. `last_step` has the statistics.

        With async scheduling, this submits a batch before it reads the results of the previous batch, and returns the
        outputs of the previous batch. A sequence that a stop ended in the previous batch runs once more; that token is
        dropped. With pipeline parallelism, as many batches as there are stages are in flight, each with other
        sequences, and the outputs are those of the oldest.

        If the batch fails, its requests run again, one at a time. A request that fails alone ends with
        `RequestOutput.error`. The others get the same tokens as without the failure, but for near-ties in dtypes
        smaller than float64. If a worker has died, every request ends with an error, and `dead_error` says why. After a
        KeyboardInterrupt, at whatever point, the next call continues with every request; if it comes in the middle of a
        message to a worker process, that counts as the worker's death.

        At the end, `step` calls each of `listeners` with the StepStats. A listener must not call `step` or `generate`,
        change `listeners`, or block. If one raises, the later ones miss this step. The step itself is complete, and the
        next call of `step` or `abort` returns its outputs.
        """
        stats, started = StepStats(), time.perf_counter()
        planned, self._plan_seconds = self._plan_seconds, 0.0
        step = Explained()
        unfinished = len(self.output_processor.requests)
        with self._call():
            suspect = next(iter(self.scheduler.queues.suspects), None)
            try:
                if self.scheduler.has_unfinished() or self._in_flight or self._scheduled is not None:
                    self._run_batch(stats, step)
                self._report(stats)
            except WorkerDiedError as error:
                self._die(error)
            except Exception as error:
                self._isolate(error, suspect)
            self._count_state(stats)
        stats.finished = unfinished - len(self.output_processor.requests)
        self._rest_if_idle()
        stats.events = step.events = self.scheduler.take_events()
        step.in_flight = list(self._in_flight)
        self.last_decided = step
        stats.seconds = time.perf_counter() - started + planned
        if self.scheduler.drafter is not None:
            self.scheduler.drafter.observe(stats)
        for listener in self.listeners:
            listener(stats)
        return self.output_processor.take()

    def _run_batch(self, stats: StepStats, step: Explained) -> None:
        started = time.perf_counter()
        if self._scheduled is None:
            self._scheduled = self.scheduler.schedule()
        step.scheduled = schedule = self._scheduled
        schedule.submitted = time.perf_counter()
        stats.schedule_seconds = schedule.submitted - started
        if schedule.is_empty:
            self._complete(stats, step)
            self._scheduled = None
            return
        self._num_batches += 1
        schedule.number = self._num_batches
        self.executor.submit(schedule.batch)
        if schedule.masked:
            self.executor.add_masks(schedule.find_masks())
        if self.async_scheduling:
            self._complete(stats, step)
        self.scheduler.advance(schedule)
        self._in_flight.append(schedule)
        self._scheduled = None
        if schedule.must_be_awaited or self.scheduler.queues.suspects:
            while self._in_flight:
                self._complete(stats, step)
        elif len(self._in_flight) == self._most_in_flight:
            self._complete(stats, step)
        self._count_batch(schedule, stats)

    def _complete(self, stats: StepStats, step: Explained) -> None:
        """Wait for the oldest batch in flight, update the sequences with its tokens, and make text of them."""
        if not self._in_flight:
            return
        schedule = self._in_flight[0]
        result = self.executor.result()
        arrived = schedule.arrived = time.perf_counter()
        taken = self.scheduler.update(schedule, result)
        self._in_flight.popleft()
        step.completed.append(schedule)
        updated = time.perf_counter()
        self.output_processor.read(schedule.groups)
        stats.prepare_seconds += result.prepare_seconds
        stats.model_seconds += result.model_seconds
        stats.sample_seconds += result.sample_seconds
        stats.wait_seconds += result.wait_seconds
        stats.device_seconds += result.device_seconds
        stats.update_seconds += updated - arrived
        stats.output_seconds += time.perf_counter() - updated
        stats.output_tokens += len(taken)
        for (_, draft), accepted in zip(schedule.drafted, schedule.num_accepted, strict=True):
            stats.count_draft(len(draft), accepted)

    def _report(self, stats: StepStats) -> None:
        started = time.perf_counter()
        self.output_processor.report()
        stats.output_seconds += time.perf_counter() - started

    def _rest_if_idle(self) -> None:
        if not self.output_processor.requests:
            self.executor.rest()
            if self.scheduler.drafter is not None:
                self.scheduler.drafter.rest()

    def _count_batch(self, schedule: Schedule, stats: StepStats) -> None:
        batch = schedule.batch
        stats.decode_tokens = sum(
            count
            for seq, start, count in zip(schedule.sequences, batch.starts, batch.counts, strict=True)
            if start >= seq.num_prompt_tokens
        )
        stats.prefill_tokens = batch.num_tokens - stats.decode_tokens
        stats.context_tokens = sum(batch.starts) + batch.num_tokens
        stats.cached_tokens = schedule.num_cached_tokens
        stats.preempted = len(schedule.preempted)
        stats.swapped_out, stats.swapped_in = len(batch.swap_out), len(batch.swap_in)
        stats.copied = len(batch.copies)

    def _count_state(self, stats: StepStats) -> None:
        scheduler, manager = self.scheduler, self.scheduler.block_manager
        running = [seq for group in scheduler.running for seq in group.live]
        stats.running, stats.stored_tokens = len(running), sum(seq.num_computed_tokens for seq in running)
        stats.waiting = sum(len(group.live) for group in scheduler.waiting)
        stats.swapped = sum(len(group.live) for group in scheduler.swapped)
        stats.cached_blocks = manager.num_cached_blocks
        stats.free_blocks = manager.num_free_blocks - stats.cached_blocks
        stats.used_blocks = manager.num_blocks - manager.num_free_blocks
        self.last_step = stats

    # Failures

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """Surrounds every change of the engine's state. If an exception ends it, the next call recovers first."""
        self._recover()
        self._in_call = True
        yield
        self._in_call = False

    def _recover(self) -> None:
        """If an exception has ended the last call, start every request again from the tokens it has."""
        if not self._in_call:
            return
        self._in_flight.clear()
        self._scheduled, self._plan_seconds = None, 0.0
        self.executor.discard()
        if self.scheduler.drafter is not None:
            self.scheduler.drafter.restart()
        restart(self.scheduler.queues, [request.group for request in self.output_processor.requests.values()])
        for group, error in self.output_processor.recover():
            self._fail(group, f"making its text failed: {type(error).__name__}: {error}")
        self._in_call = False

    def _isolate(self, error: Exception, suspect: SequenceGroup | None) -> None:
        """A batch has failed: run each of its requests, and of the step in flight, alone. If it was the batch of a
        suspect, end that request."""
        message = f"{type(error).__name__}: {error}"
        schedules = [schedule for schedule in (self._scheduled, *self._in_flight) if schedule is not None]
        groups = list(dict.fromkeys(seq.group for schedule in schedules for seq in schedule.sequences))
        groups = groups or [request.group for request in self.output_processor.requests.values()]
        self._recover()
        self._in_call = True
        if suspect is not None:
            self._fail(suspect, message)
            return
        self.scheduler.queues.suspects = [group for group in groups if not group.finished]
        count = len(self.scheduler.queues.suspects)
        logger.warning(f"a step failed: {message}; running its {count} requests one at a time", exc_info=error)

    def _die(self, error: WorkerDiedError) -> None:
        """No step can run any more: end every request."""
        self.dead_error = error
        self._recover()
        self._in_call = True
        for request in list(self.output_processor.requests.values()):
            self._fail(request.group, str(error))
        self.output_processor.report()

    def _fail(self, group: SequenceGroup, message: str) -> None:
        """End a request because of an error."""
        logger.warning(f"request {group.request_id} ended by an error: {message}")
        self.scheduler.queues.fail(group, message)
        self.output_processor.read_aborted(group.request_id)
