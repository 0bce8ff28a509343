"""Runs the same requests on nanopage and on its peers, each in its own process, in turn.

A workload fixes the lengths. The prompts are random token ids, new in every iteration: a prefix cache, which every
engine may use, helps within an iteration but not across iterations. W6 has questions instead, where a cache finds only
the text that the chat template puts first. One engine works at a time.
"""

import ast
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.busy import busy_cores
from benchmarks.checks import find_model, refuse, shown
from benchmarks.datasets import check_text, read_json_lines
from benchmarks.machine import cpu_has, machine_state, product_speed, read_bandwidth
from benchmarks.outputs import exit_unless, recorded
from benchmarks.peer import ROOT, Peer, PeerError, prepare
from benchmarks.peers.protocol import Run, Work
from benchmarks.questions import PROCESSES, Question, ask_in_new_processes
from benchmarks.report import console, errors_by_name, figure, plain, show_header, show_table, spread, table_of
from benchmarks.roofline import Roofline, Speed, kv_bytes_of_a_layer, read_weights, roofline
from nanopage.config.model import ModelConfig

WORKLOADS = {
    "W1": "1 request, 128 in, 128 out",
    "W2": "32 requests at once, 32-256 in, 32-128 out",
    "W3": "64 requests at once, 256 common and 16 own tokens in, 16 out",
    "W4": "1 request, 1500 in, 128 out",
    "W5": "W2 in float32",
    "W6": "first turns of the questions of --mt-bench, chat template, 80 at once, 64 out",
    "W7": "a question to a new process, 32 in, 64 out, nothing of nanopage compiled",
    "W8": "three questions, each to a new process, 32 in, 64 out, nothing of nanopage compiled at first",
}
# The engines that need an environment of their own, and the package that the environment must have.
PACKAGES = {
    "vllm": "vllm",
    "openvino": "openvino_genai",
    "llamacpp": "llama_cpp",
    "ctranslate2": "ctranslate2",
    "onnxruntime": "onnxruntime_genai",
}
ENGINES = ("nanopage", "transformers", "transformers_continuous", *PACKAGES)
ON_GPU = ("nanopage", "transformers", "transformers_continuous", "vllm")  # engines that --device cuda runs
WITH_INT4 = ("nanopage", "openvino", "llamacpp")
WITH_QUANTIZATION = {"int8": (*WITH_INT4, "ctranslate2", "onnxruntime"), "int4": WITH_INT4}
WITH_GGUF = ("nanopage", "llamacpp")  # engines that read .gguf files
# The variables that keep engines from using more than AVX2. torch reads the first one; vLLM asks torch (see
# peers/vllm.py), and nanopage compiles for what torch uses. The second one is for oneDNN, in torch and vLLM, and the
# third for the code that Inductor compiles. For llama.cpp, it is an option of its build: llamacpp-avx2.
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "TORCHINDUCTOR_CPP_MARCH": "x86-64-v3",
}
# No known option keeps the products of these engines from using AVX-512. OpenVINO has OV_CPU_MAX_ISA, but multiplies
# float32 with MLAS, which still uses AVX-512, as perf shows.
NOT_TOLD = ("openvino", "ctranslate2", "onnxruntime")
GIB = 2**30
SETTLE = 0.3  # seconds between two runs: OpenMP threads spin for up to 200 ms after their last work


@dataclass
class Results:
    """Everything measured, in the form of the JSON file. `runs`: workload -> engine -> one Run for each iteration; for
    W7 and W8, a Question for each process."""

    header: dict[str, str]
    busy_cores: int = 0
    rooflines: dict[str, Roofline] = field(default_factory=dict)  # on a CPU: workload -> speeds measured before it
    start: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)  # dtype -> engine -> what -> value
    runs: dict[str, dict[str, list[Run]]] = field(default_factory=dict)
    runs_beside: dict[str, dict[str, list[Run]]] = field(default_factory=dict)  # the same, beside busy cores
    idle_cpu_share: dict[str, float] = field(default_factory=dict)  # CPU seconds per second of idle engines
    failures: dict[str, str] = field(default_factory=dict)


@dataclass
class Setup:
    """The setup that all engines get."""

    path: Path  # the model's path
    config: ModelConfig
    pythons: dict[str, str]  # engine -> its interpreter
    device: str  # cpu or cuda
    quantization: str | None
    eager: bool
    threads: int
    warmup: int  # warm-up iterations
    busy: int  # number of busy cores (--busy), or 0
    batch_invariant: bool = False  # of nanopage


def compare(
    model: str | None,
    workloads: list[str],
    engines: list[str] | None,
    environments: Path,
    mt_bench: Path | None,
    device: str,
    dtype: str,
    eager: bool,
    batch_invariant: bool,
    quantization: str | None,
    num_iters: int,
    num_iters_warmup: int,
    seed: int,
    threads: int,
    busy: int,
    only_avx2: bool,
    json_file: Path | None,
) -> None:
    """Run everything, and print a table when a workload is done.

    Args:
        device: cpu or cuda.
        busy: how many cores other processes keep busy in a second run of each iteration. 0: no second runs.
        only_avx2: all engines use AVX2 and nothing newer.
    """
    gguf = model is not None and Path(model).suffix == ".gguf"
    if gguf and quantization:
        refuse("a .gguf file has a quantization of its own", "--quantization")
    acts_as_older = only_avx2 and cpu_has("avx512_f")
    pythons = python_of_engines(engines, environments, device, quantization, gguf, acts_as_older)
    if acts_as_older:
        os.environ.update(AVX2)  # for the engines, and for torch in this process
    path, config = find_model(model)
    if config.quantization is not None:
        refuse(f"{path} has weights in {config.quantization.method}, which the engines cannot all read", "--model")
    path = path.absolute() if gguf else path.resolve()  # a link's target may not end in .gguf
    questions = read_questions(mt_bench) if mt_bench else []
    rng = random.Random(seed)
    # Runs beside busy cores need other prompts than the runs alone, because a prefix cache already has those.
    num_runs = num_iters_warmup + num_iters * (2 if busy else 1)
    work = {
        name: [make_work(name, seed, rng, config, path, questions, i) for i in range(num_runs)] for name in workloads
    }
    for name, iterations in work.items():
        tokens, limit = longest(iterations), config.max_position_embeddings
        if tokens > limit:
            refuse(f"{name}: {tokens} tokens are more than the model's {limit}", "--workloads")
    setup = Setup(path, config, pythons, device, quantization, eager, threads, num_iters_warmup, busy, batch_invariant)
    about = header(path, device, dtype, quantization, seed, num_iters, num_iters_warmup, threads, busy, only_avx2)
    results = Results(about | ({"options of nanopage": "--batch-invariant"} if batch_invariant else {}), busy)
    show_header(results.header)
    with recorded(json_file, lambda: asdict(results)) as record:
        try:
            for batch_dtype in dict.fromkeys((dtype, "float32")):  # one after the other, to save memory
                batch = {name: work[name] for name in work if ("float32" if name == "W5" else dtype) == batch_dtype}
                for name in [name for name in batch if name in PROCESSES]:  # before any other engine has a process
                    run_questions(name, batch_dtype, batch.pop(name), setup, results)
                if batch:
                    compare_in(batch_dtype, batch, setup, results)
        finally:
            if results.start:
                show_start(results)
            for name, message in results.failures.items():
                console.print(f"[red]error:[/red] {name}: {plain(message)}", highlight=False)
    exit_unless(record.written, not results.failures)


def compare_in(dtype: str, work: dict[str, list[list[Work]]], setup: Setup, results: Results) -> None:
    """Start the engines in one dtype, and run the workloads."""
    peers: dict[str, Peer] = {}
    weights = None
    if setup.device == "cpu":  # on a GPU, the speeds of memory and products are not measured
        with errors_by_name():
            weights = read_weights(setup.path, setup.config, dtype, setup.quantization)
    try:
        start_all(peers, dtype, work, setup, results)
        for name, iterations in work.items():
            if weights is not None:
                speed = Speed(read_bandwidth(setup.threads), product_speed(setup.threads, dtype, setup.quantization))
                results.rooflines[name] = roofline(iterations[0], setup.config, weights, dtype, speed)
            run_workload(name, iterations, setup, list(peers), lambda *turn: [run_one(peers, *turn)], peers, results)
            show_workload(name, dtype, results, iterations[0])
        for peer in peers.values():
            peer.close()
    finally:
        for peer in peers.values():  # at once if something failed
            peer.kill()


def start_all(
    peers: dict[str, Peer], dtype: str, work: dict[str, list[list[Work]]], setup: Setup, results: Results
) -> None:
    """Start the engines in turn and add them to `peers`. Each answers a short request before the next one starts."""
    arguments = peer_arguments(dtype, work, setup)
    short = Work([random.Random(0).randrange(setup.config.vocab_size) for _ in range(8)], 1)
    start = results.start.setdefault(dtype, {})
    for name, python in setup.pythons.items():
        if name in results.failures:
            continue
        command = [python, "-m", f"benchmarks.peers.{name}", *arguments, "--compiled"]
        with console.status(f"{name} starts"):
            try:
                prepare([*command, "--prepare"], setup.threads)
                peers[name] = peer = Peer(command, setup.threads)
                results.header[name] = listed(peer.answer()["versions"])
                run = peer.ask([short])
            except PeerError as error:
                drop(name, error, peers, results.failures)
                continue
        start[name] = {"start_to_first_token": time.perf_counter() - peer.started, "peak_rss": run.peak_rss or 0}
        show_header({name: results.header[name]})


def peer_arguments(dtype: str, work: dict[str, list[list[Work]]], setup: Setup) -> list[str]:
    """The command line that all engines get (see protocol.Options)."""
    batches = [batch for iterations in work.values() for batch in iterations]
    tokens = max(sum(len(w.prompt) + w.output_len for w in batch) for batch in batches)
    tokens = 1024 * math.ceil(1.25 * tokens / 1024)  # 25 % more, because not all blocks are full
    kv_bytes = setup.config.num_layers * kv_bytes_of_a_layer(setup.config, dtype)
    kv_gib = max(2, math.ceil(tokens * kv_bytes / GIB))
    max_model_len = min(setup.config.max_position_embeddings, max(4096, longest(batches)))
    arguments = [str(setup.path), "--device", setup.device, "--dtype", dtype, "--threads", str(setup.threads)]
    arguments += ["--kv-tokens", str(tokens), "--kv-gib", str(kv_gib), "--max-model-len", str(max_model_len)]
    arguments += ["--eager"] if setup.eager else []
    arguments += ["--batch-invariant"] if setup.batch_invariant else []
    return arguments + (["--quantization", setup.quantization] if setup.quantization else [])


def longest(iterations: list[list[Work]]) -> int:
    """Tokens of the longest request, in and out."""
    return max(len(w.prompt) + w.output_len for batch in iterations for w in batch)


def run_questions(name: str, dtype: str, batches: list[list[Work]], setup: Setup, results: Results) -> None:
    """W7 and W8."""
    arguments = peer_arguments(dtype, {name: batches}, setup)
    commands = {
        engine: [python, "-m", f"benchmarks.peers.{engine}", *arguments] for engine, python in setup.pythons.items()
    }

    def ask(engine: str, work: list[Work], busy: int) -> list[Question]:
        questions, versions = ask_in_new_processes(engine, commands[engine], setup.threads, work, busy)
        if engine not in results.header:
            results.header[engine] = listed(versions)
            show_header({engine: results.header[engine]})
        return questions

    engines = []
    for engine in setup.pythons:
        try:
            prepare([*commands[engine], "--prepare"], setup.threads)
            engines.append(engine)
        except PeerError as error:
            drop(engine, error, {}, results.failures)
    run_workload(name, batches, setup, engines, ask, {}, results)
    show_questions(name, dtype, results)


def run_workload(
    name: str,
    batches: list[list[Work]],
    setup: Setup,
    engines: list[str],
    ask: Callable[[str, list[Work], int], Sequence[Run]],
    peers: dict[str, Peer],
    results: Results,
) -> None:
    """Let the engines take turns, iteration by iteration. If an engine fails, it is dropped, and the others go on.

    Args:
        batches: one for each iteration; with --busy, then one more for the second run of each measured iteration.
        ask: runs a batch on an engine beside a number of busy cores. Raises PeerError.
        peers: the processes that wait while they are not asked.
    """
    runs: dict[str, list[Run]] = {engine: [] for engine in engines}
    beside: dict[str, list[Run]] = {engine: [] for engine in engines}
    results.runs[name] = runs
    if setup.busy:
        results.runs_beside[name] = beside
    seconds = idle = 0.0
    num_iters = (len(batches) - setup.warmup) // (2 if setup.busy else 1)
    with console.status("") as status:
        for i in range(setup.warmup + num_iters):
            for engine in list(runs):
                measured = i >= setup.warmup
                label = f"{i - setup.warmup + 1}/{num_iters}" if measured else "warm-up"
                status.update(f"{name} {engine} {label}")
                before = {other: each.cpu_seconds() for other, each in peers.items() if other != engine}
                try:
                    alone = ask(engine, batches[i], 0)
                    again: Sequence[Run] = []
                    if setup.busy and measured:
                        status.update(f"{name} {engine} {label} beside {cores(setup.busy)}")
                        again = ask(engine, batches[i + num_iters], setup.busy)
                except PeerError as error:
                    drop(engine, error, peers, results.failures)
                    del runs[engine], beside[engine]
                    continue
                seconds += sum(run.seconds for run in (*alone, *again))
                idle += sum(peers[other].cpu_seconds() - used for other, used in before.items())
                if measured:
                    runs[engine] += alone
                    beside[engine] += again
    results.idle_cpu_share[name] = idle / seconds if seconds else 0.0


def run_one(peers: dict[str, Peer], engine: str, work: list[Work], busy: int) -> Run:
    """Run a batch while `busy` cores are busy with something else. Raises PeerError."""
    time.sleep(SETTLE)
    with busy_cores(busy):
        return peers[engine].ask(work)


def drop(name: str, error: PeerError, peers: dict[str, Peer], failures: dict[str, str]) -> None:
    """Close a peer that has failed, and record the reason."""
    failures[name] = str(error)
    console.print(f"[red]{name} failed[/red] and is left out from here on; why is said at the end", highlight=False)
    if peer := peers.pop(name, None):
        peer.close()


def show_workload(name: str, dtype: str, results: Results, work: list[Work]) -> None:
    runs = results.runs[name]
    roof = results.rooflines.get(name)
    single = len(work) == 1
    columns = ["", "output tok/s", "first token (ms)", "decode tok/s"]
    columns += ["prefill tok/s"] if single else ["time (s)"]
    columns += ["of the roofline"] if roof else []
    columns += [f"beside {cores(results.busy_cores)}"] if results.busy_cores else []
    columns += ["nanopage / this"] if "nanopage" in runs else []
    title = f"{name}: {WORKLOADS[name]}, {dtype}; medians [lowest-highest]"
    if roof:
        title += f"\nroofline {figure(roof.seconds)} s: memory {figure(roof.memory_seconds)} s at "
        title += f"{figure(roof.speed.read_gb_s)} GB/s, arithmetic {figure(roof.arithmetic_seconds)} s at "
        title += f"{figure(roof.speed.product_gflop_s)} GFLOP/s"
    table = table_of(title, columns)
    for engine, column in runs.items():
        speeds = [output_tok_s(run) for run in column]
        ttft, decode = median(run.ttft for run in column), median(run.decode_tok_s for run in column)
        # Without underscores a long name can be wrapped.
        cells = [engine.replace("_", " "), spread(speeds), figure(ttft and 1000 * ttft), figure(decode)]
        if single:
            cells.append(figure(ttft and len(work[0].prompt) / ttft))
        else:
            cells.append(figure(median(run.seconds for run in column)))
        if roof:
            cells.append(f"{roof.seconds / statistics.median(run.seconds for run in column):.0%}")
        if results.busy_cores:
            beside = results.runs_beside[name][engine]
            cells.append(beside_cell(column, beside, [output_tok_s(run) for run in beside]))
        if "nanopage" in runs:
            cells.append(ratio_cell(engine, runs["nanopage"], column))
        table.add_row(*cells)
    show_table(table)
    if (share := results.idle_cpu_share[name]) > 0.05:
        console.print(f"Engines that should have been idle used {share:.0%} of a core.", style="yellow")


def show_questions(name: str, dtype: str, results: Results) -> None:
    """A row for each process."""
    runs, count = results.runs[name], PROCESSES[name]
    columns = ["", "process", "wait before (s)"] if count > 1 else [""]
    columns += ["start to first token (s)", "decode tok/s", "start to end (s)"]
    columns += [f"beside {cores(results.busy_cores)} (s)"] if results.busy_cores else []
    columns += ["nanopage / this"] if "nanopage" in runs else []
    table = table_of(f"{name}: {WORKLOADS[name]}, {dtype}; medians [lowest-highest]", columns)
    for engine in runs:
        for i in range(count):
            column = [run for run in runs[engine][i::count] if isinstance(run, Question)]
            cells = [engine.replace("_", " ")]
            if count > 1:
                cells += [str(i + 1), figure(median(run.seconds_waited for run in column))]
            cells += [spread([run.ttft for run in column]), figure(median(run.decode_tok_s for run in column))]
            cells.append(spread([run.seconds for run in column]))
            if results.busy_cores:
                beside = results.runs_beside[name][engine][i::count]
                cells.append(beside_cell(column, beside, [run.seconds for run in beside]))
            if "nanopage" in runs:
                cells.append(ratio_cell(engine, runs["nanopage"][i::count], column))
            table.add_row(*cells)
    show_table(table)


def beside_cell(alone: Sequence[Run], beside: Sequence[Run], values: list[float]) -> str:
    """The median of the values, and the speed as a share of the speed without busy cores."""
    pairs = zip(alone, beside, strict=True)
    share = statistics.median(output_tok_s(b) / output_tok_s(a) for a, b in pairs)
    return f"{figure(statistics.median(values))} ({share:.0%})"


def ratio_cell(engine: str, ours: Sequence[Run], theirs: Sequence[Run]) -> str:
    """nanopage's speed over the engine's."""
    ratios = [output_tok_s(a) / output_tok_s(b) for a, b in zip(ours, theirs, strict=True)]
    return "1" if engine == "nanopage" else spread(ratios)


def show_start(results: Results) -> None:
    table = table_of("Start and memory", ["", "dtype", "process start to first token (s)", "peak RSS (GiB)"])
    for dtype, engines in results.start.items():
        names = [name for name in results.runs if ("float32" if name == "W5" else dtype) == dtype]
        for engine, figures in engines.items():
            runs = [run for name in names for run in results.runs[name].get(engine, [])]
            figures["peak_rss"] = max([figures["peak_rss"], *(run.peak_rss or 0 for run in runs)])
            rss = figure(figures["peak_rss"] / GIB or None)
            table.add_row(engine, dtype, figure(figures["start_to_first_token"]), rss)
    show_table(table)


def python_of_engines(
    engines: list[str] | None,
    environments: Path,
    device: str,
    quantization: str | None,
    gguf: bool,
    only_avx2: bool,
    option: str = "--engines",
) -> dict[str, str]:
    """Engine -> its interpreter, for the named engines or all that are installed. Raises BadParameter.

    Args:
        device: cpu or cuda.
        gguf: the model is a .gguf file.
        only_avx2: take the environment of llama.cpp that is compiled for AVX2, and leave out NOT_TOLD.
        option: the option that names the engines.
    """
    pythons = {}
    known = WITH_GGUF if gguf else WITH_QUANTIZATION[quantization] if quantization else ENGINES
    if only_avx2:
        known = tuple(name for name in known if name not in NOT_TOLD)
    if gguf and engines is None:
        others = ", ".join(name for name in ENGINES if name not in known)
        text = f"left out, because they cannot read a .gguf file: {others}"
        console.print(text, style="dim", highlight=False, soft_wrap=True)
    if device == "cuda":
        if engines is None:
            others = ", ".join(name for name in known if name not in ON_GPU)
            text = f"left out, because compare runs them on a CPU only: {others}"
            console.print(text, style="dim", highlight=False, soft_wrap=True)
        known = tuple(name for name in known if name in ON_GPU)
    for name in engines if engines is not None else known:
        if name not in known:
            which = f"one of the engines with --quantization {quantization}" if quantization else "one of"
            which = "one of the engines that read a .gguf file" if gguf else which
            which = "one of the engines that can be told to use AVX2 alone" if name in NOT_TOLD and only_avx2 else which
            which = "one of the engines that run on a GPU" if device == "cuda" else which
            refuse(f"{shown(name)} is not {which}: {', '.join(known)}", option)
        if name not in PACKAGES:
            pythons[name] = sys.executable
            continue
        home = environments / (f"{name}-avx2" if name == "llamacpp" and only_avx2 else name)
        home = environments / f"{name}-cuda" if device == "cuda" else home
        if any(home.glob(f"lib/python*/site-packages/{PACKAGES[name]}")):
            pythons[name] = str(home / "bin" / "python")
        elif engines is not None:
            how = ast.get_docstring(ast.parse((ROOT / "benchmarks" / "peers" / f"{name}.py").read_text()))
            refuse(f"{name} is not installed in {home}\n\n{how}", option)
        else:
            text = f"{name} is left out: it is not installed in {home}"
            console.print(plain(text), style="dim", highlight=False, soft_wrap=True)
    return pythons


def usable_threads() -> int:
    """How many logical processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_questions(file: Path) -> list[str]:
    """The first turns of an mt_bench question file: JSON lines with {"turns": [...]}."""
    questions = []
    for where, fields in read_json_lines(file, "--mt-bench"):
        turns = fields.get("turns")
        if not (isinstance(turns, list) and turns and isinstance(turns[0], str) and turns[0]):
            refuse(f'{where}: "turns" must be a list that begins with a text', "--mt-bench")
        check_text(turns[0], where, "--mt-bench")
        questions.append(turns[0])
    if not questions:
        refuse(f"{file} has no questions", "--mt-bench")
    return questions[:80]


def make_work(
    name: str, seed: int, rng: random.Random, config: ModelConfig, path: Path, questions: list[str], iteration: int
) -> list[Work]:
    """The requests of one iteration: lengths by `seed`, tokens by `rng`."""

    def tokens(count: int) -> list[int]:
        return [rng.randrange(config.vocab_size) for _ in range(count)]

    if name == "W1":
        return [Work(tokens(128), 128)]
    if name in ("W2", "W5"):
        lengths = random.Random(seed)
        return [Work(tokens(lengths.randint(32, 256)), lengths.randint(32, 128)) for _ in range(32)]
    if name == "W3":
        common = tokens(256)
        return [Work(common + tokens(16), 16) for _ in range(64)]
    if name == "W4":
        return [Work(tokens(1500), 128)]
    if name in PROCESSES:
        return [Work(tokens(32), 64) for _ in range(PROCESSES[name])]
    from nanopage.text.tokenizer import Tokenizer
    from nanopage.weights.loader import open_checkpoint

    tokenizer = Tokenizer(open_checkpoint(path))
    work = []
    for question in questions:
        # The number makes prompts differ in every iteration, except for the few tokens that the template puts first.
        messages = [{"role": "user", "content": f"{iteration}. {question}"}]
        with errors_by_name():
            text = tokenizer.render_chat(messages)
        work.append(Work(tokenizer.encode(text, add_special_tokens=False), 64))
    return work


def header(
    path: Path,
    device: str,
    dtype: str,
    quantization: str | None,
    seed: int,
    num_iters: int,
    num_iters_warmup: int,
    threads: int,
    busy: int,
    only_avx2: bool,
) -> dict[str, str]:
    again = f", each also beside {cores(busy)}" if busy else ""
    hardware, gpu = machine_state(device)
    return {
        "bench": f"compare, seed {seed}, {num_iters} iterations after {num_iters_warmup} to warm up{again}",
        "model": f"{path.name}, {dtype}" + (f", weights {quantization}" if quantization else ""),
        "device": f"{device}: {hardware}, {threads} threads" + (", AVX2 alone" if only_avx2 else ""),
        **gpu,
    }


def listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def cores(busy: int) -> str:
    return f"{busy} busy core{'s' if busy > 1 else ''}"


def output_tok_s(run: Run) -> float:
    return run.output_tokens / run.seconds


def median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
