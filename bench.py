"""Measure nanopage, alone or side by side with transformers on the same weights.

\b
    python bench.py latency      one batch: TTFT, decode tok/s
    python bench.py throughput   many requests at once: output tok/s
    python bench.py serve        requests that arrive over time: TTFT, goodput
    python bench.py simulate     a trace on many replicas, without a model
    python bench.py costs        what steps cost here, for simulate
    python bench.py memory       what forks save, swap against recomputation
    python bench.py embed        embeddings of many texts: texts per second
    python bench.py host         what a step costs Python
    python bench.py parallel     a model divided among processes
    python bench.py compare      the same work on vLLM, OpenVINO, llama.cpp
    python bench.py experts      a mixture of experts beside a dense model
    python bench.py kernels      attention's Triton kernels on a GPU
    python bench.py compile      what is compiled: time and size, kernels

\b
    python bench.py throughput --compare transformers --json result.json
    python bench.py serve --request-rate 1,2,4 --goodput ttft:500 tpot:50

In latency, throughput and serve, prompts are random token ids and never repeat, so that the prefix cache cannot
help, unless --prefix-len or a file (--dataset-name sharegpt or custom) makes prompts alike. Outputs have a fixed
length: the end of sequence is ignored. Loading, compiling and warm-up are timed apart.

With --compare, nanopage and transformers take turns, iteration by iteration, so that a machine whose speed drifts
treats both alike. On a GPU transformers runs twice: `generate`, compiled for a static cache, and continuous batching.
A peer that fails is named and left out.

Options and files are checked before a model is loaded. Ctrl-C ends a run early: what is complete is printed and, with
--json, written with "complete": false. A file that cannot be written is kept elsewhere.

Exit codes: 0 measured, 1 something failed, 2 wrong usage, 130 stopped by SIGINT, 143 by SIGTERM, 129 by SIGHUP.
"""

if __name__ == "__main__":
    import os
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # leave without a traceback during the imports
        signal.signal(signal.SIGINT, lambda signum, frame: os._exit(130))

import logging
import math
import random
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import offline
from benchmarks.checks import (
    MAX_BLOCKS,
    MAX_ITERATIONS,
    MAX_REQUESTS,
    MAX_SEED,
    MAX_TOKENS,
    MAX_VALIDATED,
    check_choice,
    check_engine,
    check_lengths,
    find_environments,
    find_model,
    find_path,
    refuse,
)
from benchmarks.datasets import Dataset, Requests, dataset, parse_range, read_trace
from benchmarks.machine import cpu_has, cpu_name, versions
from benchmarks.outputs import check_outputs, check_plot, exit_unless, recorded, stopped_by_signals
from benchmarks.report import console, describe, errors_by_name, plain, show_header, table_of
from nanopage.vllm.engine_args import takes_engine_options

app = typer.Typer(help=__doc__, no_args_is_help=True, rich_markup_mode=None, add_completion=False)

# Options of the engine in latency, throughput and serve.
ENGINE = "dtype", "device", "enforce_eager", "quantization", "load_format", "async_scheduling", "batch_invariant"
DIVISIBLE = Path(__file__).parent / "benchmarks" / "configs" / "SmolLM2-135M-8-heads"

ModelOption = Annotated[
    str | None, typer.Option(help="Directory, .gguf file or hub id [default: SmolLM2-135M-Instruct].")
]
QuantizationOption = Annotated[
    str | None, typer.Option(help="int8 or int4: bits of the weights [default: as they are].")
]
ItersOption = Annotated[int, typer.Option(min=1, max=MAX_ITERATIONS, help="Measured iterations; medians are reported.")]
WarmupOption = Annotated[int, typer.Option(min=0, max=MAX_ITERATIONS, help="Iterations to warm up; they do not count.")]
EnvironmentsOption = Annotated[
    Path | None, typer.Option(help="A virtual environment for each peer [default: ~/.cache/nanopage/peers].")
]
SeedOption = Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of the lengths and the prompts.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the results to this file as JSON.")]
COMPARE = "'transformers': run it on the same work, in turn. 'modules': nanopage with model_impl='transformers'."
CompareOption = Annotated[str | None, typer.Option(help=COMPARE)]
ProfileOption = Annotated[
    Path | None, typer.Option("--profile", help="Write a Chrome trace of one more iteration to this file.")
]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", help="Draw a picture into this file: .png, .svg, .pdf (needs matplotlib).")
]
LengthOption = Annotated[str, typer.Option(help="Tokens: a number, or LOW-HIGH drawn uniformly.")]
DatasetOption = Annotated[
    str,
    typer.Option(help="random: token ids; custom: a prompt a line, or *.jsonl; sharegpt: conversations as JSON."),
]
DatasetPathOption = Annotated[Path | None, typer.Option(help="The file of custom or sharegpt.")]
NumPromptsOption = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_REQUESTS, help="Requests [default: 32; all of a file or a trace]."),
]
InputLenOption = Annotated[
    str | None, typer.Option(help="Tokens of a random prompt: a number or LOW-HIGH [default: 32-256].")
]
OutputLenOption = Annotated[
    str | None, typer.Option(help="Tokens: a number or LOW-HIGH [default: what the file says, else 32-128].")
]
RandomInputLenOption = Annotated[str | None, typer.Option(help="vLLM's name of --input-len.")]
RandomOutputLenOption = Annotated[
    str | None, typer.Option(help="vLLM's name of --output-len, for --dataset-name random.")
]
PrefixLenOption = Annotated[
    int, typer.Option(min=0, max=MAX_TOKENS, help="Tokens common to all random prompts, before those of --input-len.")
]


def length_of_either(option: str, ours: str | None, vllms: str | None, dataset_name: str) -> str | None:
    """The length of `option`, or of its other name in vLLM, which is only for random prompts."""
    vllm_option = option.replace("--", "--random-")
    if vllms is None:
        return ours
    if ours is not None:
        refuse("mean the same: give one", [option, vllm_option])
    if dataset_name != "random":
        refuse(f"is for random prompts, not for --dataset-name {dataset_name}", vllm_option)
    parse_range(vllm_option, vllms)
    return vllms


def json_or_saved(
    json_file: Path | None, save_result: bool, folder: Path | None, name: str | None, default: str
) -> Path | None:
    """The file of --json, or of vLLM's --save-result, --result-dir and --result-filename.

    Args:
        default: the file's name if there is no --result-filename.
    """
    if not save_result:
        for option, value in (("--result-dir", folder), ("--result-filename", name)):
            if value is not None:
                refuse("needs --save-result", option)
        return json_file
    if json_file is not None:
        refuse("both name the file of the results: give one", ["--json", "--save-result"])
    folder = folder or Path()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"{folder}: {error.strerror}", "--result-dir")
    return folder / (name or default)


@app.command()
@takes_engine_options(*ENGINE)
def latency(
    model: ModelOption = None,
    input_len: LengthOption = "128",
    output_len: LengthOption = "128",
    batch_size: Annotated[int, typer.Option(min=1, max=MAX_REQUESTS, help="Requests that run together.")] = 1,
    *,
    switches: dict[str, Any],
    num_iters: ItersOption = 5,
    num_iters_warmup: WarmupOption = 1,
    seed: SeedOption = 0,
    compare: CompareOption = None,
    json_file: JsonOption = None,
    profile_file: ProfileOption = None,
) -> None:
    """Time one batch: first token, decode speed, end to end.

    \b
    python bench.py latency --input-len 512 --output-len 64 --json latency.json
    """
    check_outputs({"--json": json_file, "--profile": profile_file})
    data = dataset("random", None, batch_size, input_len, output_len, 0)
    offline.bench("latency", data, model, switches, num_iters, num_iters_warmup, seed, compare, json_file, profile_file)


@app.command()
@takes_engine_options(*ENGINE)
def throughput(
    model: ModelOption = None,
    num_prompts: NumPromptsOption = None,
    dataset_name: DatasetOption = "random",
    dataset_path: DatasetPathOption = None,
    input_len: InputLenOption = None,
    output_len: OutputLenOption = None,
    random_input_len: RandomInputLenOption = None,
    random_output_len: RandomOutputLenOption = None,
    prefix_len: PrefixLenOption = 0,
    *,
    switches: dict[str, Any],
    num_iters: ItersOption = 3,
    num_iters_warmup: WarmupOption = 1,
    seed: SeedOption = 0,
    compare: CompareOption = None,
    json_file: JsonOption = None,
    profile_file: ProfileOption = None,
    plot_file: PlotOption = None,
) -> None:
    """Time many requests that are queued at once: tokens/s.

    \b
    python bench.py throughput --num-prompts 64 --compare transformers
    python bench.py throughput --dataset-name custom --dataset-path prompts.txt
    """
    outputs = {"--json": json_file, "--profile": profile_file, "--plot": plot_file}
    check_outputs(outputs, {"--dataset-path": dataset_path})
    check_plot(plot_file)
    input_len = length_of_either("--input-len", input_len, random_input_len, dataset_name)
    output_len = length_of_either("--output-len", output_len, random_output_len, dataset_name)
    data = dataset(dataset_name, dataset_path, num_prompts, input_len, output_len, prefix_len)
    files = json_file, profile_file, plot_file
    offline.bench("throughput", data, model, switches, num_iters, num_iters_warmup, seed, compare, *files)


@app.command()
@takes_engine_options(*ENGINE)
def serve(
    model: ModelOption = None,
    num_prompts: NumPromptsOption = None,
    dataset_name: DatasetOption = "random",
    dataset_path: DatasetPathOption = None,
    input_len: InputLenOption = None,
    output_len: OutputLenOption = None,
    random_input_len: RandomInputLenOption = None,
    random_output_len: RandomOutputLenOption = None,
    prefix_len: PrefixLenOption = 0,
    request_rate: Annotated[
        str | None, typer.Option(help="Requests a second; several in turn: 1,2,4 [default: inf, all at once].")
    ] = None,
    burstiness: Annotated[
        float | None,
        typer.Option(help="Shape of the gamma-distributed gaps: 1 is Poisson, less comes in bursts [default: 1]."),
    ] = None,
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_REQUESTS, help="Most requests in the engine; the others wait, and their time counts."
        ),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(help="Measure the server of OpenAI's API at this URL instead of an engine in this process."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Arrivals and lengths: JSON lines of timestamp (s), input_length, output_length."),
    ] = None,
    goodput: Annotated[
        list[str] | None, typer.Option(metavar="KEY:MS...", help="Limits of ttft, tpot, e2el, as in ttft:200 tpot:50.")
    ] = None,
    more_goodput: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="KEY:MS")] = None,  # as vLLM has it
    percentile_metrics: Annotated[str, typer.Option(help="The metrics in the table.")] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, typer.Option(help="Their percentiles, as in 50,90,99.")] = "99",
    *,
    switches: dict[str, Any],
    num_warmups: Annotated[
        int, typer.Option(min=0, max=MAX_REQUESTS, help="Warm-up requests, all at once, that do not count.")
    ] = 8,
    seed: Annotated[
        int, typer.Option(min=0, max=MAX_SEED, help="Seed of the lengths, the prompts and the arrivals.")
    ] = 0,
    json_file: JsonOption = None,
    save_result: Annotated[
        bool, typer.Option("--save-result", help="As --json, into a file that is named after the rate, model and time.")
    ] = False,
    result_dir: Annotated[
        Path | None, typer.Option(help="Folder of --save-result; made if it is missing [default: the current one].")
    ] = None,
    result_filename: Annotated[str | None, typer.Option(help="Name of the file of --save-result.")] = None,
    save_detailed: Annotated[
        bool,
        typer.Option(
            "--save-detailed", help="With --json or --save-result: every request's times, every step's queues."
        ),
    ] = False,
    plot_file: PlotOption = None,
    view: Annotated[
        bool, typer.Option("--view", help="Show queues, requests and blocks while the engine runs.")
    ] = False,
    record_file: Annotated[
        Path | None, typer.Option("--record", help="Write a recording for the live view of nanopage serve: run.jsonl.")
    ] = None,
) -> None:
    """Serve requests that arrive over time: latency, goodput.

    The figures are those of vllm bench serve: TTFT, TPOT, ITL, E2EL, throughput and goodput. A request's clock starts
    when it is scheduled to arrive, so that all its waiting counts.

    \b
    python bench.py serve --request-rate 1,2,4 --num-prompts 60 \\
        --goodput ttft:500 tpot:50 --plot serve.png
    python bench.py serve --base-url http://127.0.0.1:8000
    python bench.py serve --view --record run.jsonl
    """
    from benchmarks import serve as serving
    from benchmarks.checks import check_server
    from nanopage.weights import hub

    if save_detailed and json_file is None and not save_result:
        refuse("needs --json or --save-result", "--save-detailed")
    if more_goodput and not goodput:
        refuse(f"{' '.join(more_goodput)}: limits come after --goodput", "KEY:MS")
    limits = serving.parse_goodput([*(goodput or []), *(more_goodput or [])])
    shown, percentiles = serving.parse_metrics(percentile_metrics), serving.parse_percentiles(metric_percentiles)
    rates = [] if trace is not None else serving.parse_rates("inf" if request_rate is None else request_rate)
    default = serving.result_name(hub.DEFAULT_MODEL if model is None else model, rates, max_concurrency)
    json_file = json_or_saved(json_file, save_result, result_dir, result_filename, default)
    for option in [name for name, given in (("--view", view), ("--record", record_file)) if given and base_url]:
        refuse("shows an engine in this process: a server has /view", option)
    if view and not sys.stderr.isatty():
        refuse("needs a terminal on stderr", "--view")
    outputs = {"--save-result" if save_result else "--json": json_file, "--plot": plot_file, "--record": record_file}
    check_outputs(outputs, {"--dataset-path": dataset_path, "--trace": trace})
    check_plot(plot_file)
    source: Dataset | Requests
    if trace is not None:
        given: dict[str, Any] = {"--input-len": input_len, "--output-len": output_len, "--dataset-path": dataset_path}
        given |= {"--random-input-len": random_input_len, "--random-output-len": random_output_len}
        given |= {"--request-rate": request_rate, "--burstiness": burstiness, "--prefix-len": prefix_len or None}
        given |= {"--dataset-name": None if dataset_name == "random" else dataset_name}
        for option in (option for option, value in given.items() if value is not None):
            refuse("--trace has arrivals and lengths of its own", option)
        source = read_trace(trace, num_prompts)
        what = f"{len(source.lengths)} requests of {trace.name}"
    else:
        input_len = length_of_either("--input-len", input_len, random_input_len, dataset_name)
        output_len = length_of_either("--output-len", output_len, random_output_len, dataset_name)
        source = dataset(dataset_name, dataset_path, num_prompts, input_len, output_len, prefix_len)
        serving.check_rates(rates, source.count)
        if burstiness is not None:
            serving.check_burstiness(burstiness, rates)
        what = f"{source.what}, request rate {', '.join(f'{rate:g}' for rate in rates)}"
        what += f", burstiness {burstiness or 1:g}" if min(rates) < math.inf else ""
    what += f", at most {max_concurrency} at once" if max_concurrency else ""
    if base_url is None:
        check_engine(switches)
    else:
        check_server(base_url, switches, plot_file)
    serving.serve(
        model,
        switches,
        base_url,
        source,
        what,
        rates,
        burstiness or 1.0,
        max_concurrency,
        limits,
        shown,
        percentiles,
        num_warmups,
        seed,
        json_file,
        save_detailed,
        plot_file,
        view,
        record_file,
    )


@app.command()
def simulate(
    trace: Annotated[Path, typer.Option(help="Azure's *.csv or Mooncake's *.jsonl: arrivals, lengths, prefixes.")],
    replicas: Annotated[str | None, typer.Option(help="Replicas; several in turn: 1,8,64 [default: 1].")] = None,
    router: Annotated[str, typer.Option(help="prefix, least or round-robin, or several.")] = "prefix,least,round-robin",
    margin: Annotated[
        float | None,
        typer.Option(help="Outstanding tokens that a known token makes up for, with the router prefix [default: 1]."),
    ] = None,
    policy: Annotated[
        str, typer.Option(help="Who runs first in a replica: fcfs, shortest-prompt, shortest-output.")
    ] = "fcfs",
    goodput: Annotated[
        list[str] | None, typer.Option(metavar="KEY:MS...", help="Limits of ttft, tpot, e2el, as in ttft:200 tpot:50.")
    ] = None,
    more_goodput: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="KEY:MS")] = None,  # as in serve
    target_share: Annotated[
        float | None,
        typer.Option(help="Find the fewest replicas of which this share of requests, as in 0.95, meets --goodput."),
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, max=MAX_REQUESTS, help="The first so many requests [default: all].")
    ] = None,
    speed: Annotated[float, typer.Option(help="How many times as fast requests arrive.")] = 1.0,
    repeat: Annotated[int, typer.Option(min=1, max=MAX_REQUESTS, help="How many times the trace is played.")] = 1,
    costs_file: Annotated[
        Path | None,
        typer.Option("--costs", help="A file of bench.py costs --json [default: the one of benchmarks/results]."),
    ] = None,
    num_blocks: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_BLOCKS, help="KV cache of a replica [default: of the measured engine]."),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, max=MAX_TOKENS, help="Tokens of a block [default: as measured].")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, max=MAX_BLOCKS, help="Sequences that run at once [default: as measured].")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_TOKENS, help="Tokens in a step [default: follows its time, as in the server]."),
    ] = None,
    json_file: JsonOption = None,
    plot_file: PlotOption = None,
) -> None:
    """Simulate a trace on replicas of the engine: TTFT, goodput.

    The scheduler and the block manager are the engine's; the time of a step comes from costs that bench.py costs has
    measured. No model is loaded.

    \b
    python bench.py simulate --trace benchmarks/made_up_trace.jsonl \\
        --replicas 1,8 --goodput ttft:2000 tpot:100
    """
    from benchmarks import simulate as simulation
    from benchmarks.checks import MAX_SECONDS
    from benchmarks.costs import read_costs
    from benchmarks.serve import parse_goodput
    from benchmarks.simulator import TraceFile
    from nanopage.server.routing import MARGIN

    if more_goodput and not goodput:
        refuse(f"{' '.join(more_goodput)}: limits come after --goodput", "KEY:MS")
    limits = parse_goodput([*(goodput or []), *(more_goodput or [])])
    counts, routers = simulation.parse_replicas(replicas or "1"), simulation.parse_routers(router)
    if margin is not None and "prefix" not in routers:
        refuse("is for the router prefix", "--margin")
    if margin is not None and not 0 <= margin < math.inf:
        refuse(f"{margin:g} is not a number from 0 on", "--margin")
    if target_share is not None:
        if not 0 < target_share <= 1:
            refuse(f"{target_share:g} is not a share, above 0 and at most 1", "--target-share")
        if not limits:
            refuse("needs limits: --goodput", "--target-share")
        if replicas is not None:
            refuse("searches for the number of replicas: give one of both", ["--target-share", "--replicas"])
    if not 1 / MAX_SECONDS <= speed < math.inf:
        refuse(f"{speed:g} is not a positive number", "--speed")
    check_outputs({"--json": json_file, "--plot": plot_file}, {"--trace": trace, "--costs": costs_file})
    check_plot(plot_file)
    if costs_file is None and not simulation.DEFAULT_COSTS.is_file():
        refuse("no costs have been measured: python bench.py costs --json costs.json writes them", "--costs")
    costs_read = read_costs(costs_file or simulation.DEFAULT_COSTS)
    setup = simulation.make_setup(costs_read, num_blocks, block_size, max_num_seqs, max_num_batched_tokens, policy)
    file = TraceFile(trace, num_prompts, speed, repeat)
    simulation.run(
        file,
        setup,
        counts,
        routers,
        MARGIN if margin is None else margin,
        limits,
        target_share,
        json_file,
        plot_file,
    )


@app.command()
@takes_engine_options("dtype", "device", "enforce_eager", "quantization", "load_format")
def costs(
    model: ModelOption = None,
    *,
    switches: dict[str, Any],
    validate: Annotated[
        bool, typer.Option("--validate", help="Also serve three workloads at three rates, and simulate them.")
    ] = False,
    costs_file: Annotated[
        Path | None, typer.Option("--costs", help="With --validate: do not measure, use this file's costs.")
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, max=MAX_VALIDATED, help="Requests of each run of --validate [default: 40].")
    ] = None,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Measure what steps cost on this machine, for simulate.

    Runs batches of all sizes without async scheduling, and fits a few terms to the times of their steps.

    \b
    python bench.py costs --json costs.json --validate
    """
    from benchmarks import cost_runs
    from benchmarks.costs import read_costs

    if not validate:
        for option, value in (("--costs", costs_file), ("--num-prompts", num_prompts)):
            if value is not None:
                refuse("needs --validate", option)
    check_outputs({"--json": json_file}, {"--costs": costs_file})
    switches["async_scheduling"] = False
    check_engine(switches)
    given = None if costs_file is None else read_costs(costs_file)
    cost_runs.costs(model, switches, given, validate, num_prompts or 40, seed, json_file)


@app.command()
@takes_engine_options("dtype", "device", "enforce_eager")
def lora(
    model: ModelOption = None,
    rank: Annotated[int, typer.Option(min=1, max=512, help="Rank of the random adapters.")] = 16,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of each output.")] = 64,
    num_prompts: Annotated[int, typer.Option(min=1, max=MAX_REQUESTS, help="Requests at once.")] = 32,
    *,
    switches: dict[str, Any],
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Measure a batch with LoRA adapters, and without.

    Measures throughput with 0 (no enable_lora), 1, 8 and 32 random adapters, their memory, and the time to load one.

    \b
    python bench.py lora --rank 8
    """
    import tempfile

    from benchmarks import adapters as benchmark

    check_outputs({"--json": json_file})
    check_engine(switches)
    path, config = find_model(model)
    check_lengths([(input_len, output_len)] * num_prompts, config, ["--input-len", "--output-len"])

    def engine(**options):
        from nanopage import EngineConfig
        from nanopage.build import build_engine

        with errors_by_name():
            made = build_engine(EngineConfig(model=str(path), **switches | options))
            made.executor.compile()
            return made

    header = describe(engine(), f"LoRA, rank {rank}, seed {seed}")
    show_header(header)
    results: dict[str, Any] = {"header": header}
    with (
        recorded(json_file, lambda: results) as record,
        errors_by_name(),
        tempfile.TemporaryDirectory() as directory,
    ):
        counts, lengths, rng = [0, 1, 8, 32], (input_len, output_len), random.Random(seed)
        benchmark.measure(engine, Path(directory), counts, rank, num_prompts, lengths, rng, results)
        for row in results["throughput"]:
            memory = f"; slots {row['slots_mib']:.1f} MiB, one loaded in {row['load_seconds'] * 1000:.0f} ms"
            speed = f"{row['adapters']:3} adapters: {row['output_tokens_per_second']:,.1f} output tok/s"
            console.print(speed + (memory if row["adapters"] else " (enable_lora off)"), highlight=False)
    exit_unless(record.written)


@app.command()
@takes_engine_options("dtype", "device", "enforce_eager")
def speculate(
    model: ModelOption = None,
    draft: Annotated[str | None, typer.Option(metavar="MODEL", help="A draft model, instead of n-grams.")] = None,
    num_speculative_tokens: Annotated[int, typer.Option(min=1, max=64, help="Most tokens of a draft.")] = 5,
    batch_sizes: Annotated[str, typer.Option(help="Requests at once, separated by commas.")] = "1,8",
    output_len: Annotated[int, typer.Option(min=2, max=4096, help="Tokens of each output.")] = 128,
    num_iters: Annotated[int, typer.Option(min=1, max=1000, help="Measured rounds; medians are reported.")] = 3,
    compare: Annotated[
        str | None,
        typer.Option(metavar="PEERS", help="Measure the greedy tasks on vllm, llamacpp, too."),
    ] = None,
    environments: EnvironmentsOption = None,
    *,
    switches: dict[str, Any],
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Measure speculative decoding: decodes with drafts and without.

    On four tasks: summarizing, editing code, answering questions about a text, free chat; greedy and sampled. Peers of
    --compare look their drafts up in the context, too; the first lines of their files in benchmarks/peers say how to
    install them.

    \b
    python bench.py speculate --batch-sizes 1,8
    """
    from benchmarks import speculation as benchmark
    from benchmarks.compare import Setup, python_of_engines
    from nanopage.cpu.threads import default_threads

    check_outputs({"--json": json_file})
    names = [] if compare is None else list(dict.fromkeys(compare.split(",")))
    for name in names:
        check_choice(name, list(benchmark.PEERS), "--compare")
    if environments is not None and compare is None:
        refuse("is for --compare", "--environments")
    home = find_environments(environments)
    pythons = python_of_engines(names, home, "cpu", None, False, False, "--compare")
    check_engine(switches)
    sizes = parse_sizes(batch_sizes)
    path, config = find_model(model)
    check_lengths([(benchmark.CHARACTERS // 2, output_len)], config, ["--output-len", "--output-len"])
    speculation: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": num_speculative_tokens}
    if draft is not None:
        speculation |= {"method": "draft_model", "model": draft}

    def engine(**options):
        from nanopage import EngineConfig
        from nanopage.build import build_engine

        with errors_by_name():
            made = build_engine(EngineConfig(model=str(path), **switches | options))
            made.executor.compile()
            return made

    described = engine()
    if names and (described.capacity.device, described.capacity.dtype) not in (("cpu", "bfloat16"), ("cpu", "float32")):
        refuse(f"peers do not run in {described.capacity.dtype} on {described.capacity.device}", "--compare")
    header = describe(described, f"drafts: {speculation}, seed {seed}")
    show_header(header)
    results: dict[str, Any] = {"header": header}
    with recorded(json_file, lambda: results) as record, errors_by_name():
        benchmark.measure(engine, speculation, sizes, output_len, num_iters, seed, results)
        columns = ["task", "batch", "temperature", "tok/s", "with drafts", "ratio", "accepted", "same"]
        table = table_of("decode speed", columns)
        for row in results["tasks"]:
            share = f"{row['accepted'] / row['drafted']:.0%} of {row['drafted']:,}" if row["drafted"] else "-"
            speeds = f"{row['tokens_per_second']:.1f}", f"{row['with_drafts']:.1f}", f"{row['ratio']:.2f}"
            same = "yes" if row["same_output"] else "no"
            table.add_row(row["task"], str(row["batch_size"]), f"{row['temperature']:g}", *speeds, share, same)
        console.print(table)
        worst = min(row["ratio"] for row in results["tasks"])
        console.print(f"worst ratio {worst:.2f}", highlight=False)
        if names:
            peers = Setup(path, config, pythons, "cpu", None, False, default_threads(), warmup=0, busy=0)
            work = benchmark.work_of(described, sizes, output_len, seed)
            benchmark.compare(peers, described.capacity.dtype, num_speculative_tokens, work, num_iters, results)
        for name, rows in results.get("peers", {}).items():
            table = table_of(f"{name}: {results['header'][name]}, greedy", columns[:2] + columns[3:6])
            for row in rows:
                speeds = f"{row['tokens_per_second']:.1f}", f"{row['with_drafts']:.1f}", f"{row['ratio']:.2f}"
                table.add_row(row["task"], str(row["batch_size"]), *speeds)
            console.print(table)
        failures = results.get("failures", {})
        for name, message in failures.items():
            console.print(f"[red]error:[/red] {name}: {plain(message)}", highlight=False)
    exit_unless(record.written, not failures)


def parse_sizes(text: str) -> list[int]:
    """The numbers of --batch-sizes. Exit code 2 for anything else."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 1 <= int(part) <= 256 for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list of numbers from 1 to 256", param_hint="--batch-sizes")
    return [int(part) for part in parts]


@app.command()
@takes_engine_options("dtype", "device", "enforce_eager")
def structured(
    model: ModelOption = None,
    schemas: Annotated[Path | None, typer.Option(help="A directory with JSON schemas, one in each .json file.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, max=4096, help="Most tokens of the output for a schema.")] = 160,
    num_requests: Annotated[int, typer.Option(min=1, max=256, help="Requests in a step.")] = 32,
    num_steps: Annotated[int, typer.Option(min=8, max=1000, help="Decode steps of each measurement.")] = 64,
    *,
    switches: dict[str, Any],
    json_file: JsonOption = None,
) -> None:
    """Measure structured output: schemas, masks and steps.

    \b
    python bench.py structured --schemas some/directory
    """
    from benchmarks import structured as benchmark

    check_outputs({"--json": json_file})
    if schemas is not None and not (files := sorted(schemas.glob("*.json"))):
        raise typer.BadParameter(f"{schemas} has no .json file", param_hint="--schemas")
    check_engine(switches)
    path, _ = find_model(model)
    with errors_by_name():
        from nanopage import EngineConfig
        from nanopage.build import build_engine
        from nanopage.engine.engine import LLMEngine

        engine = build_engine(EngineConfig(model=str(path), max_num_seqs=max(num_requests, 32), **switches))
        assert isinstance(engine, LLMEngine)
        engine.executor.compile()
    header = describe(engine, "structured output")
    show_header(header)
    results: dict[str, Any] = {"header": header}
    with recorded(json_file, lambda: results) as record, errors_by_name():
        if schemas is not None:
            compiled = benchmark.compile_all(engine, files, results)
            console.print_json(data=results["schemas"])
        text = '{"name": "Ada Lovelace", "age": 36, "tags": ["red", "blue"]}'
        results["seconds_for_a_mask"] = benchmark.time_masks(engine, benchmark.PERSON, text)
        console.print(f"a mask takes {results['seconds_for_a_mask'] * 1e6:.0f} us", highlight=False)
        benchmark.time_steps(engine, num_requests, [0, 1, num_requests], num_steps, results)
        for row in results["steps"]:
            console.print(
                f"a step with {row['constrained']:3} of {row['requests']} requests constrained: "
                f"{row['seconds'] * 1000:.2f} ms",
                highlight=False,
            )
        if schemas is not None:
            benchmark.generate_all(engine, compiled, max_tokens, results)
            console.print_json(data=results["outputs"])
    exit_unless(record.written)


@app.command()
@takes_engine_options("dtype", "device")
def embed(
    model: Annotated[str | None, typer.Option(help="Directory or hub id of a model that makes embeddings.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, max=MAX_REQUESTS, help="Texts.")] = 1000,
    words: Annotated[str, typer.Option(help="Words of a text: a number, or LOW-HIGH drawn uniformly.")] = "4-100",
    *,
    switches: dict[str, Any],
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, max=MAX_TOKENS, help="Most tokens of a batch [default: the engine's].")
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help="sentence-transformers, transformers or llamacpp, on the same texts in turn.")
    ] = None,
    iters: ItersOption = 3,
    warmup: WarmupOption = 1,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Measure embeddings of texts of mixed lengths.

    \b
    python bench.py embed --model DIR --compare sentence-transformers
    """
    from benchmarks import embeddings as benchmark

    check_outputs({"--json": json_file})
    check_choice(compare, list(benchmark.PEERS), "--compare")
    if model is None:
        raise typer.BadParameter("give a model that makes embeddings", param_hint="--model")
    lengths = parse_range("--words", words)
    check_engine(switches)
    path = find_path(model)
    with errors_by_name():
        from nanopage import LLM

        llm = LLM(str(path), **switches, max_num_batched_tokens=max_num_batched_tokens)
        engine = llm.engine
        pooling = engine.model_config.pooling
        if pooling is None or pooling.task != "embed":
            raise ValueError(f"{engine.model_path.name} makes no embeddings")
        if compare in ("transformers", "llamacpp") and not (pooling.pooling_type == "MEAN" and pooling.normalize):
            raise ValueError(f"--compare {compare} averages and normalizes, and this model does not")
        texts = benchmark.make_texts(llm.get_tokenizer(), num_prompts, lengths, seed)
        engines = {"nanopage": lambda texts: benchmark.embed_all(llm, texts)}
        if compare is not None:
            engines[compare] = benchmark.make_peer(compare, llm)
    num_tokens = benchmark.count_tokens(llm, texts)
    header = benchmark.describe_run(engine, compare, num_prompts, num_tokens)
    show_header(header)
    results: dict[str, Any] = {"header": header, "tokens": num_tokens}
    with recorded(json_file, lambda: results) as record, errors_by_name():
        results["engines"] = benchmark.measure(engines, texts, iters, warmup)
        for name, row in results["engines"].items():
            console.print(
                f"{name}: {row['texts_per_second']:.1f} texts/s, "
                f"{row['texts_per_second'] * num_tokens / num_prompts:,.0f} tokens/s; largest difference "
                f"{row['largest_difference']:.1e}",
                highlight=False,
            )
    exit_unless(record.written)


@app.command()
@takes_engine_options("dtype", "device", "enforce_eager", "load_format")
def memory(
    model: ModelOption = None,
    input_len: LengthOption = "32-512",
    output_len: LengthOption = "32-256",
    num_prompts: Annotated[int, typer.Option(min=1, max=MAX_REQUESTS, help="Requests of the waste trace.")] = 500,
    *,
    switches: dict[str, Any],
    num_iters: ItersOption = 3,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Measure the memory manager: forks, preemption, waste.

    Parallel sampling, preemption by swap and by recomputation, and slots that are never filled. The first two have
    lengths of their own. Preemption runs in float32, so that its outputs can be compared exactly.

    \b
    python bench.py memory --num-prompts 200
    """
    from benchmarks import memory as benchmark

    check_outputs({"--json": json_file})
    inputs, outputs = parse_range("--input-len", input_len), parse_range("--output-len", output_len)
    check_engine(switches)
    path, config = find_model(model)
    check_lengths([(inputs[1], outputs[1])] * num_prompts, config, ["--input-len", "--output-len"])
    check_lengths([benchmark.FORK_LENGTHS], config, "--model")
    rng = random.Random(seed)

    def engine(**options):
        from nanopage import EngineConfig
        from nanopage.build import build_engine

        with errors_by_name():
            made = build_engine(EngineConfig(model=str(path), **switches | options))
            made.executor.compile()
            return made

    alone = engine(enable_prefix_caching=False)
    if alone.capacity.windows != (None,):
        refuse(
            "its layers have windows, behind which blocks are given back: slots that are never filled cannot be "
            "counted",
            "--model",
        )
    header = describe(alone, f"memory, seed {seed}")
    show_header(header)
    results: dict[str, Any] = {"header": header}
    with recorded(json_file, lambda: results) as record, errors_by_name():
        benchmark.measure_forks(alone, rng, num_iters, results)
        benchmark.measure_preemption(engine, rng, num_iters, results)
        benchmark.measure_waste(
            engine(max_num_seqs=256, enable_prefix_caching=False), rng, num_prompts, inputs, outputs, results
        )
    exit_unless(record.written)


@app.command()
@takes_engine_options("device")
def host(
    model: ModelOption = None,
    num_seqs: Annotated[int, typer.Option(min=1, max=MAX_REQUESTS, help="Sequences that decode together.")] = 256,
    *,
    switches: dict[str, Any],
    num_iters: ItersOption = 3,
    json_file: JsonOption = None,
) -> None:
    """Time the host's share of a step: the time in Python.

    This share limits small models on a GPU. A model of one small layer, with the vocabulary and tokenizer of --model,
    decodes. The table shows the host's work in a step: scheduling, messages, inputs, results, text.

    \b
    python bench.py host --num-seqs 256
    """
    from benchmarks import host as benchmark

    check_outputs({"--json": json_file})
    check_engine(switches)
    path, config = find_model(model)
    if path.suffix == ".gguf":
        refuse(f"{path.name}: its tokenizer is needed as a file of its own; give a directory", "--model")
    check_lengths([(benchmark.PROMPT_LEN, benchmark.NUM_STEPS)], config, "--model")

    def engine(path: Path):
        from nanopage import EngineConfig
        from nanopage.build import build_engine

        options: dict[str, Any] = {"max_num_seqs": num_seqs, "max_num_batched_tokens": max(8192, num_seqs)}
        options |= {"max_model_len": 128, "load_format": "dummy", "dtype": "float32"} | switches
        with errors_by_name():
            made = build_engine(EngineConfig(model=str(path), enforce_eager=True, **options))
        results["header"] = describe(made, f"host, {num_seqs} sequences")
        show_header(results["header"])
        return made

    results: dict[str, Any] = {}
    with recorded(json_file, lambda: results) as record, errors_by_name():
        benchmark.measure(engine, path, num_seqs, num_iters, results)
    exit_unless(record.written)


@app.command()
@takes_engine_options("device")
def parallel(
    model: ModelOption = None,
    workers: Annotated[int, typer.Option(min=2, max=64, help="How many share the model.")] = 2,
    output_len: Annotated[int, typer.Option(min=2, max=MAX_TOKENS, help="Tokens.")] = 64,
    *,
    switches: dict[str, Any],
    num_iters: ItersOption = 3,
    json_file: JsonOption = None,
) -> None:
    """Compare workers in processes with one in this process.

    First, the speed of a model with random weights, with one worker, with tensor parallelism and in stages, and the
    bytes that workers exchange. Then, for a model of one small layer, the extra cost of a step in a worker process.
    Without --model: SmolLM2-135M's sizes with 8 heads, which 2, 4 and 8 divide.

    \b
    python bench.py parallel --workers 2
    """
    from benchmarks import parallel as benchmark
    from nanopage.distributed.division import divide, layers_of_stage

    check_outputs({"--json": json_file})
    check_engine(switches)
    path, config = find_model(str(DIVISIBLE) if model is None else model)
    check_lengths([(benchmark.PROMPT_LEN, output_len)], config, "--model")
    try:
        divide(config, workers), layers_of_stage(config, 0, workers)
    except ValueError as error:
        refuse(str(error), "--workers")

    def engine_of(path: Path, **options: Any):
        from nanopage import EngineConfig
        from nanopage.build import build_engine

        options |= {"max_model_len": 512, "load_format": "dummy", "dtype": "float32"} | switches
        with errors_by_name():
            made = build_engine(EngineConfig(model=str(path), **options))
        if "header" not in results:
            results["header"] = describe(made, f"parallel, {workers} workers")
            show_header(results["header"])
        return made

    results: dict[str, Any] = {}
    with recorded(json_file, lambda: results) as record, errors_by_name():
        benchmark.measure(engine_of, path, workers, output_len, num_iters, results)
    exit_unless(record.written)


@app.command()
@takes_engine_options("device", "enforce_eager", "batch_invariant")
def compare(
    model: ModelOption = None,
    workloads: Annotated[str | None, typer.Option(help="Which, as in W1,W2 [default: W1 to W6].")] = None,
    engines: Annotated[
        str | None, typer.Option(help="Which, as in nanopage,vllm [default: all that are installed].")
    ] = None,
    environments: EnvironmentsOption = None,
    mt_bench: Annotated[Path | None, typer.Option(help="mt_bench's question file (JSON lines), for W6.")] = None,
    *,
    switches: dict[str, Any],
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32; W5 is always float32.")] = "bfloat16",
    quantization: QuantizationOption = None,
    num_iters: ItersOption = 3,
    num_iters_warmup: WarmupOption = 1,
    seed: SeedOption = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of every engine [default: usable physical cores].")
    ] = None,
    busy: Annotated[
        int | None, typer.Option(min=1, help="Repeat every iteration while other processes keep so many cores busy.")
    ] = None,
    isa: Annotated[
        str | None, typer.Option(help="avx2: no engine uses newer instructions [default: all that there are].")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Run the same requests on nanopage and its peers, in turn.

    Each engine has a process of its own. The first lines of a peer's file in benchmarks/peers say how to install it.
    --eager and --batch-invariant are nanopage's. With --quantization each engine runs its own kind of int8 or int4;
    engines without one are left out. nanopage and llama.cpp also read the same .gguf file. On a GPU, nanopage,
    vLLM and transformers run.

    \b
    python bench.py compare --workloads W1,W2 --engines nanopage,transformers
    """
    from benchmarks import compare as comparison
    from nanopage.cpu.threads import default_threads
    from nanopage.device import resolve_device

    check_outputs({"--json": json_file}, {"--mt-bench": mt_bench})
    check_choice(dtype, ["bfloat16", "float32"], "--dtype")
    check_choice(quantization, ["int8", "int4"], "--quantization")
    check_choice(isa, ["avx2"], "--isa")
    check_engine(switches)
    try:
        device = resolve_device(switches["device"]).type
    except ValueError as error:
        refuse(str(error), "--device")
    if device == "cuda":
        for option, value in {"--quantization": quantization, "--isa": isa}.items():
            if value is not None:
                refuse("is for a CPU: add --device cpu", option)
    if isa is not None and not cpu_has("avx2"):
        refuse("this processor has no AVX2", "--isa")
    default = [name for name in comparison.WORKLOADS if name not in comparison.PROCESSES]
    names = default if workloads is None else list(dict.fromkeys(workloads.split(",")))
    for name in names:
        check_choice(name, list(comparison.WORKLOADS), "--workloads")
    usable = comparison.usable_threads()
    if usable < (threads or 1):
        refuse(f"{threads} threads are more than the {usable} that this process may use", "--threads")
    if usable < (busy or 1):
        refuse(f"{busy} cores are more than the {usable} that this process may use", "--busy")
    if "W6" not in names and mt_bench is not None:
        refuse("is for W6, which --workloads leaves out", "--mt-bench")
    if "W6" in names and mt_bench is None:
        if workloads is not None:
            refuse("W6 needs mt_bench's question file", "--mt-bench")
        names.remove("W6")
        console.print("W6 is left out: it needs --mt-bench", style="dim", highlight=False)
    comparison.compare(
        model,
        names,
        None if engines is None else list(dict.fromkeys(engines.split(","))),
        find_environments(environments),
        mt_bench,
        device,
        dtype,
        switches["enforce_eager"],
        switches["batch_invariant"],
        quantization,
        num_iters,
        num_iters_warmup,
        seed,
        threads or default_threads(),
        busy or 0,
        isa is not None,
        json_file,
    )


@app.command()
@takes_engine_options("enforce_eager")
def experts(
    model: ModelOption = None,
    num_experts: Annotated[int, typer.Option(min=2, max=1024, help="Experts of each layer.")] = 8,
    num_chosen: Annotated[int, typer.Option(min=1, max=64, help="How many of them compute a token.")] = 2,
    batch_sizes: Annotated[str, typer.Option(help="Requests that run together; several in turn.")] = "1,8,32",
    input_len: Annotated[int, typer.Option(min=1, max=MAX_TOKENS, help="Tokens of each prompt.")] = 32,
    output_len: Annotated[int, typer.Option(min=2, max=MAX_TOKENS, help="Tokens of each output.")] = 64,
    engines: Annotated[str, typer.Option(help="nanopage, or with llama.cpp.")] = "nanopage,llamacpp",
    environments: EnvironmentsOption = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    *,
    switches: dict[str, Any],
    quantization: QuantizationOption = None,
    num_iters: ItersOption = 3,
    num_iters_warmup: WarmupOption = 1,
    seed: SeedOption = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of every engine [default: usable physical cores].")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Compare a mixture of experts with a dense model.

    Both have about the same number of active weights.

    The mixture has random weights. It is made from the sizes of --model, a Llama, and kept in nanopage's cache.

    \b
    python bench.py experts --batch-sizes 1,32 --engines nanopage
    """
    from dataclasses import asdict

    from benchmarks import compare as comparison
    from benchmarks import experts as benchmark
    from nanopage.cpu.threads import default_threads

    check_outputs({"--json": json_file})
    check_choice(dtype, ["bfloat16", "float32"], "--dtype")
    check_choice(quantization, ["int8", "int4"], "--quantization")
    sizes = parse_sizes(batch_sizes)
    names = list(dict.fromkeys(engines.split(",")))
    for name in names:
        check_choice(name, ["nanopage", "llamacpp"], "--engines")
    if num_chosen > num_experts:
        refuse(f"{num_chosen} are more than the {num_experts} experts", "--num-chosen")
    folder = find_environments(environments)
    path, config = find_model(model)
    pythons = comparison.python_of_engines(names, folder, "cpu", quantization, False, False)
    check_lengths([(input_len, output_len)] * max(sizes), config, ["--input-len", "--output-len"])
    threads = threads or default_threads()
    setup = comparison.Setup(
        path, config, pythons, "cpu", quantization, switches["enforce_eager"], threads, num_iters_warmup, 0
    )
    with errors_by_name():
        mixture = benchmark.write_mixture(path, config, num_experts, num_chosen)
    header = comparison.header(
        path, "cpu", dtype, quantization, seed, num_iters, num_iters_warmup, threads, 0, False
    ) | {"bench": f"experts, {input_len} in, {output_len} out, seed {seed}, {num_iters} iterations"}
    show_header(header)
    results = benchmark.Results(header)
    with recorded(json_file, lambda: asdict(results)) as record:
        benchmark.measure(setup, mixture, dtype, sizes, (input_len, output_len), num_iters, seed, results)
        for name, message in results.failures.items():
            console.print(f"[red]error:[/red] {name}: {message}", highlight=False, markup=False)
    exit_unless(record.written, not results.failures)


@app.command()
def kernels(
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, which is --dtype, or fp8.")] = "auto",
    num_iters: Annotated[
        int, typer.Option(min=1, max=MAX_ITERATIONS, help="Measured launches; medians are reported.")
    ] = 50,
    json_file: JsonOption = None,
) -> None:
    """Time attention's Triton kernels on a GPU.

    Beside them: torch's reference, SDPA and FlexAttention.

    \b
    python bench.py kernels --dtype bfloat16 --json kernels.json
    """
    import torch

    from benchmarks import kernels as benchmark

    check_outputs({"--json": json_file})
    check_choice(dtype, ["bfloat16", "float16", "float32"], "--dtype")
    check_choice(kv_cache_dtype, ["auto", "fp8"], "--kv-cache-dtype")
    cache = "" if kv_cache_dtype == "auto" else f", KV cache in {kv_cache_dtype}"
    header = {
        "bench": f"kernels, {dtype}{cache}, pages of {benchmark.BLOCK_SIZE}",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu: {cpu_name()}",
        "versions": versions("triton"),
    }
    compute = getattr(torch, dtype)
    benchmark.kernels(compute, torch.float8_e4m3fn if cache else compute, num_iters, header, json_file)


@app.command("compile")
@takes_engine_options("dtype", "device", "quantization", "load_format")
def compile_parts(
    model: ModelOption = None,
    *,
    switches: dict[str, Any],
    json_file: JsonOption = None,
) -> None:
    """Compile a model's parts anew: their time and size.

    On a CPU, all parts that are compiled ahead of time, and how long they take to load. For a GPU, the kernels of each
    piece, also for other families; --device cuda shows them without a GPU, too. Nothing is kept.

    \b
    python bench.py compile --device cuda --model DIR --json compile.json
    """
    import torch

    from benchmarks import compile_parts as benchmark
    from nanopage import EngineConfig
    from nanopage.build import build_engine
    from nanopage.startup.options import refused

    check_outputs({"--json": json_file})
    check_engine(switches)
    path, config = find_model(model)
    has_gpu = torch.cuda.is_available()
    for_gpu = switches["device"] == "cuda" or (switches["device"] == "auto" and has_gpu)
    if config.pooling is not None:
        refuse("models for embeddings and scores are not compiled", "--model")
    if for_gpu and (path.suffix == ".gguf" or config.quantization is not None):
        refuse("for a GPU, only models whose weights are floats can be compiled here", "--model")
    options = EngineConfig(model=str(path), **switches)
    results: dict[str, Any] = {}
    with recorded(json_file, lambda: results) as record, errors_by_name():
        if not for_gpu:
            engine = build_engine(options)
            results["header"] = describe(engine, "compile")
            show_header(results["header"])
            benchmark.compile_for_cpu(engine, results)
        else:
            gpu = torch.cuda.get_device_name() if has_gpu else "an H100 that is not there: code is generated, not run"
            dtype = config.dtype if switches["dtype"] == "auto" else switches["dtype"]
            for why in refused(options, config, torch.device("cuda"), getattr(torch, dtype), path):
                raise ValueError(why)
            what = ", ".join(filter(None, (path.name, dtype, switches["quantization"])))
            results["header"] = {"bench": "compile", "model": what, "device": f"cuda: {gpu}", "cpu": cpu_name()}
            results["header"] |= {"versions": versions("triton")}
            show_header(results["header"])
            benchmark.compile_for_gpu(path, switches, results)
            if has_gpu:  # it says how long capturing CUDA graphs takes, and their memory
                log = results["log"] = []

                def note(record: logging.LogRecord) -> bool:
                    log.append(record.getMessage())
                    return True

                logging.getLogger("nanopage").addFilter(note)
                build_engine(options)
    exit_unless(record.written)


if __name__ == "__main__":
    with stopped_by_signals():
        app()
