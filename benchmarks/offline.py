"""Latency and throughput of requests that all arrive at the start, alone or in turn with transformers."""

import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.checks import check_choice, check_engine, check_lengths, check_longest, find_model, refuse
from benchmarks.datasets import Dataset, Requests
from benchmarks.outputs import exit_unless, recorded
from benchmarks.peers import nanopage as nanopage_peer
from benchmarks.peers import transformers as transformers_peer
from benchmarks.peers import transformers_continuous
from benchmarks.peers.protocol import Engine, Run, measure
from benchmarks.progress import progress
from benchmarks.report import (
    console,
    describe,
    errors_by_name,
    left_out_if_it_fails,
    show_header,
    show_table,
    spread,
    table_of,
)

MODULES = "modules"  # nanopage with model_impl="transformers", as a peer of nanopage
# What it shares with nanopage. Prompts that repeat must not be hits for it alone.
SHARED = ("device", "enforce_eager", "load_format", "async_scheduling", "max_num_seqs", "num_gpu_blocks_override")


@dataclass
class Results:
    """Everything measured, in the form of the JSON file. `runs`: engine -> one Run for each iteration."""

    header: dict[str, str]
    setup_seconds: dict[str, float]
    runs: dict[str, list[Run]]
    bandwidth_gb_s: dict[str, float]
    weight_bytes: int
    kv_bytes_of_a_token: int
    failures: dict[str, str] = field(default_factory=dict)  # of peers
    prefix_cache_hit_tokens: int = 0
    utilization: list[dict[str, Any]] = field(default_factory=list)  # nanopage's Phases, for each iteration


def bench(
    command: str,
    data: Dataset,
    model: str | None,
    switches: dict[str, Any],
    num_iters: int,
    num_iters_warmup: int,
    seed: int,
    compare: str | None,
    json_file: Path | None,
    profile_file: Path | None,
    plot_file: Path | None = None,
) -> None:
    """Run a workload on an engine made with `switches`, options of EngineConfig, and print its table."""
    check_choice(compare, ["transformers", MODULES], "--compare")
    check_engine(switches)
    rng = random.Random(seed)

    started = time.perf_counter()
    from benchmarks import utilization
    from nanopage import LLM, EngineConfig
    from nanopage.device import resolve_device

    imported = time.perf_counter()
    path, config = find_model(model)
    if compare and path.suffix == ".gguf":
        refuse("transformers cannot load a .gguf file here: give --model a directory", "--compare")
    with errors_by_name():
        requests = data.requests(rng, path)
        lengths = requests.lengths
        check_lengths(lengths, config, requests.options)
        options = {"model": str(path), "max_num_seqs": max(256, len(lengths))} | switches
        device = resolve_device(EngineConfig(**options).device)
        if compare and device.type == "cuda":  # the peers need memory, too: take blocks for all requests and some more
            options["num_gpu_blocks_override"] = sum(-(-(i + o) // 16) for i, o in lengths) * 5 // 4 + 16
        # On a GPU, measure before the engine takes its memory. On a CPU, as late as possible, because its speed drifts.
        bandwidth = utilization.bandwidth(device) if device.type == "cuda" else {}
        resolved = time.perf_counter()
        llm = LLM(**options)
        llm.engine.executor.compile()
        check_longest(lengths, llm.engine.max_model_len, "the KV cache holds")
    loaded = time.perf_counter()
    bandwidth = bandwidth or utilization.bandwidth(device)
    recorder = utilization.StepRecorder(llm.engine, bandwidth)
    runners = {"nanopage": nanopage_peer.runner(llm)}
    results = Results(
        describe(llm.engine, f"{command}, {data.what}, seed {seed}", compare),
        {"import": round(imported - started, 3), "load and compile": round(loaded - resolved, 3)},
        {},
        bandwidth,
        recorder.weight_bytes,
        recorder.kv_bytes,
    )
    show_header(results.header)
    steps: list[utilization.Step] = []  # of nanopage
    with contextlib.ExitStack() as stop_peers, recorded(json_file, lambda: asdict(results)) as record:
        if compare:
            loaded = time.perf_counter()
            load = load_modules if compare == MODULES else load_peers
            runners |= load(llm, lengths, stop_peers, results.failures)
            results.setup_seconds[f"load {compare}"] = round(time.perf_counter() - loaded, 3)
        results.runs = {name: [] for name in runners}
        try:
            for iteration in range(-num_iters_warmup, num_iters):
                label = "warm-up" if iteration < 0 else f"{iteration + 1}/{num_iters}"
                take_turns(results, runners, requests, rng, llm.engine, label)
                phases = recorder.take()
                results.prefix_cache_hit_tokens += recorder.cached_tokens
                if iteration >= 0:
                    results.utilization.append(phases)
                    steps += recorder.taken
        finally:
            show(results, command)
    plotted = traced = True
    if plot_file is not None:
        from benchmarks import plots

        plotted = plots.throughput(steps, results.header, plot_file)
    if profile_file is not None:
        with errors_by_name():
            work = requests.work(rng, llm.engine)
            traced = utilization.write_trace(runners["nanopage"], work, profile_file)
    exit_unless(record.written, plotted, traced, not results.failures)


def take_turns(
    results: Results, runners: dict[str, Engine], requests: Requests, rng: random.Random, engine: Any, label: str
) -> None:
    """Run the same requests on every engine. A peer that fails is removed from `runners`.

    Args:
        engine: nanopage's LLMEngine.
        label: the label of the iteration; "warm-up" does not count.
    """
    work = requests.work(rng, engine)
    engine.reset_prefix_cache()  # the prompts of a file repeat
    for name, run in list(runners.items()):
        with errors_by_name() if name == "nanopage" else left_out_if_it_fails(name, results.failures):
            with progress(engine, f"{name} {label}", len(work)):
                result = measure(run, work)
            if label == "warm-up":
                results.setup_seconds.setdefault(f"warm-up {name}", round(result.seconds, 3))
            else:
                results.runs[name].append(result)
        if name in results.failures:
            del runners[name], results.runs[name]


def show(results: Results, command: str) -> None:
    """Print the results of the complete iterations."""
    from benchmarks import utilization

    complete = len(results.utilization)
    if complete:
        runs = {name: each[:complete] for name, each in results.runs.items()}
        report(runs, results.setup_seconds, results.prefix_cache_hit_tokens, command)
        utilization.show(results.utilization, results.bandwidth_gb_s)


def load_peers(
    llm, lengths: list[tuple[int, int]], stop_peers: contextlib.ExitStack, failures: dict[str, str]
) -> dict[str, Engine]:
    """transformers' `generate`, and on a GPU its continuous batching as well; `failures` says why one is missing."""
    import torch

    engine = llm.engine
    device, dtype = torch.device(engine.capacity.device), getattr(torch, engine.capacity.dtype)
    options = engine.model_path, dtype, device, engine.config.load_format

    def continuous() -> Engine:
        tokens = sum(max(i + o, transformers_continuous.PAGE_SIZE) for i, o in lengths)
        run, stop = transformers_continuous.runner(*options, kv_tokens=tokens)
        stop_peers.callback(stop)
        return run

    peers = {"transformers": lambda: transformers_peer.runner(*options)}
    if engine.capacity.device == "cuda":
        peers["transformers continuous"] = continuous
    engines = {}
    for name, load in peers.items():
        with left_out_if_it_fails(name, failures):
            engines[name] = load()
    return engines


def load_modules(
    llm, lengths: list[tuple[int, int]], stop_peers: contextlib.ExitStack, failures: dict[str, str]
) -> dict[str, Engine]:
    """nanopage with transformers' own modules, beside its own family. `failures` as in `load_peers`."""
    from nanopage import LLM

    options = {name: getattr(llm.engine.config, name) for name in SHARED} | {"dtype": llm.engine.capacity.dtype}
    with left_out_if_it_fails(MODULES, failures):
        theirs = LLM(str(llm.engine.model_path), model_impl="transformers", enable_prefix_caching=False, **options)
        stop_peers.callback(theirs.engine.shutdown)
        return {MODULES: nanopage_peer.runner(theirs)}
    return {}


def report(runs: dict[str, list[Run]], setup: dict[str, float], hits: int, command: str) -> None:
    """Print medians, with the lowest and highest run. The decode speed is the speed of one request."""
    title = f"{command}: median [lowest-highest] of {len(runs['nanopage'])}"
    peers = [name for name in runs if name != "nanopage"]
    ratio = "ratio, pair by pair" if len(peers) == 1 else "nanopage / {}, pair by pair"
    table = table_of(title, ["", *runs, *(ratio.format(name) for name in peers)])
    metrics: dict[str, Callable[[Run], float | None]] = {
        "time (s)": lambda run: run.seconds,
        "first token (ms)": lambda run: run.ttft and run.ttft * 1000,
        "decode tok/s": lambda run: run.decode_tok_s,
        "output tok/s": lambda run: run.output_tokens / run.seconds,
        "total tok/s": lambda run: run.total_tokens / run.seconds,
    }
    for title, metric in metrics.items():
        values = {engine: [metric(run) for run in results] for engine, results in runs.items()}
        cells = [spread(column) for column in values.values()]
        for name in peers:
            pairs = zip(values["nanopage"], values[name], strict=True)
            cells.append(spread([ours / theirs if ours and theirs else None for ours, theirs in pairs]))
        table.add_row(title, *cells)
    show_table(table)
    console.print("  ".join(f"{name} {value:.1f} s" for name, value in setup.items()), style="dim", highlight=False)
    if hits:
        console.print(f"The prefix cache served {hits} of the prompts' tokens, warm-up included.", style="yellow")
