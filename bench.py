"""Measure nanopage, alone or side by side with transformers on the same weights.

    python bench.py latency                          one request at a time: time to first token, decode tok/s
    python bench.py throughput                       many requests at once: output tok/s
    python bench.py throughput --compare transformers --json result.json
    python bench.py memory                           blocks: what forks save, swap against recomputation, waste
    python bench.py compare                          the same work on vLLM, OpenVINO, llama.cpp, transformers, in turn
    python bench.py kernels                          attention's Triton kernels on a GPU: time, share of its bandwidth

Prompts are random token ids and never repeat, so the prefix cache can not help, unless --prefix-len or a file
(--dataset-name sharegpt or custom) makes prompts alike. Outputs have a fixed length (end of sequence is ignored).
Loading, compiling and warm-up are timed apart. With --compare the two take turns, iteration by iteration, so that a
machine whose speed drifts treats both alike. On a GPU there are three: transformers' `generate`, compiled for a static
cache, and its continuous batching. A peer that fails is named and left out; the exit code is 1.
"""

import contextlib
import json
import platform
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.datasets import Dataset, dataset, parse_range
from benchmarks.peers import nanopage as nanopage_peer
from benchmarks.peers import transformers as transformers_peer
from benchmarks.peers import transformers_continuous
from benchmarks.peers.protocol import Engine, Run, measure
from benchmarks.progress import progress
from benchmarks.report import (
    check_json,
    console,
    cpu_name,
    describe,
    errors_by_name,
    left_out_if_it_fails,
    show_header,
    spread,
    table_of,
)

app = typer.Typer(help=__doc__, no_args_is_help=True, rich_markup_mode=None, add_completion=False)

ModelOption = Annotated[
    str | None, typer.Option(help="Directory, .gguf file or hub id [default: SmolLM2-135M-Instruct].")
]
DtypeOption = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
EagerOption = Annotated[
    bool, typer.Option("--eager", help="Without compiled code: the first run on a machine waits a minute for it.")
]
QuantizationOption = Annotated[str | None, typer.Option(help="int8: weights in a byte each [default: as they are].")]
LoadFormatOption = Annotated[
    str,
    typer.Option(help="auto, or dummy: random weights; config.json is enough, as in benchmarks/configs/Qwen3-0.6B."),
]
OverlapOption = Annotated[
    bool | None,
    typer.Option(
        "--overlap/--no-overlap", help="Launch a step before the last one's tokens are seen [default: on a GPU]."
    ),
]
ItersOption = Annotated[int, typer.Option(min=1, help="Measured iterations; medians are reported.")]
WarmupOption = Annotated[int, typer.Option(min=0, help="Iterations before that, not counted.")]
SeedOption = Annotated[int, typer.Option(help="Of the lengths and the prompts.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the results to this file, too.")]
CompareOption = Annotated[str | None, typer.Option(help="'transformers': run it on the same work, in turn.")]
ProfileOption = Annotated[
    Path | None, typer.Option("--profile", help="Write a Chrome trace of one more iteration to this file.")
]
LengthOption = Annotated[str, typer.Option(help="Tokens: a number, or LOW-HIGH drawn uniformly.")]
DatasetOption = Annotated[
    str,
    typer.Option(help="random: token ids; custom: a prompt a line, or *.jsonl; sharegpt: conversations as JSON."),
]
DatasetPathOption = Annotated[Path | None, typer.Option(help="The file of custom or sharegpt.")]
NumPromptsOption = Annotated[
    int | None, typer.Option(min=1, help="Requests [default: 32; of a file or a trace, all that it has].")
]
InputLenOption = Annotated[
    str | None, typer.Option(help="Tokens of a random prompt: a number or LOW-HIGH [default: 32-256].")
]
OutputLenOption = Annotated[
    str | None, typer.Option(help="Tokens: a number or LOW-HIGH [default: what the file says, else 32-128].")
]
PrefixLenOption = Annotated[
    int, typer.Option(min=0, help="Tokens common to all random prompts, before those of --input-len.")
]


@app.command()
def latency(
    model: ModelOption = None,
    input_len: LengthOption = "128",
    output_len: LengthOption = "128",
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that run together.")] = 1,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    eager: EagerOption = False,
    quantization: QuantizationOption = None,
    load_format: LoadFormatOption = "auto",
    overlap: OverlapOption = None,
    num_iters: ItersOption = 5,
    num_iters_warmup: WarmupOption = 1,
    seed: SeedOption = 0,
    compare: CompareOption = None,
    json_file: JsonOption = None,
    profile_file: ProfileOption = None,
) -> None:
    """Time one batch from start to end: time to first token, decode speed, end-to-end time.

    \b
    python bench.py latency --input-len 512 --output-len 64 --json latency.json
    """
    data = dataset("random", None, batch_size, input_len, output_len, 0)
    switches = {"dtype": dtype, "device": device, "enforce_eager": eager, "quantization": quantization}
    switches |= {"load_format": load_format, "async_scheduling": overlap}
    bench("latency", data, model, switches, num_iters, num_iters_warmup, seed, compare, json_file, profile_file)


@app.command()
def throughput(
    model: ModelOption = None,
    num_prompts: NumPromptsOption = None,
    dataset_name: DatasetOption = "random",
    dataset_path: DatasetPathOption = None,
    input_len: InputLenOption = None,
    output_len: OutputLenOption = None,
    prefix_len: PrefixLenOption = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    eager: EagerOption = False,
    quantization: QuantizationOption = None,
    load_format: LoadFormatOption = "auto",
    overlap: OverlapOption = None,
    num_iters: ItersOption = 3,
    num_iters_warmup: WarmupOption = 1,
    seed: SeedOption = 0,
    compare: CompareOption = None,
    json_file: JsonOption = None,
    profile_file: ProfileOption = None,
) -> None:
    """Time many requests queued at once: requests/s, output and total tokens/s.

    \b
    python bench.py throughput --num-prompts 64 --prefix-len 256 --compare transformers
    """
    data = dataset(dataset_name, dataset_path, num_prompts, input_len, output_len, prefix_len)
    switches = {"dtype": dtype, "device": device, "enforce_eager": eager, "quantization": quantization}
    switches |= {"load_format": load_format, "async_scheduling": overlap}
    bench("throughput", data, model, switches, num_iters, num_iters_warmup, seed, compare, json_file, profile_file)


@app.command()
def memory(
    model: ModelOption = None,
    input_len: LengthOption = "32-512",
    output_len: LengthOption = "32-256",
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests of the waste trace.")] = 500,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    eager: EagerOption = False,
    load_format: LoadFormatOption = "auto",
    num_iters: ItersOption = 3,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Measure the memory manager: parallel sampling, preemption by swap and by recomputation, unfilled slots.

    The first two have fixed workloads. Preemption runs in float32, so that its outputs can be compared exactly.

    \b
    python bench.py memory --num-prompts 200
    """
    from benchmarks import memory as benchmark

    check_json(json_file)
    lengths = parse_range("--input-len", input_len), parse_range("--output-len", output_len)
    rng = random.Random(seed)
    results: dict = {}

    def engine(**options):
        from nanopage import EngineConfig, LLMEngine

        with errors_by_name():
            switches = {"dtype": dtype, "device": device, "enforce_eager": eager, "load_format": load_format}
            made = LLMEngine(EngineConfig(model=model, **switches | options))
            made.runner.use_graphs(wait=True)
            return made

    plain = engine(enable_prefix_caching=False)
    header = describe(plain, f"memory, seed {seed}")
    show_header(header)
    results["parallel sampling"] = benchmark.measure_forks(plain, rng, num_iters)
    results["preemption"] = benchmark.measure_preemption(engine, rng, num_iters)
    results["waste"] = benchmark.measure_waste(engine(max_num_seqs=256), rng, num_prompts, *lengths)
    if json_file is not None:
        json_file.write_text(json.dumps({"header": header} | results, indent=2) + "\n")


@app.command()
def compare(
    model: ModelOption = None,
    workloads: Annotated[str | None, typer.Option(help="Which, as in W1,W2 [default: all].")] = None,
    engines: Annotated[
        str | None, typer.Option(help="Which, as in nanopage,vllm [default: all that are installed].")
    ] = None,
    environments: Annotated[
        Path | None, typer.Option(help="A virtual environment for each peer [default: ~/.cache/nanopage/peers].")
    ] = None,
    mt_bench: Annotated[Path | None, typer.Option(help="mt_bench's question file (JSON lines), for W6.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32; W5 is always float32.")] = "bfloat16",
    eager: EagerOption = False,
    quantization: QuantizationOption = None,
    overlap: OverlapOption = None,
    num_iters: ItersOption = 3,
    num_iters_warmup: WarmupOption = 1,
    seed: SeedOption = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of every engine [default: usable physical cores].")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Run the same requests on nanopage and its peers, each in its own process, in turn.

    How a peer is installed is said by the first lines of its file in benchmarks/peers. --eager is nanopage's. With
    --quantization int8 each engine runs its own kind of it; those that have none are left out.

    \b
    python bench.py compare --workloads W1,W2 --engines nanopage,transformers
    """
    from benchmarks import compare as comparison
    from nanopage import hub
    from nanopage.threads import default_threads

    check_json(json_file)
    if dtype not in ("bfloat16", "float32"):
        raise typer.BadParameter(f"{dtype!r} is not one of: bfloat16, float32", param_hint="--dtype")
    if quantization not in (None, "int8"):
        raise typer.BadParameter(f"{quantization!r} is not one of: int8", param_hint="--quantization")
    names = list(comparison.WORKLOADS) if workloads is None else list(dict.fromkeys(workloads.split(",")))
    for name in names:
        if name not in comparison.WORKLOADS:
            known = ", ".join(comparison.WORKLOADS)
            raise typer.BadParameter(f"{name!r} is not one of: {known}", param_hint="--workloads")
    if "W6" in names and mt_bench is None:
        if workloads is not None:
            raise typer.BadParameter("W6 needs mt_bench's question file", param_hint="--mt-bench")
        names.remove("W6")
        console.print("W6 is left out: it needs --mt-bench", style="dim", highlight=False)
    comparison.compare(
        model,
        names,
        None if engines is None else list(dict.fromkeys(engines.split(","))),
        environments or hub.cache_directory() / "peers",
        mt_bench,
        dtype,
        eager,
        quantization,
        num_iters,
        num_iters_warmup,
        seed,
        threads or default_threads(),
        json_file,
    )


@app.command()
def kernels(
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    num_iters: Annotated[int, typer.Option(min=1, help="Measured launches; medians are reported.")] = 50,
    json_file: JsonOption = None,
) -> None:
    """Time the Triton kernels of attention on a GPU, beside torch's reference, SDPA and FlexAttention.

    \b
    python bench.py kernels --dtype bfloat16 --json kernels.json
    """
    import torch
    import triton

    from benchmarks import kernels as benchmark

    check_json(json_file)
    if dtype not in ("bfloat16", "float16", "float32"):
        raise typer.BadParameter(f"{dtype!r} is not one of: bfloat16, float16, float32", param_hint="--dtype")
    versions = ", ".join(f"{name} {version}" for name, version in nanopage_peer.versions().items())
    header = {
        "bench": f"kernels, {dtype}, pages of {benchmark.BLOCK_SIZE}",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu: {cpu_name()}",
        "versions": f"{versions}, triton {triton.__version__}, Python {platform.python_version()}",
    }
    benchmark.kernels(getattr(torch, dtype), num_iters, header, json_file)


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
) -> None:
    """Run a workload on an engine made with `switches`, options of EngineConfig, and print its table."""
    if compare not in (None, "transformers"):
        raise typer.BadParameter(f"{compare!r} is not one of: transformers", param_hint="--compare")
    check_json(json_file)
    check_json(profile_file, "--profile")
    rng = random.Random(seed)

    started = time.perf_counter()
    from benchmarks import utilization
    from nanopage import LLM, EngineConfig, hub
    from nanopage.device import resolve_device

    imported = time.perf_counter()
    with errors_by_name():
        path = hub.resolve(model)
        if compare and path.suffix == ".gguf":
            raise typer.BadParameter("transformers can not load this .gguf file here: give a directory")
        requests = data.requests(rng, path)
        lengths = requests.lengths
        options = {"model": str(path), "max_num_seqs": max(256, len(lengths))} | switches
        device = resolve_device(EngineConfig(**options).device)
        if compare and device.type == "cuda":  # the peers need memory, too: blocks for all requests, and some room
            options["num_gpu_blocks_override"] = sum(-(-(i + o) // 16) for i, o in lengths) * 5 // 4 + 16
        # Of a GPU before the engine takes its memory, of a CPU as late as can be: its speed drifts.
        bandwidth = utilization.bandwidth(device) if device.type == "cuda" else {}
        resolved = time.perf_counter()
        llm = LLM(**options)
        llm.engine.runner.use_graphs(wait=True)
    loaded = time.perf_counter()
    longest = max(i + o for i, o in lengths)
    if longest > llm.engine.max_model_len:
        raise typer.BadParameter(f"{longest} tokens are more than the model's {llm.engine.max_model_len}")
    bandwidth = bandwidth or utilization.bandwidth(device)
    recorder = utilization.StepRecorder(llm.engine, bandwidth)
    runners = {"nanopage": nanopage_peer.runner(llm)}
    setup = {
        "import": round(imported - started, 3),
        "load and compile": round(loaded - resolved, 3),
    }
    header = describe(llm.engine, f"{command}, {data.what}, seed {seed}", compare)
    show_header(header)
    failures: dict[str, str] = {}  # of peers
    stop_peers = contextlib.ExitStack()
    if compare:
        loaded = time.perf_counter()
        runners |= load_peers(llm, lengths, stop_peers, failures)
        setup["load transformers"] = round(time.perf_counter() - loaded, 3)

    runs: dict[str, list[Run]] = {name: [] for name in runners}
    utilized: list[dict] = []  # of nanopage, for each iteration
    with stop_peers:
        for iteration in range(-num_iters_warmup, num_iters):
            work = requests.work(rng, llm.engine)
            llm.engine.reset_prefix_cache()  # the prompts of a file come again
            for name, run in list(runners.items()):
                label = f"{name} {'warm-up' if iteration < 0 else f'{iteration + 1}/{num_iters}'}"
                with errors_by_name() if name == "nanopage" else left_out_if_it_fails(name, failures):
                    with progress(llm.engine, label, len(work)):
                        result = measure(run, work)
                    if iteration < 0:
                        setup.setdefault(f"warm-up {name}", round(result.seconds, 3))
                    else:
                        runs[name].append(result)
                if name in failures:
                    del runners[name], runs[name]
            phases = recorder.take()
            if iteration >= 0:
                utilized.append(phases)
    hits = llm.engine.scheduler.block_manager.num_hit_tokens
    report(runs, setup, hits, command)
    utilization.show(utilized, bandwidth)
    if json_file is not None:
        record = {
            "header": header,
            "setup_seconds": setup,
            "runs": {name: [asdict(run) for run in results] for name, results in runs.items()},
            "failures": failures,
            "prefix_cache_hit_tokens": hits,
            "bandwidth_gb_s": bandwidth,
            "weight_bytes": recorder.weight_bytes,
            "kv_bytes_of_a_token": recorder.kv_bytes,
            "utilization": [{name: phase and asdict(phase) for name, phase in each.items()} for each in utilized],
        }
        json_file.write_text(json.dumps(record, indent=2) + "\n")
    if profile_file is not None:
        with errors_by_name():
            utilization.write_trace(runners["nanopage"], requests.work(rng, llm.engine), profile_file)
    if failures:
        raise typer.Exit(1)


def load_peers(
    llm, lengths: list[tuple[int, int]], stop_peers: contextlib.ExitStack, failures: dict[str, str]
) -> dict[str, Engine]:
    """transformers' `generate`, and on a GPU its continuous batching as well; `failures` says why one is missing."""
    engine = llm.engine
    options = engine.model_path, engine.dtype, engine.device, engine.config.load_format

    def continuous() -> Engine:
        tokens = sum(max(i + o, transformers_continuous.PAGE_SIZE) for i, o in lengths)
        run, stop = transformers_continuous.runner(*options, kv_tokens=tokens)
        stop_peers.callback(stop)
        return run

    peers = {"transformers": lambda: transformers_peer.runner(*options)}
    if engine.device.type == "cuda":
        peers["transformers continuous"] = continuous
    engines = {}
    for name, load in peers.items():
        with left_out_if_it_fails(name, failures):
            engines[name] = load()
    return engines


def report(runs: dict[str, list[Run]], setup: dict[str, float], hits: int, command: str) -> None:
    """Medians, with the lowest and highest run."""
    title = f"{command}: median [lowest, highest] of {len(runs['nanopage'])}"
    peers = [name for name in runs if name != "nanopage"]
    ratio = "ratio, pair by pair" if len(peers) == 1 else "nanopage / {}, pair by pair"
    table = table_of(title, ["", *runs, *(ratio.format(name) for name in peers)])
    metrics: dict[str, Callable[[Run], float | None]] = {
        "time (s)": lambda run: run.seconds,
        "time to first token (ms)": lambda run: run.ttft and run.ttft * 1000,
        "decode tok/s of a request": lambda run: run.decode_tok_s,
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
    console.print(table)
    console.print("  ".join(f"{name} {value:.1f} s" for name, value in setup.items()), style="dim", highlight=False)
    if hits:
        console.print(f"The prefix cache served {hits} of the prompts' tokens, warm-up included.", style="yellow")


if __name__ == "__main__":
    sys.exit(app())
