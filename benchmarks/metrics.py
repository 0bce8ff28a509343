"""The figures of `bench.py serve` and their table, named as by `vllm bench serve`.

For each request, in milliseconds:

    TTFT    first token - arrival
    E2EL    last token - arrival
    TPOT    (E2EL - TTFT) / (output tokens - 1)
    ITL     each time between two of its tokens

These are vLLM's definitions, except for the arrival. Here it is the scheduled arrival, so that all waiting counts: for
the current step, for a place under --max-concurrency, and for a late loop. vLLM's clock starts when a request is sent.
Through HTTP, a token comes when the chunk with its text comes.
"""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks.progress import hit_rate
from benchmarks.report import console, figure, plain, show_table, table_of

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
WIDTH = 50  # columns of the table


@dataclass
class Served:
    """The result of a request. Times are in seconds since the run began."""

    arrival: float
    input_len: int
    output_len: int
    token_times: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.arrival

    @property
    def e2el(self) -> float:
        return self.token_times[-1] - self.arrival

    @property
    def tpot(self) -> float | None:
        """None for an output of a single token."""
        return (self.e2el - self.ttft) / (self.output_len - 1) if self.output_len > 1 else None

    @property
    def itls(self) -> list[float]:
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


@dataclass
class Sample:
    """The queues at the end of a step, `time` seconds after the run began."""

    time: float
    waiting: int  # arrived and not running: held back, queued, or preempted
    running: int
    used_blocks: int


@dataclass
class Run:
    """The requests of one rate."""

    requests: list[Served]
    duration: float = 0.0
    mean_in_system: float = 0.0
    max_in_engine: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0  # of prompts
    samples: list[Sample] = field(default_factory=list)


def summary(run: Run, percentiles: list[float], goodput: dict[str, float], of_engine: bool = True) -> dict[str, Any]:
    """What serve.schema.json says of a run, without its rate, requests and timeline.

    Args: of_engine: whether the engine was in this process. The inner figures of a server are not known.
    """
    good = [request for request in run.requests if request.error is None and request.token_times]
    failed = sum(request.error is not None for request in run.requests)
    per_second = 1 / run.duration if run.duration else 0.0  # a run that was stopped before its first request took 0 s
    inputs, outputs = sum(r.input_len for r in good), sum(r.output_len for r in good)
    e2els = [r.e2el for r in good]
    meets = sum(all(1000 * (getattr(r, name) or 0) <= limit for name, limit in goodput.items()) for r in good)
    first = min((r.arrival for r in good), default=0.0)
    seconds = Counter(int(t - first) for r in good for t in r.token_times)
    result = {
        "duration": run.duration,
        "completed": len(good),
        "failed": failed,
        "unfinished": len(run.requests) - len(good) - failed,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) * per_second,
        "request_goodput": meets * per_second if goodput else None,
        "output_throughput": outputs * per_second,
        "total_token_throughput": (inputs + outputs) * per_second,
        "max_output_tokens_per_s": max(seconds.values(), default=0),
        "max_concurrent_requests": run.max_in_engine,
        "preemptions": run.preemptions if of_engine else None,
        "prefix_cache_hit_rate": hit_rate(run.cached_tokens, run.computed_tokens) if of_engine else None,
        "mean_requests_in_system": run.mean_in_system if of_engine else None,
        "throughput_times_mean_e2el": sum(e2els) * per_second,  # of n requests: n / duration * sum / n
        "errors": [f"request {i}: {r.error}" for i, r in enumerate(run.requests) if r.error is not None],
    }
    values = {
        "ttft": [r.ttft for r in good],
        "tpot": [r.tpot for r in good if r.tpot is not None],
        "itl": [itl for r in good for itl in r.itls],
        "e2el": e2els,
    }
    for name, times in values.items():
        ms = 1000 * np.array(times)
        for title, statistic in (("mean", np.mean), ("median", np.median), ("std", np.std)):
            result[f"{title}_{name}_ms"] = float(statistic(ms)) if times else None
        for p in percentiles:
            result[f"{percentile_name(p)}_{name}_ms"] = float(np.percentile(ms, p)) if times else None
    return result


def details(run: Run) -> dict[str, Any]:
    """The lists of --save-detailed."""
    return {
        "requests": [asdict(request) for request in run.requests],
        "timeline": {
            name: [getattr(sample, name) for sample in run.samples]
            for name in ("time", "waiting", "running", "used_blocks")
        },
    }


def show(result: dict[str, Any], max_concurrency: int | None, shown: list[str], percentiles: list[float]) -> None:
    """vLLM's table, and below it what the engine says and Little's law."""
    rate = result["request_rate"]
    rows: list[tuple[str, Any]] = [("Successful requests", result["completed"]), ("Failed requests", result["failed"])]
    rows += [("Unfinished requests", result["unfinished"])] if result["unfinished"] else []
    rows += [("Maximum request concurrency", max_concurrency)] if max_concurrency else []
    rows += [("Request rate configured (RPS)", rate)] if isinstance(rate, float) else []
    rows += [
        ("Benchmark duration (s)", result["duration"]),
        ("Total input tokens", result["total_input_tokens"]),
        ("Total generated tokens", result["total_output_tokens"]),
        ("Request throughput (req/s)", result["request_throughput"]),
    ]
    rows += [("Request goodput (req/s)", goodput)] if (goodput := result["request_goodput"]) is not None else []
    rows += [
        ("Output token throughput (tok/s)", result["output_throughput"]),
        ("Peak output token throughput (tok/s)", float(result["max_output_tokens_per_s"])),
        ("Peak concurrent requests", float(result["max_concurrent_requests"])),
        ("Total token throughput (tok/s)", result["total_token_throughput"]),
    ]
    lines = [" Serving Benchmark Result ".center(WIDTH, "="), *map(line, rows)]
    for name in shown:
        short, title = METRICS[name]
        lines.append(title.center(WIDTH, "-"))
        words = {"mean": "Mean", "median": "Median"} | {
            percentile_name(p): percentile_name(p).upper() for p in percentiles
        }
        lines += [line((f"{word} {short} (ms)", result[f"{key}_{name}_ms"])) for key, word in words.items()]
    expected, of_engine = result["throughput_times_mean_e2el"], result["preemptions"] is not None
    if of_engine:
        lines.append("Engine".center(WIDTH, "-"))
        lines.append(line(("Preemptions", result["preemptions"])))
        lines.append(line(("Prefix cache hit rate (%)", 100 * result["prefix_cache_hit_rate"])))
    if of_engine and not result["unfinished"]:  # the law holds for a system that becomes empty
        lines.append("Little's Law".center(WIDTH, "-"))
        lines.append(line(("Mean requests in system, counted", result["mean_requests_in_system"])))
        lines.append(line(("Request throughput x mean E2EL", expected)))
        lines.append(line(("Ratio", result["mean_requests_in_system"] / expected if expected else None)))
    lines.append("=" * WIDTH)
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    for error in result["errors"][:10]:
        console.print(f"[red]failed:[/red] {plain(error)}", highlight=False)


def show_rates(results: list[dict[str, Any]], shown: list[str], percentiles: list[float]) -> None:
    """A line for each rate: throughput, and the median and the last percentile of up to three metrics. With a fourth,
    only the medians fit a terminal of 80 columns."""
    last = [percentile_name(p) for p in percentiles[-1:] if len(shown) < len(METRICS)]
    columns = {"requests/s": "request_throughput", "goodput": "request_goodput", "output tok/s": "output_throughput"}
    for name in shown:
        columns[f"{METRICS[name][0]} median"] = f"median_{name}_ms"
        columns |= {f"{METRICS[name][0]} {p.upper()}": f"{p}_{name}_ms" for p in last}
    known = {title: key for title, key in columns.items() if any(result[key] is not None for result in results)}
    table = table_of("All rates (times in ms)", ["rate", *known])
    for result in results:
        rate = result["request_rate"]
        table.add_row(rate if rate == "inf" else f"{rate:g}", *(figure(result[key]) for key in known.values()))
    show_table(table)


def percentile_name(percentile: float) -> str:
    """99.0 -> "p99", 99.99999999 -> "p99.99999999": different percentiles have different names."""
    return f"p{percentile!r}".removesuffix(".0")


def line(row: tuple[str, Any]) -> str:
    name, value = row
    text = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name + ':':<40} {text:<10}".rstrip()
