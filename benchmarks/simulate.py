"""`bench.py simulate`: runs a trace on simulated replicas (tables, JSON, a picture), or finds the replicas it needs."""

import contextlib
import time
from pathlib import Path
from typing import Any

from benchmarks.checks import check_choice, refuse, shown
from benchmarks.costs import Costs
from benchmarks.outputs import exit_unless, recorded
from benchmarks.report import console, errors_by_name, figure, show_header, show_table, table_of
from benchmarks.simulator import POLICIES, Configuration, Setup, TraceFile, load, simulate, summary
from benchmarks.traces import Request
from nanopage.server.routing import POLICIES as ROUTERS

DEFAULT_COSTS = Path(__file__).parent / "results" / "cpu-costs.json"
MAX_REPLICAS = 1024
COLUMNS = 6  # columns of a table that must fit a terminal of 80 columns
# Row of the table -> field of `summary`, and its factor.
ROWS = {
    "requests/s": ("request_throughput", 1),
    "output tok/s": ("output_throughput", 1),
    "TTFT mean (s)": ("mean_ttft_ms", 1e-3),
    "TTFT P50 (s)": ("p50_ttft_ms", 1e-3),
    "TTFT P99 (s)": ("p99_ttft_ms", 1e-3),
    "TPOT mean (ms)": ("mean_tpot_ms", 1),
    "TPOT P99 (ms)": ("p99_tpot_ms", 1),
    "goodput (requests/s)": ("request_goodput", 1),
    "good requests (%)": ("good_share", 100),
    "prefix hits (%)": ("prefix_cache_hit_rate", 100),
    "preemptions": ("preemptions", 1),
    "replicas busy (%)": ("busy_share", 100),
}


def run(
    file: TraceFile,
    setup: Setup,
    replicas: list[int],
    routers: list[str],
    margin: float,
    goodput: dict[str, float],
    target_share: float | None,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Simulate a trace on every number of replicas behind every router, and print a table for each number.

    Args:
        goodput: metric -> milliseconds.
        target_share: instead of `replicas`: find the fewest with which this share of requests meets `goodput`.
    """
    trace = load(file)
    check_pool(trace.requests, setup)
    span = trace.requests[-1].arrival
    times = f", {file.repeat} times" if file.repeat > 1 else ""
    times += f", {file.speed:g} times as fast" if file.speed != 1 else ""
    budget = setup.max_num_batched_tokens or "as the server's"
    header = {
        "bench": f"simulate, {file.path.name}{times}: {len(trace.requests):,} requests in {span:,.0f} s",
        "engine": f"{setup.num_blocks:,} blocks of {setup.block_size} tokens, at most {setup.max_num_seqs} sequences, "
        f"tokens a step: {budget}, {setup.policy}",
        "model": setup.costs.machine.get("model", "not known"),
        "device": setup.costs.machine.get("device", "not known"),
        "costs": f"measured with {setup.costs.machine.get('versions', 'versions that are not known')}",
    }
    show_header(header)
    for warning in beyond(trace.requests, setup):
        console.print(warning, style="yellow", highlight=False)
    results: list[dict[str, Any]] = []
    record: dict[str, Any] = {"header": header, "goodput_ms": goodput or None, "runs": results}
    started = time.perf_counter()
    with recorded(json_file, lambda: record | {"seconds": since(started)}) as saved, errors_by_name():
        if target_share is None:
            sweep(file, setup, replicas, routers, margin, goodput, results)
        else:
            record["target_share"], record["fewest"] = target_share, (fewest := {})
            for router in routers:
                fewest[router] = search(file, setup, router, margin, goodput, target_share, results)
    console.print(f"simulated in {since(started):,.1f} s", style="dim", highlight=False)
    plotted = True
    if plot_file is not None:
        from benchmarks import plots

        plotted = plots.simulate(results, header, plot_file)
    exit_unless(saved.written, plotted)


def since(started: float) -> float:
    return round(time.perf_counter() - started, 3)


def sweep(
    file: TraceFile,
    setup: Setup,
    replicas: list[int],
    routers: list[str],
    margin: float,
    goodput: dict[str, float],
    results: list[dict[str, Any]],
) -> None:
    """Simulate all combinations. A table is printed as soon as its last column is complete."""
    configurations = [Configuration(setup, count, router, margin) for count in replicas for router in routers]
    ended: dict[int, dict[str, Any]] = {}
    printed = 0
    with console.status("simulating") as status, contextlib.closing(simulate(file, configurations)) as outcomes:
        for index, outcome, seconds in outcomes:
            configuration = configurations[index]
            ended[index] = result_of(configuration, summary(outcome, goodput), seconds)
            results[:] = [ended[each] for each in sorted(ended)]
            status.update(f"simulating: {len(ended)} of {len(configurations)} done")
            while printed < len(replicas):
                indices = range(printed * len(routers), (printed + 1) * len(routers))
                if not all(each in ended for each in indices):
                    break
                show(f"replicas: {replicas[printed]}", [ended[each] for each in indices], routers)
                printed += 1


def search(
    file: TraceFile,
    setup: Setup,
    router: str,
    margin: float,
    goodput: dict[str, float],
    target_share: float,
    results: list[dict[str, Any]],
) -> int | None:
    """The fewest replicas with which `target_share` of the requests meets the goodput; None if MAX_REPLICAS fail.

    Doubles the number until it is enough, then halves the interval. Assumes that more replicas are never worse.
    """
    tried: dict[int, dict[str, Any]] = {}

    def enough(count: int) -> bool:
        configuration = Configuration(setup, count, router, margin)
        with console.status(f"simulating {count} replicas, {router}"):
            ((_, outcome, seconds),) = simulate(file, [configuration])
        tried[count] = result_of(configuration, summary(outcome, goodput), seconds)
        results.append(tried[count])
        return tried[count]["good_share"] >= target_share

    high = 1
    while not enough(high) and high < MAX_REPLICAS:
        high = min(2 * high, MAX_REPLICAS)
    found = high if tried[high]["good_share"] >= target_share else None
    low = high // 2
    while found is not None and found - low > 1:
        middle = (low + found) // 2
        low, found = (low, middle) if enough(middle) else (middle, found)
    nearest = sorted(sorted(tried, key=lambda count: abs(count - (found or MAX_REPLICAS)))[:COLUMNS])
    show(f"{router}, replicas:", [tried[count] for count in nearest], [str(count) for count in nearest])
    answer = f"{found} replica{'s' * (found > 1)}" if found else f"not even {MAX_REPLICAS} replicas"
    console.print(f"{100 * target_share:g} % of the requests are good with {answer}", highlight=False)
    return found


def result_of(configuration: Configuration, figures: dict[str, Any], seconds: float) -> dict[str, Any]:
    of = {"replicas": configuration.num_replicas, "router": configuration.router}
    if configuration.router == "prefix":
        of["margin"] = configuration.margin
    return of | {"policy": configuration.setup.policy} | figures | {"seconds": round(seconds, 3)}


def show(title: str, results: list[dict[str, Any]], columns: list[str]) -> None:
    table = table_of(title, ["", *columns])
    for row, (name, factor) in ROWS.items():
        values = [result[name] for result in results]
        if any(value is not None for value in values):
            table.add_row(row, *(figure(value if factor == 1 or value is None else value * factor) for value in values))
    show_table(table)


def check_pool(requests: list[Request], setup: Setup) -> None:
    """Refuse requests that no replica could ever run."""
    longest = max(requests, key=lambda request: request.num_tokens)
    if longest.num_tokens > setup.num_blocks * setup.block_size:
        message = f"request {longest.number + 1} has {longest.num_tokens:,} tokens, and a replica's KV cache holds"
        refuse(f"{message} {setup.num_blocks * setup.block_size:,}: give it more blocks", "--num-blocks")


def beyond(requests: list[Request], setup: Setup) -> list[str]:
    """Where the simulation goes beyond what was measured."""
    measured, warnings = setup.costs.measured, []
    longest = max(request.num_tokens for request in requests)
    if longest > measured.get("context", longest):
        warnings.append(f"costs were measured up to contexts of {measured['context']:,} tokens; here up to {longest:,}")
    if setup.max_num_seqs > measured.get("sequences", setup.max_num_seqs):
        warnings.append(
            f"costs were measured up to {measured['sequences']} sequences at once; here up to {setup.max_num_seqs}"
        )
    return warnings


def make_setup(
    costs: Costs,
    num_blocks: int | None,
    block_size: int | None,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    policy: str,
) -> Setup:
    """The engine of each replica: the options, and for options that are None the values of the measured engine.

    Raises: typer.BadParameter if there is no number of blocks.
    """
    check_choice(policy, list(POLICIES), "--policy")
    engine = costs.engine
    if (num_blocks := num_blocks or engine.get("num_blocks")) is None:
        refuse("the costs do not say how many blocks the engine had", "--num-blocks")
    return Setup(
        costs,
        num_blocks,
        block_size or engine.get("block_size", 16),
        max_num_seqs or engine.get("max_num_seqs", 256),
        max_num_batched_tokens,
        policy,
    )


def parse_replicas(text: str) -> list[int]:
    """ "1,8,64" -> [1, 8, 64]."""
    numbers = []
    for part in text.split(","):
        if not (part.isascii() and part.isdigit() and len(part) < 10 and 1 <= int(part) <= MAX_REPLICAS):
            refuse(f"{shown(part)} is not a number from 1 to {MAX_REPLICAS}", "--replicas")
        numbers.append(int(part))
    return list(dict.fromkeys(numbers))


def parse_routers(text: str) -> list[str]:
    """ "prefix,least" -> ["prefix", "least"]."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        check_choice(name, list(ROUTERS), "--router")
    return names
