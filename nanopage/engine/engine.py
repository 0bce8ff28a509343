"""LLMEngine: requests in, outputs out, one step at a time.

InputProcessor ─▶ Scheduler ─▶ Batch ─▶ executor ─▶ BatchResult ─▶ Scheduler ─▶ OutputProcessor
   requests        what runs            (workers)      tokens       what ends       outputs
"""

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanopage.config.model import ModelConfig
from nanopage.config.options import EngineConfig
from nanopage.engine.attached import AdapterSlots, Drafts
from nanopage.engine.block_manager import BlockManager
from nanopage.engine.input_processor import InputProcessor, default_sampling_params
from nanopage.engine.output_processor import OutputProcessor, Request
from nanopage.engine.recovery import changing, die, isolate, recover
from nanopage.engine.schedule import Schedule
from nanopage.engine.scheduler import Scheduler
from nanopage.engine.statistics import StepRecord, count_batch, count_result, count_state
from nanopage.inputs import LoRARequest, Prompt
from nanopage.outputs import RequestOutput, StepStats
from nanopage.params import BeamSearchParams, PoolingParams, SamplingParams
from nanopage.step import Capacity, Executor, WorkerDiedError
from nanopage.text.tokenizer import Tokenizer


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
        make_drafts: makes the Drafts for the workers' capacity. None: nothing guesses tokens.
        adapter_slots: of the workers, with `config.enable_lora`.

    Raises: as `Executor.start`; ValueError for recommended sampling parameters that are not valid.
    """

    # Changed by standby/engine.py: what sleeps, "weights" or "kv_cache", and whether the model has weights.
    asleep: frozenset[str] = frozenset()
    has_weights = True

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        model_path: Path,
        tokenizer: Tokenizer | None,
        executor: Executor,
        make_drafts: Callable[[Capacity], Drafts] | None = None,
        adapter_slots: AdapterSlots | None = None,
    ):
        self.config, self.model_config, self.model_path, self.tokenizer = config, model_config, model_path, tokenizer
        self.default_sampling_params = SamplingParams()
        if config.generation_config == "auto":
            self.default_sampling_params = default_sampling_params(model_path)
        self.executor = executor
        self.capacity = capacity = executor.start()
        self.max_model_len = capacity.max_model_len
        budget = config.token_budget(capacity.device)
        self.input_processor = InputProcessor(config, model_config, model_path, tokenizer, capacity)
        block_manager = BlockManager(
            capacity.num_blocks,
            config.block_size,
            config.enable_prefix_caching,
            capacity.num_host_blocks,
            capacity.windows,
        )
        self.scheduler = Scheduler(
            block_manager,
            config.max_num_seqs,
            budget,
            config.preemption_mode,
            config.pipeline_parallel_size,
            config.num_ranks > 1,
            adapter_slots,
        )
        self.scheduler.drafts = drafts = None if make_drafts is None else make_drafts(capacity)
        self.output_processor = OutputProcessor(self.scheduler, tokenizer)
        self.async_scheduling = config.async_scheduling
        if self.async_scheduling is None:
            self.async_scheduling = capacity.device == "cuda" and config.num_ranks == 1 and drafts is None
        self.listeners: list[Callable[[StepStats], None]] = []
        self.planned: Schedule | None = None  # by `plan` or this call of step, until `advance` is done
        self.last = StepRecord()
        self.in_flight: deque[Schedule] = deque()  # submitted batches, oldest first, until `update` is done
        self._plan_seconds = 0.0  # that `plan` took; the next step adds them to its own
        self._num_batches = 0  # that have been submitted
        self._most_in_flight = 2 if self.async_scheduling else config.pipeline_parallel_size
        self.dead_error: WorkerDiedError | None = None  # why no step can run any more
        self.in_call = False  # still true between calls if an exception ended the last call

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | PoolingParams | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
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
            EngineAsleepError: the engine sleeps, or has no weights.
        """
        self.submit(self.input_processor.make_request(request_id, prompt, params, priority, lora_request))

    def submit(self, request: Request) -> None:
        """Queue a request of `input_processor.make_request`.

        Raises: ValueError if its id has come into use since; WorkerDiedError if no step can run any more;
            EngineAsleepError.
        """
        group = request.group
        if self.dead_error is not None:
            raise self.dead_error
        self.input_processor.check_open()
        recover(self)
        processor, request_id = self.output_processor, group.request_id
        if request_id in processor.requests or any(output.request_id == request_id for output in processor.outputs):
            raise ValueError(f"request_id {request_id!r} is in use")  # also by an output that has not been returned
        group.metrics.arrival_time = time.perf_counter()
        with changing(self):
            processor.add(request)
            self.scheduler.add(group)

    def has_unfinished_requests(self) -> bool:
        return bool(self.output_processor.requests or self.output_processor.outputs)

    def step(self) -> list[RequestOutput]:
        """Run one batch. Returns an output for each request that got a token. A beam search, a request with `best_of`
        larger than `n` and a FINAL_ONLY request have only one output, when they finish. `last_step` has the statistics.

        With async scheduling, this submits a batch before it reads the results of the previous batch, and returns the
        outputs of the previous batch. If a stop ended a sequence in the previous batch, it runs once more, and its
        token is dropped. With pipeline parallelism, as many batches as there are stages are in flight, each with its
        own sequences, and the outputs are those of the oldest batch.

        If the batch fails, its requests run again, one at a time. A request that fails alone ends with
        `RequestOutput.error`. The others get the same tokens as without the failure, except for near-ties in dtypes
        smaller than float64 without `batch_invariant`. If a worker has died, every request ends with an error, and
        `dead_error` says why. After a KeyboardInterrupt, at whatever point, the next call continues with every request.
        An interrupt in the middle of a message to a worker process counts as the worker's death.

        At the end, `step` calls each of `listeners` with the StepStats. A listener must not call `step` or `generate`,
        change `listeners`, or block. If one raises, the later ones miss this step. The step itself is complete, and the
        next call of `step` or `abort` returns its outputs.
        """
        record, started = StepRecord(), time.perf_counter()
        stats = record.stats
        planned, self._plan_seconds = self._plan_seconds, 0.0
        unfinished = len(self.output_processor.requests)
        with changing(self):
            suspect = next(iter(self.scheduler.queues.suspects), None)
            try:
                if self.scheduler.has_unfinished() or self.in_flight or self.planned is not None:
                    self._run_batch(record)
                reporting = time.perf_counter()
                self.output_processor.report()
                stats.output_seconds += time.perf_counter() - reporting
            except WorkerDiedError as error:
                die(self, error)
            except Exception as error:
                isolate(self, error, suspect)
            count_state(stats, self.scheduler)
        stats.finished = unfinished - len(self.output_processor.requests)
        self._rest_if_idle()
        stats.events = self.scheduler.take_events()
        record.in_flight = list(self.in_flight)
        self.last = record
        stats.seconds = time.perf_counter() - started + planned
        if self.scheduler.drafts is not None:
            self.scheduler.drafts.observe(stats)
        for listener in self.listeners:
            listener(stats)
        return self.output_processor.take()

    def _run_batch(self, record: StepRecord) -> None:
        """Decide on a batch, submit it, advance, and complete it.

        If batches overlap, an older batch is completed. With async scheduling, it is the previous one, as soon as this
        batch is submitted. With pipeline parallelism, it is the oldest, once as many are in flight as there are stages
        (see docs/async.md).
        """
        self.planned = schedule = record.scheduled = self._decide(record.stats)
        if schedule.is_empty:
            self._complete(record)
        else:
            self._submit(schedule)
            if self.async_scheduling:
                self._complete(record)  # the previous batch, while this one runs
            self.scheduler.advance(schedule)
            self.in_flight.append(schedule)
        self.planned = None
        if schedule.must_be_awaited or self.scheduler.queues.suspects:
            while self.in_flight:
                self._complete(record)
        elif len(self.in_flight) == self._most_in_flight:
            self._complete(record)
        if not schedule.is_empty:
            count_batch(record.stats, schedule)

    def _decide(self, stats: StepStats) -> Schedule:
        """What `plan` has decided, or else decide now."""
        started = time.perf_counter()
        schedule = self.scheduler.schedule() if self.planned is None else self.planned
        stats.schedule_seconds = time.perf_counter() - started
        return schedule

    def _submit(self, schedule: Schedule) -> None:
        self._num_batches += 1
        schedule.tell("submitted", self._num_batches, time.perf_counter())
        self.executor.submit(schedule.batch)
        if schedule.masked:
            self.executor.add_masks(schedule.find_masks())

    def _complete(self, record: StepRecord) -> None:
        """Wait for the oldest batch in flight, update the sequences with its tokens, and make text of them."""
        if not self.in_flight:
            return
        schedule, stats = self.in_flight[0], record.stats
        result = self.executor.result()
        arrived = time.perf_counter()
        schedule.tell("arrived", arrived)
        taken = self.scheduler.update(schedule, result)
        self.in_flight.popleft()
        record.completed.append(schedule)
        updated = time.perf_counter()
        self.output_processor.read(schedule.groups)
        stats.update_seconds += updated - arrived
        stats.output_seconds += time.perf_counter() - updated
        count_result(stats, schedule, result, len(taken))

    def _rest_if_idle(self) -> None:
        if not self.output_processor.requests:
            self.executor.rest()
            if self.scheduler.drafts is not None:
                self.scheduler.drafts.rest()

    @property
    def last_step(self) -> StepStats:
        """The statistics of the last step."""
        return self.last.stats

    def plan(self) -> bool:
        """Decide what the next call of `step` does, without running it (view/explain.py says what that is). Until then,
        requests can be added or aborted. Added requests wait, and the tokens of aborted requests are dropped.

        Returns: whether there is anything to do.
        Raises: what the scheduler raises; the next call recovers, as after a failed `step`.
        """
        with changing(self):
            if self.planned is None and self.scheduler.has_unfinished():
                started = time.perf_counter()
                self.planned = self.scheduler.schedule()
                self._plan_seconds = time.perf_counter() - started
        return self.planned is not None or bool(self.in_flight)

    def abort(self, request_id: str, index: int | None = None) -> RequestOutput | None:
        """End a request now, or only its completion `index`, and free the blocks.

        The other requests go on. In two cases the engine also gives up a step that it has planned (see `plan`): if
        `index` is given, and while the requests of a failed step run one at a time. Every request then starts again
        from the tokens that it has, and the prefix cache is empty. No token is lost or changes.

        Returns: its output so far; None if there is no such request or completion (it may just have finished).
        Raises: ValueError for an `index` with beam search or with `best_of` larger than `n`: these completions compete,
            and have no index before all have ended.
        """
        recover(self)
        request = self.output_processor.requests.get(request_id)
        if request is not None and index is not None:
            if request.group.beam_search is not None or request.group.ranks:
                raise ValueError(f"index={index}: completions that compete can only be aborted all together")
            if not 0 <= index < len(request.completions) or request.completions[index].seq.finished:
                return None
        if self.planned is not None and (index is not None or self.scheduler.queues.suspects):
            # The planned step depends on what ends here. As after an exception, `changing` gives it up: plan anew.
            self.in_call = True
        with changing(self):
            if request is not None:
                seq = None if index is None else request.completions[index].seq
                self.scheduler.queues.finish(request.group, seq, "abort")
                self.output_processor.read_aborted(request_id)
                self.output_processor.report()
        self._rest_if_idle()
        return self.output_processor.take_of(request_id)

    @staticmethod
    def from_engine_args(engine_args: Any) -> "LLMEngine":
        """Make an engine of an `EngineArgs`, as in vLLM. Raises: as `nanopage.build.build_engine`."""
        return engine_args.create_engine()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, for instance after a change of the weights. Running requests continue."""
        with changing(self):
            self.scheduler.block_manager.reset_prefix_cache()

    def check_workers(self) -> None:
        """Look for workers that have died while no request runs. While one runs, `step` notices it.

        Raises: WorkerDiedError if a worker has ended. `dead_error` says the same from then on.
        """
        with changing(self):
            try:
                self.executor.check()
            except WorkerDiedError as error:
                die(self, error)
                raise

    def shutdown(self) -> None:
        """Shut the workers down. The engine cannot be used afterwards."""
        self.executor.shutdown()
