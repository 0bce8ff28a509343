"""An engine, or a server, under requests that arrive in real time: latency, throughput and goodput, named as by `vllm
bench serve`.

A run of the engine is checked against Little's law, L = throughput x mean E2EL. L is the mean number of requests in the
system (arrived and not finished). It is counted at the end of every step and integrated over time, while the right side
comes from the times of the requests. server.py drives a server.
"""

import bisect
import contextlib
import math
import os
import random
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checks import MAX_SECONDS, check_choice, check_lengths, check_longest, find_model, refuse, shown
from benchmarks.datasets import Dataset, Requests
from benchmarks.metrics import METRICS, Run, Sample, Served, details, show, show_rates, summary
from benchmarks.outputs import exit_unless, recorded
from benchmarks.peers.nanopage import greedy
from benchmarks.peers.protocol import Work
from benchmarks.progress import progress
from benchmarks.report import console, describe, errors_by_name, show_header
from benchmarks.server import Server
from benchmarks.steps import listening
from benchmarks.view import recording, viewed
from nanopage.outputs import StepStats

GOODPUT_METRICS = ("ttft", "tpot", "e2el")
MAX_NUMBERS = 100  # in a list, because a picture has a part for each rate
MIN_BURSTINESS = 0.01  # far below it, gaps are smaller than the smallest positive float


def serve(
    model: str | None,
    switches: dict[str, Any],
    base_url: str | None,
    source: Dataset | Requests,
    what: str,
    rates: list[float],
    burstiness: float,
    max_concurrency: int | None,
    goodput: dict[str, float],
    shown: list[str],
    percentiles: list[float],
    num_warmups: int,
    seed: int,
    json_file: Path | None,
    save_detailed: bool,
    plot_file: Path | None,
    view: bool = False,
    record_file: Path | None = None,
) -> None:
    """Serve the requests at one rate after another, and print a table after each. At the end, print one of
    all rates.

    Args:
        switches: options of EngineConfig.
        base_url: the URL of the server to measure. None: an engine in this process.
        source: the data. If it is Requests, they come from a trace, and their arrivals replace `rates`.
        what: the description for the header.
        goodput: metric -> milliseconds.
        shown: the metrics of the table; the JSON file has all.
        num_warmups: the number of requests, all at once, before the first rate.
        view: show the live view in the terminal while the engine runs.
        record_file: gets a recording of all rates for the live view.
    """
    started = time.perf_counter()
    from nanopage import EngineConfig
    from nanopage.build import build_engine

    rng = random.Random(seed)
    imported = time.perf_counter()
    path, config = find_model(model)
    with errors_by_name():
        requests = source if isinstance(source, Requests) else source.requests(rng, path)
        check_lengths(requests.lengths, config, requests.options)
        resolved = time.perf_counter()
        what = f"serve, {what}, seed {seed}"
        target: Any
        if base_url is None:
            target = build_engine(EngineConfig(model=str(path), **switches))
            target.executor.compile()
            holder, header = "the KV cache holds", describe(target, what)
        else:
            target = Server(base_url, config)
            holder, header = "the server takes", target.describe(what)
        check_longest(requests.lengths, target.max_model_len, holder)
        loaded = time.perf_counter()
        setup = {"import": round(imported - started, 3), "load and compile": round(loaded - resolved, 3)}
    show_header(header)

    def drive_target(run: Run, work: list[Work], max_concurrency: int | None = None) -> None:
        if base_url is None:
            drive(run, target, work, max_concurrency)
        else:
            target.drive(run, work, max_concurrency)

    with errors_by_name():
        work = warm_up_work(requests, rng, target, num_warmups)
        warm_up = planned(work, [0.0] * len(work))
        drive_target(warm_up, work)
        setup["warm-up"] = round(warm_up.duration, 3)
    record: dict[str, Any] = {
        "header": header,
        "setup_seconds": setup,
        "burstiness": ("inf" if burstiness == math.inf else burstiness) if rates else None,
        "max_concurrency": max_concurrency,
        "goodput_ms": goodput or None,
        "runs": (results := []),
    }
    runs: list[Run] = []
    labels: list[float | str] = ["inf" if rate == math.inf else rate for rate in rates] or ["trace"]
    model_name = path.name if model is None else Path(model).name
    with recorded(json_file, lambda: record) as saved, recording(target, model_name, record_file):
        console.print("  ".join(f"{name} {value:.1f} s" for name, value in setup.items()), style="dim", highlight=False)
        for label in labels:
            arrivals = requests.arrivals or arrival_times(len(requests.lengths), float(label), burstiness, seed)
            work = requests.work(rng, target)
            if base_url is None:
                target.reset_prefix_cache()  # the prompts of a file repeat
            runs.append(run := planned(work, arrivals))
            title = f"rate {label:g}" if isinstance(label, float) else "trace" if label == "trace" else "all at once"
            try:
                # A server has no listeners that could report its steps.
                shown_live: contextlib.AbstractContextManager
                if base_url is not None:
                    shown_live = console.status(title)
                else:
                    shown_live = viewed(target, model_name) if view else progress(target, title, len(work))
                with errors_by_name(), shown_live:
                    drive_target(run, work, max_concurrency)
            finally:
                result = {"request_rate": label} | summary(run, percentiles, goodput, of_engine=base_url is None)
                results.append(result | (details(run) if save_detailed else {}))
                show(result, max_concurrency, shown, percentiles)
        if len(results) > 1:
            show_rates(results, shown, percentiles)
    plotted = True
    if plot_file is not None:
        from benchmarks import plots

        plotted = plots.serve(results, [run.samples for run in runs], percentiles, header, plot_file)
    exit_unless(saved.written, plotted, not any(result["failed"] for result in results))


def warm_up_work(requests: Requests, rng: random.Random, engine: Any, count: int) -> list[Work]:
    """Take `count` requests. They repeat if there are fewer."""
    work: list[Work] = []
    while len(work) < count:
        work += requests.work(rng, engine)
    return work[:count]


def planned(work: list[Work], arrivals: list[float]) -> Run:
    """A run that has not begun. `arrivals`: seconds after the start, not falling."""
    return Run([Served(arrival, len(w.prompt), w.output_len) for w, arrival in zip(work, arrivals, strict=True)])


def drive(
    run: Run,
    engine: Any,
    work: list[Work],
    max_concurrency: int | None = None,
    now: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Hand each request to the engine when it has arrived, and step until all are done. Fills `run` as it goes, so that
    an exception leaves what was measured.

    Args:
        max_concurrency: most requests in the engine at once; the others wait outside.
        now: the clock of the engine's RequestMetrics.
    """
    arrivals = [request.arrival for request in run.requests]
    limit = max_concurrency or len(work)
    submitted = departed = 0
    in_engine: set[str] = set()
    area = 0.0  # the integral of the number of requests in the system
    start = now()
    last = 0.0  # the time up to which the area is known

    def after_step(stats: StepStats) -> None:
        time_ = now() - start
        take_stats(run, stats, time_, bisect.bisect_right(arrivals, time_) - submitted)

    try:
        with listening(engine, after_step):
            while departed < len(work):
                while submitted < len(work) and len(in_engine) < limit and now() >= start + arrivals[submitted]:
                    try:
                        engine.add_request(str(submitted), work[submitted].prompt, greedy(work[submitted].output_len))
                        in_engine.add(str(submitted))
                    except ValueError as error:
                        run.requests[submitted].error = str(error)
                        departed += 1
                    submitted += 1
                run.max_in_engine = max(run.max_in_engine, len(in_engine))
                if not in_engine:
                    if submitted < len(work):
                        sleep(max(0.0, start + arrivals[submitted] - now()))
                    last = now() - start
                    continue
                outputs = engine.step()
                time_ = now() - start
                # Requests come during a step, and leave at its end.
                in_system = sum(bisect.bisect_right(arrivals, moment) - departed for moment in (last, time_))
                area += (time_ - last) * in_system / 2
                last = time_
                for output in outputs:
                    if output.finished:
                        take_output(run.requests[int(output.request_id)], output, start)
                        in_engine.remove(output.request_id)
                        departed += 1
    finally:
        run.duration = now() - start
        run.mean_in_system = area / run.duration if run.duration else 0.0


def take_output(served: Served, output: Any, start: float) -> None:
    """Record a request that has finished."""
    served.token_times = [t - start for t in output.metrics.token_times]
    if (count := len(output.outputs[0].token_ids)) != served.output_len:
        reason = output.outputs[0].finish_reason
        served.error = f"{count} of {served.output_len} tokens, finish_reason {reason!r}"


def take_stats(run: Run, stats: StepStats, time_: float, held_back: int) -> None:
    """Add the StepStats of a step. `held_back`: requests that have arrived and are not in the engine."""
    run.preemptions += stats.preempted
    run.cached_tokens += stats.cached_tokens
    run.computed_tokens += stats.prefill_tokens
    waiting = held_back + stats.waiting + stats.swapped
    run.samples.append(Sample(time_, waiting, stats.running, stats.used_blocks))


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Arrivals in seconds after the start. Gaps have a gamma distribution of mean 1 / rate and shape `burstiness` (1: a
    Poisson process, less: bursts, inf: regular), scaled so that the last arrival is at count / rate, as in vLLM."""
    if rate == math.inf:
        return [0.0] * count
    if burstiness == math.inf:
        gaps = np.ones(count)
    else:
        gaps = np.random.default_rng(seed).gamma(burstiness, 1 / burstiness, count)
        gaps = np.maximum(gaps, np.finfo(float).tiny)  # a small shape rounds some of them to 0, perhaps all
    times = np.cumsum(gaps)
    return (times * (count / rate / times[-1])).tolist()


def result_name(model: str, rates: list[float], max_concurrency: int | None) -> str:
    """The file name that `vllm bench serve --save-result` would use for a backend "nanopage"."""
    rate = ",".join(f"{rate:g}" for rate in rates) + "qps" if rates else "trace"
    most = f"-concurrency{max_concurrency}" if max_concurrency else ""
    return f"nanopage-{rate}{most}-{os.path.basename(os.path.abspath(model))}-{datetime.now():%Y%m%d-%H%M%S}.json"


def parse_rates(text: str) -> list[float]:
    """ "1,2.5,inf" -> [1.0, 2.5, inf]."""
    rates = parse_numbers(text, "--request-rate")
    for rate in rates:
        if not rate > 0:
            refuse(f"{rate:g} is not a positive number of requests a second, or inf", "--request-rate")
    return rates


def check_rates(rates: list[float], count: int) -> None:
    """Refuse rates at which `count` requests take too long to arrive."""
    for rate in rates:
        if count / rate > MAX_SECONDS:
            refuse(f"{count} requests at {rate:g} a second take {count / rate:.3g} s, over a week", "--request-rate")


def check_burstiness(burstiness: float, rates: list[float]) -> None:
    if not burstiness >= MIN_BURSTINESS:
        refuse(f"{burstiness:g} is not {MIN_BURSTINESS:g} or more", "--burstiness")
    if min(rates) == math.inf:
        refuse("needs a --request-rate below inf", "--burstiness")


def parse_percentiles(text: str) -> list[float]:
    percentiles = parse_numbers(text, "--metric-percentiles")
    for percentile in percentiles:
        if not 0 <= percentile <= 100:
            refuse(f"{percentile:g} is not from 0 to 100", "--metric-percentiles")
    return list(dict.fromkeys(abs(percentile) for percentile in percentiles))  # abs: -0 is 0


def parse_numbers(text: str, option: str) -> list[float]:
    parts = text.split(",")
    if len(parts) > MAX_NUMBERS:
        refuse(f"{len(parts)} numbers are more than {MAX_NUMBERS}", option)
    try:
        return [float(part) for part in parts]
    except ValueError:
        refuse(f"{shown(text)} is not a number, or several with commas between", option)


def parse_metrics(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        check_choice(name, list(METRICS), "--percentile-metrics")
    return names


def parse_goodput(pairs: list[str]) -> dict[str, float]:
    """["ttft:200", "tpot:50"] -> {"ttft": 200.0, "tpot": 50.0}."""
    limits: dict[str, float] = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        if name not in GOODPUT_METRICS:
            refuse(f"{shown(name)} is not one of: {', '.join(GOODPUT_METRICS)}", "--goodput")
        if name in limits:
            refuse(f"{name} is given twice", "--goodput")
        try:
            limits[name] = float(value)
        except ValueError:
            refuse(f"{shown(pair)}: write KEY:MS, such as {name}:200", "--goodput")
        if not 0 <= limits[name] < math.inf:
            refuse(f"{shown(pair)}: needs a number of milliseconds, such as {name}:200", "--goodput")
    return limits
