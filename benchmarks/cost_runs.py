"""`bench.py costs`: measures steps of the engine on this machine, fits costs to them (costs.py), and compares what the
simulator predicts with what the engine does."""

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import serve
from benchmarks.checks import find_model
from benchmarks.costs import TERMS, Costs, RememberingExecutor, fit
from benchmarks.metrics import summary as measured_summary
from benchmarks.outputs import exit_unless, recorded
from benchmarks.peers.nanopage import random_prompt
from benchmarks.peers.protocol import Work
from benchmarks.progress import progress
from benchmarks.report import console, describe, errors_by_name, figure, show_header, show_table, table_of
from benchmarks.simulator import Configuration, Setup, outcome_of, run_replicas, summary
from benchmarks.steps import listening
from benchmarks.traces import Request, Trace
from nanopage.engine.token_budget import SECONDS, TokenBudget

BATCHES = (1, 2, 4, 8, 16, 32, 64)  # sequences that decode together
BUDGETS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)  # tokens in a step
CONTEXTS = (1, 4, 16)  # sequences with long contexts
LEAST_CONTEXT = 256  # tokens that an engine must hold to be measured
LONG = 1500  # tokens of a long prompt, if the model holds as many
SHARES = (0.3, 0.6)  # of the requests per second that the simulator completes; the third rate is all at once
COMPARED = {  # in the table; the JSON file has PERCENTILES as well
    "output_throughput": "output tok/s",
    "mean_ttft_ms": "mean TTFT (ms)",
    "mean_tpot_ms": "mean TPOT (ms)",
}
PERCENTILES = ("p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms", "prefix_cache_hit_rate")


@dataclass
class Load:
    """Requests that run together. Lengths are tokens, from lowest to highest."""

    count: int
    concurrency: int
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    budget: int  # tokens in a step
    prefix_len: int = 0  # common to all prompts

    def lengths(self, rng: random.Random) -> list[tuple[int, int]]:
        return [
            (self.prefix_len + rng.randint(*self.input_len), rng.randint(*self.output_len)) for _ in range(self.count)
        ]


def costs(
    model: str | None,
    switches: dict[str, Any],
    given: Costs | None,
    compares: bool,
    num_prompts: int,
    seed: int,
    json_file: Path | None,
) -> None:
    """Measure costs, or take given costs, and compare predictions with the engine.

    Args:
        switches: options of EngineConfig.
        compares: whether to compare predictions with the engine.
        num_prompts: requests in each comparison.
    """
    from nanopage import EngineConfig
    from nanopage.build import build_engine

    path, _ = find_model(model)
    with errors_by_name():
        engine = build_engine(EngineConfig(model=str(path), **switches))
        if engine.max_model_len < LEAST_CONTEXT:
            raise ValueError(f"a context of {engine.max_model_len} tokens is too short to measure: {LEAST_CONTEXT}")
        engine.executor.compile()
    header = describe(engine, f"costs of steps, seed {seed}")
    show_header(header)
    results: dict[str, Any] = {"header": header}
    with recorded(json_file, lambda: results) as record, errors_by_name():
        found = given
        if found is None:
            found = measure(engine, header, random.Random(seed))
            show_costs(found)
        results["costs"] = found.to_json()
        if compares:
            results["validation"] = []
            validate(engine, found, num_prompts, seed, results["validation"])
    exit_unless(record.written)


def measure(engine: Any, header: dict[str, str], rng: random.Random) -> Costs:
    """Run batches of all sizes, and fit costs to their steps. Raises: ValueError if there are too few steps."""
    plan = loads(engine)
    with remembering(engine) as executor, progress(engine, "steps", sum(load.count for load in plan)):
        for number, load in enumerate([plan[0], *plan]):
            with token_budget(engine, TokenBudget(load.budget)):
                run_load(engine, load, rng)
            if number == 0:  # warm-up
                executor.forget()
    terms, errors = fit(executor.rows, executor.seconds)
    capacity, config = engine.capacity, engine.config
    described = {
        "num_blocks": capacity.num_blocks,
        "block_size": config.block_size,
        "max_num_seqs": config.max_num_seqs,
        "device": capacity.device,
    }
    tokens, sequences = TERMS.index("tokens"), TERMS.index("sequences")
    largest = {
        "tokens": int(max(row[tokens] for row in executor.rows)),
        "sequences": int(max(row[sequences] for row in executor.rows)),
        "context": executor.max_context,
    }
    return Costs(terms, header, described, largest, errors)


def loads(engine: Any) -> list[Load]:
    """The requests to run: every kind of step that the terms tell apart, as far as this engine can run it."""
    most_tokens, limit = engine.scheduler.token_budget.most, engine.max_model_len
    num_blocks = engine.capacity.num_blocks // len(engine.capacity.windows)
    most_seqs, pool = engine.config.max_num_seqs, num_blocks * engine.config.block_size
    long, short = min(LONG, limit - 65), min(256, limit - 65)
    batches = [batch for batch in BATCHES if batch <= most_seqs and batch * (short + 64) <= pool]
    plan = [Load(2 * batch, batch, (short // 16, short), (32, 64), most_tokens) for batch in batches]
    plan += [Load(2 * batch, batch, (4, 32), (16, 16), most_tokens) for batch in batches]  # many chunks in a step
    budgets = [budget for budget in BUDGETS if budget <= most_tokens]
    plan += [Load(4, 4, (long // 4, long), (16, 16), budget) for budget in budgets if 4 * (long + 16) <= pool]
    contexts = [batch for batch in CONTEXTS if batch <= most_seqs and batch * (long + 64) <= pool]
    return plan + [Load(batch, batch, (long // 2, long), (64, 64), most_tokens) for batch in contexts]


def run_load(engine: Any, load: Load, rng: random.Random) -> None:
    work = [Work(random_prompt(rng, engine, i), o) for i, o in load.lengths(rng)]
    serve.drive(serve.planned(work, [0.0] * len(work)), engine, work, load.concurrency)


@contextmanager
def remembering(engine: Any) -> Iterator[RememberingExecutor]:
    """Wrap the engine's executor in a RememberingExecutor until the block ends."""
    executor = RememberingExecutor(engine.executor)
    engine.executor = executor
    try:
        with listening(engine, executor.after_step):
            yield executor
    finally:
        engine.executor = executor.executor


@contextmanager
def token_budget(engine: Any, budget: TokenBudget) -> Iterator[None]:
    """Set the tokens of a step until the block ends."""
    before = engine.scheduler.token_budget
    engine.scheduler.token_budget = budget
    try:
        yield
    finally:
        engine.scheduler.token_budget = before


def show_costs(found: Costs) -> None:
    table = table_of("a step", ["", "microseconds"])
    for name, seconds in found.seconds.items():
        table.add_row(name, figure(1e6 * seconds))
    show_table(table)
    steps, left_out = found.fit["steps"], found.fit["left out"]
    mean, p90 = 100 * found.fit["mean error"], 100 * found.fit["P90 error"]
    console.print(
        f"{steps:,} steps, {left_out:,} of them left out; errors of the others: mean {mean:.1f} %, P90 {p90:.1f} %",
        highlight=False,
    )


# Against the engine


def validate(engine: Any, found: Costs, num_prompts: int, seed: int, results: list[dict[str, Any]]) -> None:
    """Serve three workloads at three rates, with the token budget of the server, and simulate the same requests.

    Args: results: gets an entry for each workload and rate.
    """
    rng = random.Random(seed)
    for name, load in workloads(engine, num_prompts).items():
        lengths = load.lengths(rng)
        table = table_of(f"{name}: predicted, measured", ["requests/s", *COMPARED.values()])
        busiest = predict(engine, found, load, lengths, [0.0] * num_prompts)
        for share in (*SHARES, math.inf):
            rate = share * busiest["request_throughput"]
            arrivals = serve.arrival_times(num_prompts, rate, 1.0, seed)
            predicted = predict(engine, found, load, lengths, arrivals)
            measured = observe(engine, load, lengths, arrivals, rng, f"{name}, {rate:.3g} requests/s")
            label: float | str = "inf" if rate == math.inf else rate
            both = {key: {"predicted": predicted[key], "measured": measured[key]} for key in (*COMPARED, *PERCENTILES)}
            results.append({"workload": name, "request_rate": label} | both)
            table.add_row(
                "all at once" if rate == math.inf else figure(rate),
                *(compared(predicted[key], measured[key]) for key in COMPARED),
            )
        show_table(table)


def workloads(engine: Any, num_prompts: int) -> dict[str, Load]:
    limit, most = engine.max_model_len, engine.scheduler.token_budget.most
    short, long = min(256, limit - 128), min(LONG, limit - 64)
    return {
        "mixed prompts": Load(num_prompts, num_prompts, (short // 8, short), (32, 128), most),
        "long prompts": Load(num_prompts, num_prompts, (long // 3, long), (16, 64), most),
        "a common prefix": Load(num_prompts, num_prompts, (16, 16), (16, 16), most, min(256, limit - 64)),
    }


def predict(
    engine: Any, found: Costs, load: Load, lengths: list[tuple[int, int]], arrivals: list[float]
) -> dict[str, Any]:
    """The simulator's figures for these requests on this engine."""
    size = engine.config.block_size
    prefix = list(range(load.prefix_len // size))
    requests = [Request(n, arrivals[n], i, o, prefix) for n, (i, o) in enumerate(lengths)]
    setup = Setup(found, engine.capacity.num_blocks, size, engine.config.max_num_seqs)
    trace = Trace(requests, size)
    return summary(outcome_of(trace, run_replicas(trace, Configuration(setup, 1, "round-robin"))), {})


def observe(
    engine: Any, load: Load, lengths: list[tuple[int, int]], arrivals: list[float], rng: random.Random, title: str
) -> dict[str, Any]:
    """The engine's figures for these requests."""
    prefix = random_prompt(rng, engine, load.prefix_len)
    work = [Work(prefix + random_prompt(rng, engine, i - load.prefix_len), o) for i, o in lengths]
    engine.reset_prefix_cache()
    run = serve.planned(work, arrivals)
    budget = TokenBudget(load.budget, SECONDS[engine.capacity.device])
    with token_budget(engine, budget), listening(engine, budget.observe), progress(engine, title, len(work)):
        serve.drive(run, engine, work)
    result = measured_summary(run, [50, 99], {})
    if result["errors"]:
        raise RuntimeError(result["errors"][0])
    return result


def compared(predicted: float | None, measured: float | None) -> str:
    """ "103, 100 (+3 %)"."""
    if predicted is None or measured is None:
        return "-"
    difference = f" ({100 * (predicted / measured - 1):+.0f} %)" if measured else ""
    return f"{figure(predicted)}, {figure(measured)}{difference}"
