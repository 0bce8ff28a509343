"""Simulates replicas of the engine under a trace, on a virtual clock, without a model and without torch.

Each replica has the engine's own scheduler, block manager and token budget. SimulatedExecutor takes the place of the
workers: a step takes as long as the costs say (costs.py), and its tokens have no meaning. The server's router sends
each request to a replica when the request arrives, and knows what the replicas have computed by then.

While nothing but decodes runs and nothing can be admitted, steps differ only in the length of the contexts. Such
steps are not scheduled one by one: the clock jumps over them, and the sequences take all their tokens when something
else happens. This changes no result.

The simulation leaves out async scheduling (each step is completed before the next is scheduled), copies of blocks, and
the time that a router and a network take. A request never finds another request's output in the cache.
"""

import contextlib
import functools
import math
import multiprocessing.connection
import os
import signal
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import traces
from benchmarks.costs import Costs
from benchmarks.traces import Request, Trace
from nanopage.config.options import EngineConfig
from nanopage.engine.block_manager import BlockManager
from nanopage.engine.scheduler import Scheduler
from nanopage.engine.sequence import Sequence, SequenceGroup
from nanopage.engine.token_budget import choose_budget
from nanopage.outputs import StepStats
from nanopage.server.routing import MARGIN, Router
from nanopage.step import Batch, BatchResult, Capacity, SamplingSettings

# The priority that a scheduling policy gives a request: lower runs first, and can preempt.
POLICIES = {
    "fcfs": lambda request: 0,
    "shortest-prompt": lambda request: request.input_len,
    "shortest-output": lambda request: (
        request.output_len
    ),  # no real scheduler knows the output's length: this is the best that a guess can do
}


@dataclass(frozen=True)
class Setup:
    """The engine of each replica.

    max_num_batched_tokens: the tokens of a step. None: TokenBudget decides, as in the server.
    policy: one of POLICIES.
    jumps: whether steps that only decode are taken together, which is faster and gives the same results.
    """

    costs: Costs
    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    policy: str = "fcfs"
    jumps: bool = True

    @property
    def device(self) -> str:
        return str(self.costs.engine.get("device", "cpu"))


class SimulatedExecutor:
    """An executor on a virtual clock. Every sampled token of a sequence is `2 * seed + 1`.

    Args:
        num_blocks, max_model_len: the capacity that it reports.
    """

    def __init__(self, costs: Costs, num_blocks: int, max_model_len: int = 2**62, device: str = "cpu"):
        self.costs = costs
        self.capacity = Capacity(device, "simulated", num_blocks, 0, max_model_len)
        self.clock = 0.0  # seconds
        self._tokens: dict[int, int] = {}  # row -> the token of its sequence
        self._results: list[BatchResult] = []

    def start(self) -> Capacity:
        return self.capacity

    def submit(self, batch: Batch) -> None:
        seconds = self.costs.of(batch)
        self.clock += seconds
        for new in batch.new:
            self._tokens[new.row] = 2 * new.seed + 1
        for fork in batch.forks:
            self._tokens[fork.row] = 2 * fork.seed + 1
        tokens = self._tokens
        self._results.append(BatchResult([tokens[row] for row in batch.sampled_rows], model_seconds=seconds))

    def add_masks(self, masks: dict[int, bytes]) -> None:
        """Requests of a trace have none."""

    def result(self) -> BatchResult:
        return self._results.pop(0)

    def discard(self) -> None:
        self._results.clear()

    def rest(self) -> None:
        """There is no other work."""

    def check(self) -> None:
        """There is no worker that could end."""

    def compile(self, on_progress: Any = None) -> None:
        """There is nothing to compile."""

    def call(self, method: str, *arguments: Any) -> None:
        """There is no memory to give back."""

    def shutdown(self) -> None:
        self._results.clear()


@dataclass
class Served:
    """The results of a replica's requests, in the order in which they ended.

    numbers: the numbers of the requests.
    first_token, last_token: seconds since the first arrival.
    cached: tokens of the prompt that were found in the prefix cache when the request first ran.
    """

    numbers: list[int] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    last_token: list[float] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    preemptions: int = 0
    steps: int = 0
    busy_seconds: float = 0.0


class SimulatedReplica:
    """One engine of a simulation. Does what LLMEngine.step does, without text, and without the steps that a jump skips.

        replica.advance(request.arrival)
        replica.submit(request)
        ...
        replica.advance(math.inf)

    Args:
        part_tokens: tokens in each part of a prompt.
    """

    def __init__(self, setup: Setup, part_tokens: int = traces.PART_TOKENS):
        self.setup, self.part_tokens = setup, part_tokens
        self.executor = SimulatedExecutor(setup.costs, setup.num_blocks, device=setup.device)
        self.block_manager = BlockManager(setup.num_blocks, setup.block_size)
        config = EngineConfig(max_num_batched_tokens=setup.max_num_batched_tokens)
        self.scheduler = Scheduler(self.block_manager, setup.max_num_seqs, config.token_budget(setup.device))
        self.scheduler.token_budget = choose_budget(config, setup.device, "AsyncLLM")
        self.priority = POLICIES[setup.policy]
        self.settings = SamplingSettings()
        self.served = Served()
        self._first_tokens: dict[int, float] = {}
        self._idle_seconds = 0.0
        # Computed tokens of prompts and outputs: in all, in the last step, and up to the last call of `progress`.
        self._computed = self._last_computed = self._reported = 0
        # A jump: decodes that the clock includes, but whose tokens the sequences have not taken yet.
        self._jumped = 0  # steps
        self._jump_limit = 0  # steps until something else happens
        self._jump_seqs = 0
        self._jump_context = 0  # context tokens in the next step

    def submit(self, request: Request) -> None:
        """Take a request that has arrived. Call `advance` with the time of its arrival first."""
        scheduler, priority = self.scheduler, self.priority(request)
        if self._jump_limit and not (scheduler.waiting and scheduler.waiting[0].priority <= priority):
            self._land()  # the request may be admitted at once
        if not scheduler.has_unfinished():
            idle = max(0.0, request.arrival - self.executor.clock)
            self._idle_seconds += idle
            self.executor.clock = max(self.executor.clock, request.arrival)
        seq = Sequence(
            request.number,
            request.prompt(self.part_tokens),
            self.settings,
            seed=request.number,
            max_total_tokens=request.num_tokens,
        )
        scheduler.add(SequenceGroup(str(request.number), [seq], priority))

    def advance(self, until: float) -> None:
        """Run the steps that begin before `until`. A replica without requests runs none."""
        executor, scheduler = self.executor, self.scheduler
        while executor.clock < until:
            if self._jump_limit:
                self._jump(until)
            elif scheduler.has_unfinished():
                self._step()
            else:
                return

    def progress(self, now: float) -> int:
        """How many tokens of prompts and outputs were computed since the last call, in steps that ended by `now`."""
        computed = self._computed if self.executor.clock <= now else self._computed - self._last_computed
        new, self._reported = computed - self._reported, computed
        return new

    # Steps

    def _step(self) -> None:
        """What `LLMEngine.step` does."""
        scheduler, executor, served = self.scheduler, self.executor, self.served
        started = executor.clock
        schedule = scheduler.schedule()
        batch = schedule.batch
        computed, taken = 0, []
        if not schedule.is_empty:
            executor.submit(batch)
            scheduler.advance(schedule)
            taken = scheduler.update(schedule, executor.result())
            served.steps += 1
        for seq in taken:
            num_output_tokens = len(seq.token_ids) - seq.num_prompt_tokens
            computed += 1
            if num_output_tokens == 1:
                self._first_tokens[seq.seq_id] = executor.clock
                computed += seq.num_prompt_tokens
            if seq.finish_reason is not None:
                self._finish(seq)
        self._computed, self._last_computed = self._computed + computed, computed
        if scheduler.token_budget.seconds is not None:
            prefill = sum(
                count
                for seq, start, count in zip(schedule.sequences, batch.starts, batch.counts, strict=True)
                if start < seq.num_prompt_tokens
            )
            stats = StepStats(running=len(scheduler.running), prefill_tokens=prefill, seconds=executor.clock - started)
            scheduler.token_budget.observe(stats)
        scheduler.queues.events.clear()
        blocked = len(batch.rows) == len(scheduler.running) and not (schedule.preempted or schedule.chunks)
        # The last tokens of a prompt may have extended the cached prefix of a waiting request.
        blocked = blocked and all(len(seq.token_ids) > seq.num_prompt_tokens + 1 for seq in schedule.sequences)
        self._plan_jump(blocked)

    def _finish(self, seq: Sequence) -> None:
        served = self.served
        served.numbers.append(seq.seq_id)
        served.first_token.append(self._first_tokens.pop(seq.seq_id))
        served.last_token.append(self.executor.clock)
        served.cached.append(seq.group.num_cached_tokens)
        served.preemptions += seq.group.metrics.num_preemptions
        served.busy_seconds = self.executor.clock - self._idle_seconds

    # Jumps

    def _plan_jump(self, blocked: bool) -> None:
        """Find out for how many steps nothing but decodes can happen.

        Args:
            blocked: whether the last step had only decodes of all groups that run now. Then the waiting groups that it
                did not admit must wait until a group ends, because free blocks only become fewer.
        """
        scheduler = self.scheduler
        running = scheduler.running
        if not (self.setup.jumps and running) or scheduler.swapped:
            return
        if len(running) > scheduler.token_budget.tokens:
            return
        if scheduler.waiting and not (blocked and running[-1].priority <= scheduler.waiting[0].priority):
            return  # a group with a higher priority could preempt as soon as that frees enough blocks
        limit, context = 2**62, 0
        for group in running:
            seq = group.seqs[0]
            num_tokens = len(seq.token_ids)
            if seq.num_computed_tokens != num_tokens - 1 or num_tokens == seq.num_prompt_tokens:
                return  # in prefill
            context += num_tokens
            limit = min(limit, seq.max_total_tokens - num_tokens)
        self._jump_limit = self._until_blocks_run_out(limit)
        self._jump_seqs, self._jump_context, self._jumped = len(running), context, 0

    def _until_blocks_run_out(self, limit: int) -> int:
        """The most steps, up to `limit`, for which all running sequences have blocks."""
        manager, running = self.block_manager, self.scheduler.running
        free, size = manager.num_free_blocks, manager.block_size
        if len(running) * (limit // size + 1) <= free:
            return limit
        # Tokens of each sequence beyond the capacity of its present blocks, after 0 steps: 0 or less.
        missing = [
            group.seqs[0].num_computed_tokens - size * len(manager.block_tables[group.seqs[0].seq_id])
            for group in running
        ]
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if sum(max(0, -(-(tokens + middle) // size)) for tokens in missing) <= free:
                low = middle
            else:
                high = middle - 1
        return low

    def _jump(self, until: float) -> None:
        """Advance the clock through steps that begin before `until`."""
        executor, num_seqs, limit = self.executor, self._jump_seqs, self._jump_limit
        fixed, each = executor.costs.decodes(num_seqs)
        clock, context, jumped = executor.clock, self._jump_context, self._jumped
        while jumped < limit and clock < until:
            clock += fixed + each * context
            context += num_seqs
            jumped += 1
        steps = jumped - self._jumped
        self.served.steps += steps
        self._computed, self._last_computed = self._computed + steps * num_seqs, num_seqs
        executor.clock, self._jump_context, self._jumped = clock, context, jumped
        if jumped == limit:
            self._land()
            self._plan_jump(False)

    def _land(self) -> None:
        """Give the sequences the tokens of the steps that the clock has jumped over."""
        scheduler, manager, steps = self.scheduler, self.block_manager, self._jumped
        size = manager.block_size
        ended = []
        for group in scheduler.running if steps else ():
            seq = group.seqs[0]
            before, end = seq.num_computed_tokens, seq.num_computed_tokens + steps
            token_ids = seq.token_ids
            table = manager.block_tables[seq.seq_id]
            if end > size * len(table):
                manager.grow(seq.seq_id, before, end)
                seq.num_sent_blocks = len(table)
            token_ids += [2 * seq.seed + 1] * steps
            seq.num_computed_tokens = end
            if end // size > before // size:
                manager.register(seq.seq_id, token_ids, end)
            if len(token_ids) >= seq.max_total_tokens:
                ended.append(seq)
        for seq in ended:
            scheduler.queues.finish(seq.group, seq, "length")
            self._finish(seq)
        if ended:
            scheduler.queues.events.clear()
            scheduler.token_budget.observe(StepStats(running=len(scheduler.running)))
        self._jumped = self._jump_limit = 0


@dataclass(frozen=True)
class Configuration:
    """The setup that a trace runs on: a number of replicas, and a router's policy and margin."""

    setup: Setup
    num_replicas: int
    router: str = "prefix"
    margin: float = MARGIN


def run_replicas(
    trace: Trace, configuration: Configuration, replicas: range | None = None, router: Router | None = None
) -> list[Served]:
    """Run the requests of a trace in the order of their arrival. Returns what each replica has done.

    Args:
        replicas: the only replicas to run. Only with "round-robin", which ignores the state of other replicas.
        router: a router without replicas that replaces the configuration's router. It gets the parts of prompts if the
            configuration's policy is "prefix".
    """
    router = router or Router(configuration.router, configuration.margin)
    names = [str(index) for index in range(configuration.num_replicas)]
    for name in names:
        router.add(name)
    ran = replicas if replicas is not None else range(configuration.num_replicas)
    running = {names[index]: SimulatedReplica(configuration.setup, trace.part_tokens) for index in ran}
    in_turn = configuration.router == "round-robin"
    with_parts = configuration.router == "prefix"
    for request in trace.requests:
        now = request.arrival
        for name, replica in () if in_turn else running.items():
            replica.advance(now)
            if computed := replica.progress(now):
                router.finish(name, computed)
        parts = request.parts(trace.part_tokens) if with_parts else ()
        chosen = running.get(router.choose(parts, trace.part_tokens, request.num_tokens))
        if chosen is not None:
            chosen.advance(now)
            chosen.submit(request)
    for replica in running.values():
        replica.advance(math.inf)
    return [replica.served for replica in running.values()]


# Figures


@dataclass
class Outcome:
    """The results of a trace: arrays with an entry for each request, times in seconds since the first arrival."""

    arrival: np.ndarray
    input_len: np.ndarray
    output_len: np.ndarray
    first_token: np.ndarray
    last_token: np.ndarray
    cached: np.ndarray
    preemptions: int
    steps: int
    busy_share: float  # of the replicas' time

    @property
    def ttft(self) -> np.ndarray:
        return self.first_token - self.arrival

    @property
    def e2el(self) -> np.ndarray:
        return self.last_token - self.arrival

    @property
    def tpot(self) -> np.ndarray:
        """0 for an output of a single token."""
        return (self.last_token - self.first_token) / np.maximum(1, self.output_len - 1)


def outcome_of(trace: Trace, served: list[Served]) -> Outcome:
    numbers = np.concatenate([np.array(each.numbers, int) for each in served])
    if len(numbers) != len(trace.requests):
        raise RuntimeError(f"{len(numbers)} of {len(trace.requests)} requests have ended")
    order = np.argsort(numbers)

    def of(name: str) -> np.ndarray:
        return np.concatenate([np.array(getattr(each, name)) for each in served])[order]

    requests = trace.requests
    last_token = of("last_token")
    busy = math.fsum(each.busy_seconds for each in served)
    return Outcome(
        np.array([request.arrival for request in requests]),
        np.array([request.input_len for request in requests]),
        np.array([request.output_len for request in requests]),
        of("first_token"),
        last_token,
        of("cached"),
        sum(each.preemptions for each in served),
        sum(each.steps for each in served),
        busy / (len(served) * float(last_token.max())),
    )


def summary(outcome: Outcome, goodput: dict[str, float]) -> dict[str, Any]:
    """The figures of a simulation, named as by `bench.py serve`.

    Args: goodput: metric -> milliseconds, as `serve.parse_goodput` returns it.
    """
    count, duration = len(outcome.arrival), float(outcome.last_token.max())
    ms = {name: 1000 * getattr(outcome, name) for name in ("ttft", "tpot", "e2el")}
    meets = np.ones(count, bool)
    for name, limit in goodput.items():
        meets &= ms[name] <= limit
    good = int(np.sum(meets))
    result: dict[str, Any] = {
        "duration": duration,
        "completed": count,
        "total_input_tokens": int(outcome.input_len.sum()),
        "total_output_tokens": int(outcome.output_len.sum()),
        "request_throughput": count / duration,
        "output_throughput": float(outcome.output_len.sum()) / duration,
        "request_goodput": good / duration if goodput else None,
        "good_share": good / count if goodput else None,
        "prefix_cache_hit_rate": float(outcome.cached.sum() / outcome.input_len.sum()),
        "preemptions": outcome.preemptions,
        "busy_share": outcome.busy_share,
        "steps": outcome.steps,
    }
    ms["tpot"] = ms["tpot"][outcome.output_len > 1]
    for name, times in ms.items():
        result[f"mean_{name}_ms"] = float(np.mean(times)) if len(times) else None
        for percentile in (50, 99):
            result[f"p{percentile}_{name}_ms"] = float(np.percentile(times, percentile)) if len(times) else None
    return result


# Processes


@dataclass(frozen=True)
class TraceFile:
    """The arguments of `traces.read_trace`. Each process reads the trace itself."""

    path: Path
    count: int | None = None
    speed: float = 1.0
    repeat: int = 1


@functools.lru_cache(maxsize=1)
def load(file: TraceFile) -> Trace:
    return traces.read_trace(file.path, file.count, file.speed, file.repeat)


@dataclass(frozen=True)
class Task:
    """Replicas that one process runs: all replicas of a configuration, or some of them with "round-robin"."""

    index: int  # of the configuration
    configuration: Configuration
    replicas: range | None


def run_task(file: TraceFile, task: Task) -> tuple[int, list[Served], float]:
    """Returns the index of the configuration, the results of the replicas, and the seconds that they took."""
    trace = load(file)
    started = time.perf_counter()
    return task.index, run_replicas(trace, task.configuration, task.replicas), time.perf_counter() - started


def simulate(
    file: TraceFile, configurations: list[Configuration], processes: int | None = None
) -> Generator[tuple[int, Outcome, float], None, None]:
    """Run configurations on all cores. As each ends, yields its index, its outcome and the CPU seconds it took.

    Replicas behind "round-robin" are divided among the processes. Replicas behind other routers depend on each other,
    and run in one process.

    Args: processes: the number of processes. None: the number of cores that this process may use.
    """
    trace = load(file)
    count = processes or len(os.sched_getaffinity(0))
    tasks: list[Task] = []
    for index, configuration in enumerate(configurations):
        parts: list[range | None] = [None]
        if configuration.router == "round-robin":
            size = -(-configuration.num_replicas // count)
            parts = [
                range(start, min(start + size, configuration.num_replicas))
                for start in range(0, configuration.num_replicas, size)
            ]
        tasks += [Task(index, configuration, part) for part in parts]
    open_tasks = [sum(task.index == index for task in tasks) for index in range(len(configurations))]
    served: list[list[Served]] = [[] for _ in configurations]
    seconds = [0.0] * len(configurations)
    with contextlib.closing(run_tasks(file, tasks, min(count, len(tasks)))) as ended:
        for index, done, took in ended:
            served[index] += done
            seconds[index] += took
            open_tasks[index] -= 1
            if not open_tasks[index]:
                yield index, outcome_of(trace, served[index]), seconds[index]
                served[index] = []


def run_tasks(
    file: TraceFile, tasks: list[Task], processes: int
) -> Generator[tuple[int, list[Served], float], None, None]:
    """The results of all tasks, as they end. If the generator is closed early, the processes end at once."""
    if processes == 1:
        for task in tasks:
            yield run_task(file, task)
        return
    context = multiprocessing.get_context("spawn")  # not forked: this process may have threads
    waiting = deque(tasks)
    running: dict[Connection, SpawnProcess] = {}
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(target=send_result, args=(file, waiting.popleft(), writer), daemon=True)
                process.start()
                writer.close()  # so that the reader sees an end if the process is killed
                running[reader] = process
            ended = multiprocessing.connection.wait(list(running))
            for reader in [each for each in running if each in ended]:
                try:
                    result = reader.recv()
                except EOFError:
                    raise RuntimeError("a process of the simulation was killed: too little memory?") from None
                running.pop(reader).join()
                if isinstance(result, Exception):
                    raise result
                yield result
    finally:
        for process in running.values():
            process.terminate()
            process.join()


def send_result(file: TraceFile, task: Task, writer: Connection) -> None:
    """Run a task in a process, and send its result or the exception that ended it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes; the first one ends the others
    try:
        writer.send(run_task(file, task))
    except Exception as error:
        writer.send(error)
