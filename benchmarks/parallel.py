"""What it costs to divide a model among workers in processes, compared with one worker in this process."""

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.host import tiny_model
from benchmarks.report import console, figure, show_table, table_of

PROMPT_LEN = 128
OVERHEAD_SEQS, OVERHEAD_STEPS = (1, 32, 256), 64
WORKLOADS = {"1 request": 1, "32 requests": 32}


def measure(engine_of: Callable[..., Any], path: Path, workers: int, output_len: int, num_iters: int, results: dict):
    """Fills "divided" and "overhead".

    Args: engine_of: makes an engine for a path from options of EngineConfig.
    """
    variants: dict[str, dict[str, Any]] = {
        "one worker, eager": {"enforce_eager": True},
        f"{workers} tensor-parallel workers, eager": {"enforce_eager": True, "tensor_parallel_size": workers},
        f"{workers} stages, eager": {"enforce_eager": True, "pipeline_parallel_size": workers},
        "one worker, compiled": {"enforce_eager": False},
        f"{workers} stages, compiled": {"enforce_eager": False, "pipeline_parallel_size": workers},
    }
    measured: dict[str, dict[str, Any]] = {}
    results["divided"] = measured
    for name, options in variants.items():
        engine = engine_of(path, **options)
        try:
            if not options["enforce_eager"]:
                engine.executor.compile()
            run(engine, 2, 8)
            measured[name] = {
                workload: runs(engine, num_seqs, output_len, num_iters) for workload, num_seqs in WORKLOADS.items()
            }
        finally:
            engine.shutdown()
    config = engine.model_config
    least = 2 * 2 * (workers - 1) * config.hidden_size * 4  # every worker sends its share of two sums, twice
    results["least_tensor_parallel_bytes"], results["least_stage_bytes"] = least, (workers - 1) * config.hidden_size * 4
    table = table_of("output tok/s; bytes exchanged for each token and layer", ["", *WORKLOADS])
    for name, by_workload in measured.items():
        cells = [
            f"{figure(found['output_tokens_per_second'])}; {found['bytes_per_token'] / config.num_layers:,.0f}"
            for found in by_workload.values()
        ]
        table.add_row(name, *cells)
    show_table(table)
    console.print(
        f"least possible: {least:,} bytes with tensor parallelism, "
        f"{results['least_stage_bytes'] / config.num_layers:,.0f} with stages"
    )
    measure_overhead(engine_of, path, num_iters, results)


def measure_overhead(engine_of: Callable[..., Any], path: Path, num_iters: int, results: dict) -> None:
    """Milliseconds of a step of a model of one small layer, in this process and in a separate process. The two engines
    take turns, so that a machine whose speed drifts treats them alike."""
    with tiny_model(path) as tiny:
        options = {"enforce_eager": True, "max_num_seqs": max(OVERHEAD_SEQS)}
        engines = {
            "in this process": engine_of(tiny, **options),
            "in a process": engine_of(tiny, **options, distributed_executor_backend="mp"),
        }
        try:
            measured: dict[str, dict[str, float]] = {name: {} for name in engines}
            results["overhead"] = measured
            for num_seqs in OVERHEAD_SEQS:
                times: dict[str, list[float]] = {name: [] for name in engines}
                for _ in range(num_iters):
                    for name, engine in engines.items():
                        times[name] += run(engine, num_seqs, OVERHEAD_STEPS)
                for name, seconds in times.items():
                    measured[name][str(num_seqs)] = 1000 * statistics.median(seconds)
        finally:
            for engine in engines.values():
                engine.shutdown()
    table = table_of("ms of a step of a worker", ["sequences", *measured, "more"])
    for num_seqs in OVERHEAD_SEQS:
        here, there = (column[str(num_seqs)] for column in measured.values())
        table.add_row(str(num_seqs), f"{here:.2f}", f"{there:.2f}", f"{there - here:.2f}")
    show_table(table)


def run(engine: Any, num_seqs: int, output_len: int) -> list[float]:
    """Seconds of each step in which all sequences decode."""
    from nanopage import SamplingParams

    rng, seconds = random.Random(0), []
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    for i in range(num_seqs):
        token_ids = [rng.randrange(engine.model_config.vocab_size) for _ in range(PROMPT_LEN // 8)]
        engine.add_request(str(i), {"prompt_token_ids": token_ids}, params)
    while engine.has_unfinished_requests():
        started = time.perf_counter()
        engine.step()
        if engine.last_step.decode_tokens == num_seqs:
            seconds.append(time.perf_counter() - started)
    return seconds


def runs(engine: Any, num_seqs: int, output_len: int, num_iters: int) -> dict[str, Any]:
    """Medians of several runs of `num_seqs` requests at once: prompts of PROMPT_LEN tokens, outputs of `output_len`."""
    from nanopage import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    rng, rates, sent = random.Random(0), [], []
    for _ in range(num_iters):
        for i in range(num_seqs):
            token_ids = [rng.randrange(engine.model_config.vocab_size) for _ in range(PROMPT_LEN)]
            engine.add_request(str(i), {"prompt_token_ids": token_ids}, params)
        bytes_before, started = bytes_on_loopback(), time.perf_counter()
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.error is not None:
                    raise RuntimeError(output.error)
        rates.append(num_seqs * output_len / (time.perf_counter() - started))
        sent.append((bytes_on_loopback() - bytes_before) / (num_seqs * (PROMPT_LEN + output_len - 1)))
    return {
        "output_tokens_per_second": statistics.median(rates),
        "bytes_per_token": statistics.median(sent),
        "all_rates": rates,
    }


def bytes_on_loopback() -> int:
    """Bytes that this machine has sent to itself through TCP. Does not include messages between the engine and its
    workers."""
    return psutil.net_io_counters(pernic=True)["lo"].bytes_sent
