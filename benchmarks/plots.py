"""The pictures of bench.py --plot."""

import io
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.metrics import METRICS, Sample, percentile_name
from benchmarks.outputs import write

if TYPE_CHECKING:  # because utilization imports torch
    from benchmarks.utilization import Step


def serve(
    results: list[dict[str, Any]],
    timelines: list[list[Sample]],
    percentiles: list[float],
    header: dict[str, str],
    file: Path,
) -> bool:
    """Latency against rate, throughput against rate, and each rate's queues over time."""
    figure = Figure(figsize=(12, 3.8 + 1.9 * len(results)), layout="constrained")
    grid = figure.add_gridspec(1 + len(results), 2, height_ratios=[2.0] + [1.0] * len(results))
    latency, throughput = (figure.add_subplot(grid[0, column]) for column in range(2))
    labels = [result["request_rate"] for result in results]
    numbers = all(isinstance(label, float) for label in labels)
    xs = labels if numbers else list(range(len(labels)))
    for color, (name, (short, _)) in enumerate(METRICS.items()):
        styles = ["-", "--", ":", "-."]
        for i, statistic in enumerate(["median", *map(percentile_name, percentiles)]):
            ys = [result[f"{statistic}_{name}_ms"] for result in results]
            style: dict[str, Any] = {"color": f"C{color}", "linestyle": styles[i % len(styles)], "marker": "o"}
            latency.plot(xs, [math.nan if y is None else y for y in ys], label=f"{short} {statistic}", **style)
    latency.set(title="latency", ylabel="ms", yscale="log")
    throughput.plot(xs, [r["output_throughput"] for r in results], "o-", label="output tok/s")
    throughput.set(title="throughput", ylabel="output tok/s", ylim=0)
    requests = throughput.twinx()
    requests.plot(xs, [r["request_throughput"] for r in results], "s--", color="C1", label="requests/s")
    if results[0]["request_goodput"] is not None:
        requests.plot(xs, [r["request_goodput"] for r in results], "^:", color="C2", label="goodput, requests/s")
    if numbers:
        requests.plot(xs, xs, color="gray", linewidth=0.8, label="offered, requests/s")
    requests.set(ylabel="requests/s", ylim=0)
    lines = throughput.get_lines() + requests.get_lines()
    throughput.legend(
        lines, [str(each.get_label()) for each in lines], fontsize="x-small", ncols=4, loc="lower center",
        bbox_to_anchor=(0.5, 1.1),
    )  # fmt: skip
    latency.legend(fontsize="x-small", ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.1))
    for axes in (latency, throughput):
        axes.set_xticks(xs, [f"{label:g}" if isinstance(label, float) else label for label in labels])
        axes.set_xlabel("request rate (requests/s)")
    for row, (label, samples) in enumerate(zip(labels, timelines, strict=True), 1):
        timeline(figure.add_subplot(grid[row, :]), label, samples)
    return save(figure, header, file)


def timeline(axes: Axes, label: float | str, samples: list[Sample]) -> None:
    times = [sample.time for sample in samples]
    axes.step(times, [sample.running for sample in samples], where="post", label="running")
    axes.step(times, [sample.waiting for sample in samples], where="post", label="waiting")
    title = f"{label:g} requests/s" if isinstance(label, float) else str(label)
    axes.set(title=title, xlabel="s", ylabel="requests", xlim=0, ylim=0)
    axes.legend(fontsize="small", loc="upper right")


def throughput(steps: "list[Step]", header: dict[str, str], file: Path) -> bool:
    """Output tokens a second of the decode steps against their batch: the median, and lowest to highest."""
    speeds: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        if step.only_decodes:
            speeds[step.stats.decode_tokens].append(step.stats.decode_tokens / step.seconds)
    batches = sorted(speeds)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(batches, [statistics.median(speeds[batch]) for batch in batches], "o-", label="median step")
    lowest, highest = ([bound(speeds[batch]) for batch in batches] for bound in (min, max))
    axes.fill_between(batches, lowest, highest, alpha=0.2, label="lowest to highest")
    axes.set(title="decode steps", xlabel="batch: sequences in the step", ylabel="output tok/s", ylim=0)
    axes.legend()
    return save(figure, header, file)


def simulate(results: list[dict[str, Any]], header: dict[str, str], file: Path) -> bool:
    """Latencies, throughput and prefix hits against the number of replicas, a line for each router."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    pictures = {
        "time to the first token (s)": ({"mean_ttft_ms": "-", "p99_ttft_ms": "--"}, 1e-3),
        "time per output token (ms)": ({"mean_tpot_ms": "-", "p99_tpot_ms": "--"}, 1),
        "requests/s": ({"request_throughput": "-", "request_goodput": "--"}, 1),
        "prefix hits (%)": ({"prefix_cache_hit_rate": "-"}, 100),
    }
    words = {"mean_ttft_ms": "mean", "p99_ttft_ms": "P99", "mean_tpot_ms": "mean", "p99_tpot_ms": "P99"}
    words |= {"request_throughput": "throughput", "request_goodput": "goodput", "prefix_cache_hit_rate": ""}
    routers = list(dict.fromkeys(result["router"] for result in results))
    replicas = sorted({result["replicas"] for result in results})
    for axes, (title, (lines, factor)) in zip(figure.subplots(2, 2).flat, pictures.items(), strict=True):
        for color, router in enumerate(routers):
            of_router = sorted((r for r in results if r["router"] == router), key=lambda result: result["replicas"])
            for name, style in lines.items():
                known = [(r["replicas"], factor * r[name]) for r in of_router if r[name] is not None]
                if known:
                    label = f"{router} {words[name]}".strip()
                    axes.plot(*zip(*known, strict=True), style, color=f"C{color}", marker="o", label=label)
        # Numbers of replicas are often powers of two.
        axes.set(title=title, xlabel="replicas", xscale="log")
        axes.set_xticks(replicas, map(str, replicas), minor=False)
        axes.minorticks_off()
        if "time" in title:
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        axes.legend(fontsize="x-small", ncols=len(routers), loc="lower center", bbox_to_anchor=(0.5, 1.1))
    return save(figure, header, file)


def save(figure: Figure, header: dict[str, str], file: Path) -> bool:
    """Returns whether the file could be written."""
    figure.suptitle(
        "\n".join(header[name] for name in ("bench", "model", "device")), fontsize="small", parse_math=False
    )
    picture = io.BytesIO()
    figure.savefig(picture, format=file.suffix[1:].lower(), dpi=110)
    return write(file, picture.getvalue())
