"""Measure nanopage, alone or side by side with transformers on the same weights.

    python bench.py latency                          one request at a time: time to first token, decode tok/s
    python bench.py throughput                       many requests at once: output tok/s
    python bench.py throughput --compare transformers --json result.json
    python bench.py memory                           blocks: what forks save, swap against recomputation, waste
    python bench.py compare                          the same work on vLLM, OpenVINO, llama.cpp, transformers, in turn
    python bench.py kernels                          attention's Triton kernels on a GPU: time, share of its bandwidth

Prompts are random token ids and never repeat, so the prefix cache can not help. Outputs have a fixed length (end of
sequence is ignored). Loading, compiling and warm-up are timed apart. With --compare the two take turns, iteration by
iteration, so that a machine whose speed drifts treats both alike.
"""

import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.peers import nanopage as nanopage_peer
from benchmarks.peers import transformers as transformers_peer
from benchmarks.peers.nanopage import greedy
from benchmarks.peers.protocol import Run, Work, measure
from benchmarks.report import check_json, console, cpu_name, errors_by_name, show_header, spread, table_of

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
ItersOption = Annotated[int, typer.Option(min=1, help="Measured iterations; medians are reported.")]
WarmupOption = Annotated[int, typer.Option(min=0, help="Iterations before that, not counted.")]
SeedOption = Annotated[int, typer.Option(help="Of the lengths and the prompts.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the results to this file, too.")]
CompareOption = Annotated[str | None, typer.Option(help="'transformers': run generate() on the same work, in turn.")]
LengthOption = Annotated[str, typer.Option(help="Tokens: a number, or LOW-HIGH drawn uniformly.")]


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
    num_iters: ItersOption = 5,
    num_iters_warmup: WarmupOption = 1,
    seed: SeedOption = 0,
    compare: CompareOption = None,
    json_file: JsonOption = None,
) -> None:
    """Time one batch from start to end: time to first token, decode speed, end-to-end time."""
    options = {"input_len": input_len, "output_len": output_len, "num_prompts": batch_size}
    switches = {"dtype": dtype, "device": device, "enforce_eager": eager, "quantization": quantization}
    switches["load_format"] = load_format
    bench("latency", options, model, switches, num_iters, num_iters_warmup, seed, compare, json_file)


@app.command()
def throughput(
    model: ModelOption = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests, all queued at once.")] = 32,
    input_len: LengthOption = "32-256",
    output_len: LengthOption = "32-128",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    eager: EagerOption = False,
    quantization: QuantizationOption = None,
    load_format: LoadFormatOption = "auto",
    num_iters: ItersOption = 3,
    num_iters_warmup: WarmupOption = 1,
    seed: SeedOption = 0,
    compare: CompareOption = None,
    json_file: JsonOption = None,
) -> None:
    """Time many requests queued at once: requests/s, output and total tokens/s."""
    options = {"input_len": input_len, "output_len": output_len, "num_prompts": num_prompts}
    switches = {"dtype": dtype, "device": device, "enforce_eager": eager, "quantization": quantization}
    switches["load_format"] = load_format
    bench("throughput", options, model, switches, num_iters, num_iters_warmup, seed, compare, json_file)


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
    """
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
    results["parallel sampling"] = measure_forks(plain, rng, num_iters)
    results["preemption"] = measure_preemption(engine, rng, num_iters)
    results["waste"] = measure_waste(engine(max_num_seqs=256), rng, num_prompts, *lengths)
    if json_file is not None:
        json_file.write_text(json.dumps({"header": header} | results, indent=2) + "\n")


def measure_forks(engine, rng: random.Random, num_iters: int) -> dict:
    """Eight completions of one prompt of 512 tokens, as one request and as eight. No prefix cache."""
    from nanopage import SamplingParams

    options = {"temperature": 1.0, "max_tokens": 64, "ignore_eos": True, "detokenize": False}
    forms = {"1 request, n=8": [8], "8 requests": [1] * 8}
    runs: dict[str, list[dict]] = {name: [] for name in forms}
    for iteration in range(-1, num_iters):  # the first warms up
        prompt = random_prompt(rng, engine, 512)
        for name, counts in forms.items():
            for i, n in enumerate(counts):
                engine.add_request(str(i), prompt, SamplingParams(n=n, seed=i, **options))
            steps, seconds, _ = drive(engine)
            if iteration >= 0:
                blocks = max(step.used_blocks for step in steps)
                runs[name].append(
                    {"blocks": blocks, "prefill_tokens": sum(step.prefill_tokens for step in steps), "seconds": seconds}
                )
    one, eight = runs.values()
    table = table_of("8 completions of 64 tokens, prompt of 512", ["", *forms, "saved"])
    for title, key, digits in (("blocks at most", "blocks", 0), ("prompt tokens computed", "prefill_tokens", 0),
                               ("time (s)", "seconds", 2)):  # fmt: skip
        a, b = (statistics.median(run[key] for run in column) for column in (one, eight))
        table.add_row(title, f"{a:.{digits}f}", f"{b:.{digits}f}", f"{1 - a / b:.0%}")
    console.print(table)
    return runs


def measure_preemption(engine_of: Callable, rng: random.Random, num_iters: int) -> dict:
    """32 requests whose tokens are three times the pool, preempted by recomputation and by swapping."""
    lengths = [(rng.randint(32, 256), rng.randint(32, 128)) for _ in range(32)]
    pool = sum(-(-(i + o) // 16) for i, o in lengths) // 3
    options = {"num_gpu_blocks_override": pool, "max_model_len": 256 + 128, "dtype": "float32"}
    engines = {mode: engine_of(preemption_mode=mode, **options) for mode in ("recompute", "swap")}
    runs: dict[str, list[dict]] = {mode: [] for mode in engines}
    for _ in range(num_iters):
        prompts = [random_prompt(rng, engines["swap"], i) for i, _ in lengths]
        tokens = []
        for mode, engine in engines.items():
            for index, (prompt, (_, output)) in enumerate(zip(prompts, lengths, strict=True)):
                engine.add_request(str(index), prompt, greedy(output))
            steps, seconds, outputs = drive(engine)
            tokens.append({key: output.outputs[0].token_ids for key, output in outputs.items()})
            run = {"seconds": seconds, "preemptions": sum(step.preempted for step in steps)}
            run["tokens computed"] = sum(step.prefill_tokens + step.decode_tokens for step in steps)
            run["blocks swapped out"] = sum(step.swapped_out for step in steps)
            runs[mode].append(run)
        if tokens[0] != tokens[1] or len(tokens[0]) != len(lengths):
            console.print("[red]error:[/red] recomputation and swapping gave different outputs")
            raise typer.Exit(1)
    title = f"{len(lengths)} requests, three times a pool of {pool} blocks: outputs equal, float32"
    table = table_of(title, ["", *runs, "swap / recompute"])
    for key in ("preemptions", "tokens computed", "blocks swapped out", "seconds"):
        columns = [[run[key] for run in column] for column in runs.values()]
        ratio = [b / a if a else None for a, b in zip(*columns, strict=True)]
        table.add_row(key, *(spread(column) for column in columns), spread(ratio))
    console.print(table)
    return runs


def measure_waste(engine, rng: random.Random, num_prompts: int, inputs: tuple, outputs: tuple) -> dict:
    """Slots that are allocated and not filled, as a share of those allocated, over all steps of a trace."""
    manager, scheduler = engine.scheduler.block_manager, engine.scheduler
    size = manager.block_size
    for i in range(num_prompts):
        prompt = random_prompt(rng, engine, rng.randint(*inputs))
        engine.add_request(str(i), prompt, greedy(rng.randint(*outputs)))
    allocated = filled = 0

    def sample():
        nonlocal allocated, filled
        tokens_in: dict[int, int] = {}  # of each block; a shared one counts once
        for group in scheduler.running:
            for seq in group.live:
                for i, block in enumerate(manager.block_tables.get(seq.seq_id, ())):
                    held = min(size, max(0, seq.num_computed_tokens - i * size))
                    tokens_in[block] = max(tokens_in.get(block, 0), held)
        allocated += len(tokens_in) * size
        filled += sum(tokens_in.values())

    steps, seconds, _ = drive(engine, sample)
    waste = 1 - filled / allocated
    title = f"{num_prompts} requests, input {inputs[0]}-{inputs[1]}, output {outputs[0]}-{outputs[1]}"
    table = table_of(title, ["allocated slots never filled", "sequences at most", "steps", "time (s)"])
    running = max(step.running for step in steps)
    table.add_row(f"{waste:.2%}", str(running), str(len(steps)), f"{seconds:.1f}")
    console.print(table)
    return {"waste": waste, "sequences": running, "steps": len(steps), "seconds": seconds}


def drive(engine, after_step: Callable[[], None] = lambda: None) -> tuple[list, float, dict]:
    """Step until all requests are done. Returns (StepStats of each step, seconds, request id -> finished output)."""
    steps: list = []
    done: dict = {}
    started = time.perf_counter()
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
        steps.append(engine.last_step)
        after_step()
    return steps, time.perf_counter() - started, done


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
    """Time the Triton kernels of attention on a GPU, beside torch's reference, SDPA and FlexAttention."""
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
    workload: dict,
    model: str | None,
    switches: dict[str, Any],
    num_iters: int,
    num_iters_warmup: int,
    seed: int,
    compare: str | None,
    json_file: Path | None,
) -> None:
    """Run a workload on an engine made with `switches`, options of EngineConfig, and print its table."""
    if compare not in (None, "transformers"):
        raise typer.BadParameter(f"{compare!r} is not one of: transformers", param_hint="--compare")
    check_json(json_file)
    input_range = parse_range("--input-len", workload["input_len"])
    output_range = parse_range("--output-len", workload["output_len"])
    rng = random.Random(seed)
    lengths = [(rng.randint(*input_range), rng.randint(*output_range)) for _ in range(workload["num_prompts"])]

    started = time.perf_counter()
    from nanopage import LLM, hub

    imported = time.perf_counter()
    with errors_by_name():
        path = hub.resolve(model)
        resolved = time.perf_counter()
        llm = LLM(str(path), max_num_seqs=max(256, workload["num_prompts"]), **switches)
        llm.engine.runner.use_graphs(wait=True)
    loaded = time.perf_counter()
    longest = max(i + o for i, o in lengths)
    if longest > llm.engine.max_model_len:
        raise typer.BadParameter(f"{longest} tokens are more than the model's {llm.engine.max_model_len}")
    runners = {"nanopage": nanopage_peer.runner(llm)}
    if compare:
        if path.suffix == ".gguf":
            raise typer.BadParameter("transformers can not load this .gguf file here: give a directory")
        runners["transformers"] = transformers_peer.runner(
            path, llm.engine.dtype, llm.engine.device, llm.engine.config.load_format
        )
    setup = {
        "import": round(imported - started, 3),
        "load and compile": round(loaded - resolved, 3),
    }
    if compare:
        setup["load transformers"] = round(time.perf_counter() - loaded, 3)
    what = (
        f"{command}, {workload['num_prompts']} requests, input {workload['input_len']}, "
        f"output {workload['output_len']}, seed {seed}"
    )
    header = describe(llm.engine, what, compare)
    show_header(header)

    runs: dict[str, list[Run]] = {name: [] for name in runners}
    with console.status("") as status:
        for iteration in range(-num_iters_warmup, num_iters):
            work = [Work(random_prompt(rng, llm.engine, i), o) for i, o in lengths]
            for name, run in runners.items():
                label = "warm-up" if iteration < 0 else f"{iteration + 1}/{num_iters}"
                status.update(f"{name} {label}")
                with errors_by_name():
                    result = measure(run, work)
                if iteration < 0:
                    setup.setdefault(f"warm-up {name}", round(result.seconds, 3))
                else:
                    runs[name].append(result)
    hits = llm.engine.scheduler.block_manager.num_hit_tokens
    report(runs, setup, hits, command)
    if json_file is not None:
        record = {
            "header": header,
            "setup_seconds": setup,
            "runs": {name: [asdict(run) for run in results] for name, results in runs.items()},
            "prefix_cache_hit_tokens": hits,
        }
        json_file.write_text(json.dumps(record, indent=2) + "\n")


def parse_range(option: str, text: str) -> tuple[int, int]:
    """ "128" -> (128, 128), "32-256" -> (32, 256)."""
    low, _, high = text.partition("-")
    try:
        bounds = int(low), int(high or low)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number or LOW-HIGH", param_hint=option) from None
    if not 1 <= bounds[0] <= bounds[1]:
        raise typer.BadParameter(f"{text!r}: needs 1 <= LOW <= HIGH", param_hint=option)
    return bounds


def random_prompt(rng: random.Random, engine, num_tokens: int) -> list[int]:
    return [rng.randrange(engine.model_config.vocab_size) for _ in range(num_tokens)]


def describe(engine, what: str, compare: str | None = None) -> dict[str, str]:
    """What a reader must know to believe or repeat the figures."""
    import torch

    versions = ", ".join(f"{name} {version}" for name, version in nanopage_peer.versions().items())
    if compare:
        import transformers

        versions += f", transformers {transformers.__version__}"
    config = engine.config
    weights = f", weights {config.quantization}" if config.quantization else ""
    weights += ", dummy weights" if config.load_format == "dummy" else ""
    hardware = torch.cuda.get_device_name() if engine.device.type == "cuda" else cpu_name()
    return {
        "bench": what,
        "model": f"{engine.model_path.name}, {str(engine.dtype).removeprefix('torch.')}{weights}",
        "device": f"{engine.device.type}: {hardware}, {torch.get_num_threads()} threads",
        "switches": f"{'eager' if config.enforce_eager else 'compiled'}, block size {config.block_size}",
        "versions": f"{versions}, Python {platform.python_version()}",
    }


def report(runs: dict[str, list[Run]], setup: dict[str, float], hits: int, command: str) -> None:
    """Medians, with the lowest and highest run."""
    title = f"{command}: median [lowest, highest] of {len(runs['nanopage'])}"
    table = table_of(title, ["", *runs, *(["ratio, pair by pair"] if len(runs) > 1 else [])])
    metrics: dict[str, Callable[[Run], float | None]] = {
        "time (s)": lambda run: run.seconds,
        "time to first token (ms)": lambda run: run.ttft and run.ttft * 1000,
        "decode tok/s of a request": lambda run: run.decode_tok_s,
        "output tok/s": lambda run: run.output_tokens / run.seconds,
        "total tok/s": lambda run: run.total_tokens / run.seconds,
    }
    for name, metric in metrics.items():
        values = {engine: [metric(run) for run in results] for engine, results in runs.items()}
        cells = [spread(column) for column in values.values()]
        if len(runs) > 1:
            pairs = zip(*values.values(), strict=True)
            cells.append(spread([ours / theirs if ours and theirs else None for ours, theirs in pairs]))
        table.add_row(name, *cells)
    console.print(table)
    console.print("  ".join(f"{name} {value:.1f} s" for name, value in setup.items()), style="dim", highlight=False)
    if hits:
        console.print(f"The prefix cache served {hits} tokens: not all prompts were new.", style="yellow")


if __name__ == "__main__":
    sys.exit(app())
