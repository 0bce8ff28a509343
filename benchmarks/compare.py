"""The same requests on nanopage and on its peers, each in its own process, in turn.

A workload fixes the lengths. The prompts are random token ids, new in every iteration: a prefix cache, which every
engine may use, helps within an iteration and not across two. W6 has questions instead, of which a cache finds only what
the chat template puts first. One engine works at a time.
"""

import ast
import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, cast

import psutil

from benchmarks.busy import busy_cores
from benchmarks.checks import find_model, refuse, shown
from benchmarks.datasets import check_text, read_json_lines
from benchmarks.machine import cpu_has, cpu_name, product_speed, read_bandwidth
from benchmarks.outputs import exit_unless, recorded
from benchmarks.peers.protocol import Run, Work
from benchmarks.report import console, errors_by_name, figure, plain, show_header, show_table, spread, table_of
from benchmarks.roofline import Roofline, Speed, kv_bytes_of_a_layer, read_weights, roofline
from nanopage.config import ModelConfig

WORKLOADS = {
    "W1": "1 request, 128 in, 128 out",
    "W2": "32 requests at once, 32-256 in, 32-128 out",
    "W3": "64 requests at once, 256 common and 16 own tokens in, 16 out",
    "W4": "1 request, 1500 in, 128 out",
    "W5": "W2 in float32",
    "W6": "first turns of the questions of --mt-bench, chat template, 80 at once, 64 out",
}
# The engines that need an environment of their own, and the package that it must have.
PACKAGES = {"vllm": "vllm", "openvino": "openvino_genai", "llamacpp": "llama_cpp"}
ENGINES = ("nanopage", "transformers", "transformers_continuous", *PACKAGES)
WITH_INT8 = ("nanopage", "openvino", "llamacpp")  # engines that take --quantization
# What keeps engines from using more than AVX2. torch reads the first variable; vLLM asks torch (see peers/vllm.py), and
# nanopage compiles for what torch uses. The second is oneDNN's, in torch, vLLM and OpenVINO; the third is of OpenVINO's
# own loops; the fourth, of the code that Inductor compiles. llama.cpp is told when it is compiled: llamacpp-avx2.
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OV_CPU_MAX_ISA": "AVX2",
    "TORCHINDUCTOR_CPP_MARCH": "x86-64-v3",
}
ROOT = Path(__file__).parent.parent
GIB = 2**30
SETTLE = 0.3  # seconds between two runs: OpenMP threads spin for up to 200 ms after their last work


class PeerError(RuntimeError):
    """An engine's process ended before it answered; the message has the end of its log."""


class Peer:
    """An engine in its own process (see peers/protocol.py)."""

    def __init__(self, command: list[str], threads: int):
        self.log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed with the process)
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,  # python -m imports from here first, and not from the folder that bench.py was started in
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            start_new_session=True,  # so that Ctrl-C does not reach it, and what it starts can be ended with it
        )
        self.requests = cast(IO[str], self.process.stdin)
        self.answers = cast(IO[str], self.process.stdout)

    def ask(self, work: list[Work]) -> Run:
        """Run a batch. Raises PeerError."""
        request = {"prompts": [w.prompt for w in work], "output_lens": [w.output_len for w in work]}
        try:
            self.requests.write(json.dumps(request) + "\n")
            self.requests.flush()
        except BrokenPipeError:
            raise self.error() from None
        return Run(**self.answer())

    def answer(self) -> dict:
        """The next line that the engine writes. Raises PeerError."""
        line = self.answers.readline()
        if not line.endswith("\n"):
            raise self.error()
        return json.loads(line)

    def error(self) -> PeerError:
        code = self.process.wait()
        self.log.seek(0)
        return PeerError("\n".join([f"exit code {code}", *self.log.read().splitlines()[-15:]]))

    def cpu_seconds(self) -> float:
        """CPU time of the process and of its children until now."""
        total = 0.0
        for each in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = each.cpu_times()
                total += times.user + times.system
        return total

    def processes(self) -> list[psutil.Process]:
        """The process and its descendants, also in sessions of their own. Empty when the process has ended."""
        if self.process.poll() is not None:  # its id may be another process's by now
            return []
        try:
            process = psutil.Process(self.process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def close(self) -> None:
        """Let the engine end by itself, then kill what is left."""
        with contextlib.suppress(BrokenPipeError):  # it has ended
            self.requests.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.kill()

    def kill(self) -> None:
        """End the process and all that it has started. Does nothing the second time."""
        if self.log.closed:
            return
        for each in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        with contextlib.suppress(ProcessLookupError):  # processes that outlived their parent
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()


@dataclass
class Results:
    """Everything measured, as the JSON file has it. `runs`: workload -> engine -> one Run for each iteration."""

    header: dict[str, str]
    busy_cores: int = 0
    rooflines: dict[str, Roofline] = field(default_factory=dict)  # workload -> its speeds measured just before it
    start: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)  # dtype -> engine -> what -> value
    runs: dict[str, dict[str, list[Run]]] = field(default_factory=dict)
    runs_beside: dict[str, dict[str, list[Run]]] = field(default_factory=dict)  # the same, beside busy cores
    idle_cpu_share: dict[str, float] = field(default_factory=dict)  # CPU seconds a second of engines not at work
    failures: dict[str, str] = field(default_factory=dict)


@dataclass
class Setup:
    """What all engines get."""

    path: Path  # of the model
    config: ModelConfig
    pythons: dict[str, str]  # engine -> its interpreter
    quantization: str | None
    eager: bool
    threads: int
    warmup: int  # iterations
    busy: int  # cores of --busy, or 0


def compare(
    model: str | None,
    workloads: list[str],
    engines: list[str] | None,
    environments: Path,
    mt_bench: Path | None,
    dtype: str,
    eager: bool,
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
        busy: cores that other processes keep busy in a second run of each iteration; 0: no such runs.
        only_avx2: all engines use AVX2 and nothing newer.
    """
    acts_as_older = only_avx2 and cpu_has("avx512_f")
    pythons = python_of_engines(engines, environments, quantization, acts_as_older)
    if acts_as_older:
        os.environ.update(AVX2)  # for the engines, and for torch in this process
    path, config = find_model(model)
    path = path.resolve()
    if path.suffix == ".gguf":
        refuse("compare needs a Hugging Face directory: most peers cannot read a .gguf file", "--model")
    questions = read_questions(mt_bench) if mt_bench else []
    rng = random.Random(seed)
    # The runs beside busy cores have prompts of their own, because a prefix cache knows those of the runs alone.
    num_runs = num_iters_warmup + num_iters * (2 if busy else 1)
    work = {
        name: [make_work(name, seed, rng, config, path, questions, i) for i in range(num_runs)] for name in workloads
    }
    for name, iterations in work.items():
        tokens, limit = longest(iterations), config.max_position_embeddings
        if tokens > limit:
            refuse(f"{name}: {tokens} tokens are more than the model's {limit}", "--workloads")
    setup = Setup(path, config, pythons, quantization, eager, threads, num_iters_warmup, busy)
    results = Results(
        header(path, dtype, quantization, seed, num_iters, num_iters_warmup, threads, busy, only_avx2), busy
    )
    show_header(results.header)
    with recorded(json_file, lambda: asdict(results)) as record:
        try:
            for batch_dtype in dict.fromkeys((dtype, "float32")):  # one after the other, to save memory
                batch = {name: work[name] for name in work if ("float32" if name == "W5" else dtype) == batch_dtype}
                if batch:
                    compare_in(batch_dtype, batch, setup, results)
        finally:
            show_start(results)
            for name, message in results.failures.items():
                console.print(f"[red]error:[/red] {name}: {plain(message)}", highlight=False)
    exit_unless(record.written, not results.failures)


def compare_in(dtype: str, work: dict[str, list[list[Work]]], setup: Setup, results: Results) -> None:
    """Start the engines in one dtype, and run the workloads."""
    peers: dict[str, Peer] = {}
    with errors_by_name():
        weights = read_weights(setup.path, setup.config, dtype, setup.quantization)
    try:
        start_all(peers, dtype, work, setup, results)
        for name, iterations in work.items():
            speed = Speed(read_bandwidth(setup.threads), product_speed(setup.threads, dtype, setup.quantization))
            results.rooflines[name] = roofline(iterations[0], setup.config, weights, dtype, speed)
            run_workload(name, iterations, setup.warmup, setup.busy, peers, results)
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
        command = [python, "-m", f"benchmarks.peers.{name}", *arguments]
        command += ["--eager"] if name == "nanopage" and setup.eager else []
        with console.status(f"{name} starts"):
            try:
                prepare([*command, "--prepare"], setup.threads)
                peers[name] = peer = Peer(command, setup.threads)
                results.header[name] = ", ".join(f"{k} {v}" for k, v in peer.answer()["versions"].items())
                run = peer.ask([short])
            except PeerError as error:
                drop(name, error, peers, results)
                continue
        start[name] = {"start_to_first_token": time.perf_counter() - peer.started, "peak_rss": run.peak_rss or 0}
        show_header({name: results.header[name]})


def peer_arguments(dtype: str, work: dict[str, list[list[Work]]], setup: Setup) -> list[str]:
    """The command line that all engines get (see protocol.Options)."""
    batches = [batch for iterations in work.values() for batch in iterations]
    tokens = max(sum(len(w.prompt) + w.output_len for w in batch) for batch in batches)
    tokens = 1024 * math.ceil(1.25 * tokens / 1024)  # some more: blocks are not all full
    kv_bytes = setup.config.num_layers * kv_bytes_of_a_layer(setup.config, dtype)
    kv_gib = max(2, math.ceil(tokens * kv_bytes / GIB))
    max_model_len = min(setup.config.max_position_embeddings, max(4096, longest(batches)))
    arguments = [str(setup.path), "--dtype", dtype, "--threads", str(setup.threads), "--kv-tokens", str(tokens)]
    arguments += ["--kv-gib", str(kv_gib), "--max-model-len", str(max_model_len)]
    return arguments + (["--quantization", setup.quantization] if setup.quantization else [])


def longest(iterations: list[list[Work]]) -> int:
    """Tokens of the longest request, in and out."""
    return max(len(w.prompt) + w.output_len for batch in iterations for w in batch)


def prepare(command: list[str], threads: int) -> None:
    """Let an engine make what it keeps on disk. Raises PeerError."""
    peer = Peer(command, threads)
    try:
        if peer.process.wait():
            raise peer.error()
    finally:
        peer.kill()


def run_workload(
    name: str, batches: list[list[Work]], warmup: int, busy: int, peers: dict[str, Peer], results: Results
) -> None:
    """Let the engines take turns, iteration by iteration. One that fails is dropped, and the others go on.

    Args: batches: one for each iteration; with `busy`, then one more for the second run of each measured iteration.
    """
    runs: dict[str, list[Run]] = {engine: [] for engine in peers}
    beside: dict[str, list[Run]] = {engine: [] for engine in peers}
    results.runs[name] = runs
    if busy:
        results.runs_beside[name] = beside
    seconds = idle = 0.0
    num_iters = (len(batches) - warmup) // (2 if busy else 1)
    with console.status("") as status:
        for i in range(warmup + num_iters):
            for engine, peer in list(peers.items()):
                measured = i >= warmup
                label = f"{i - warmup + 1}/{num_iters}" if measured else "warm-up"
                status.update(f"{name} {engine} {label}")
                before = {other: each.cpu_seconds() for other, each in peers.items() if other != engine}
                try:
                    done = [run_one(peer, batches[i], 0)]
                    if busy and measured:
                        status.update(f"{name} {engine} {label} beside {cores(busy)}")
                        done.append(run_one(peer, batches[i + num_iters], busy))
                except PeerError as error:
                    drop(engine, error, peers, results)
                    del runs[engine], beside[engine]
                    continue
                seconds += sum(run.seconds for run in done)
                idle += sum(peers[other].cpu_seconds() - used for other, used in before.items())
                if measured:
                    runs[engine].append(done[0])
                    beside[engine] += done[1:]
    results.idle_cpu_share[name] = idle / seconds if seconds else 0.0


def run_one(peer: Peer, work: list[Work], busy: int) -> Run:
    """Run a batch while `busy` cores are busy with something else. Raises PeerError."""
    time.sleep(SETTLE)
    with busy_cores(busy):
        return peer.ask(work)


def drop(name: str, error: PeerError, peers: dict[str, Peer], results: Results) -> None:
    results.failures[name] = str(error)
    console.print(f"[red]{name} failed[/red] and is left out from here on; why is said at the end", highlight=False)
    if peer := peers.pop(name, None):
        peer.close()


def show_workload(name: str, dtype: str, results: Results, work: list[Work]) -> None:
    runs = results.runs[name]
    roof = results.rooflines[name]
    single = len(work) == 1
    columns = ["", "output tok/s", "first token (ms)", "decode tok/s"]
    columns += ["prefill tok/s"] if single else ["time (s)"]
    columns += ["of the roofline"]
    columns += [f"beside {cores(results.busy_cores)}"] if results.busy_cores else []
    columns += ["nanopage / this"] if "nanopage" in runs else []
    title = f"{name}: {WORKLOADS[name]}, {dtype}; medians [lowest-highest]"
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
        cells.append(f"{roof.seconds / statistics.median(run.seconds for run in column):.0%}")
        if results.busy_cores:
            beside = [output_tok_s(run) for run in results.runs_beside[name][engine]]
            share = statistics.median(b / a for a, b in zip(speeds, beside, strict=True))
            cells.append(f"{figure(statistics.median(beside))} ({share:.0%})")
        if "nanopage" in runs:
            ours = [output_tok_s(run) for run in runs["nanopage"]]
            ratios = [a / b for a, b in zip(ours, speeds, strict=True)]
            cells.append("1" if engine == "nanopage" else spread(ratios))
        table.add_row(*cells)
    show_table(table)
    if (share := results.idle_cpu_share[name]) > 0.05:
        console.print(f"Engines that should have been idle used {share:.0%} of a core.", style="yellow")


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
    engines: list[str] | None, environments: Path, quantization: str | None, only_avx2: bool
) -> dict[str, str]:
    """Engine -> its interpreter, for the named engines or all that are installed. Raises BadParameter.

    Args: only_avx2: of engines that are compiled for an instruction set, take those compiled for AVX2.
    """
    pythons = {}
    known = WITH_INT8 if quantization else ENGINES
    for name in engines if engines is not None else known:
        if name not in known:
            which = f"one of the engines with --quantization {quantization}" if quantization else "one of"
            refuse(f"{shown(name)} is not {which}: {', '.join(known)}", "--engines")
        if name not in PACKAGES:
            pythons[name] = sys.executable
            continue
        home = environments / (f"{name}-avx2" if name == "llamacpp" and only_avx2 else name)
        if any(home.glob(f"lib/python*/site-packages/{PACKAGES[name]}")):
            pythons[name] = str(home / "bin" / "python")
        elif engines is not None:
            how = ast.get_docstring(ast.parse((ROOT / "benchmarks" / "peers" / f"{name}.py").read_text()))
            refuse(f"{name} is not installed in {home}\n\n{how}", "--engines")
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
    from nanopage.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(path)
    work = []
    for question in questions:
        # The number makes the prompts new in every iteration, after the few tokens that the template puts first.
        messages = [{"role": "user", "content": f"{iteration}. {question}"}]
        with errors_by_name():
            text = tokenizer.render_chat(messages)
        work.append(Work(tokenizer.encode(text, add_special_tokens=False), 64))
    return work


def header(
    path: Path,
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
    return {
        "bench": f"compare, seed {seed}, {num_iters} iterations after {num_iters_warmup} to warm up{again}",
        "model": f"{path.name}, {dtype}" + (f", weights {quantization}" if quantization else ""),
        "device": f"cpu: {cpu_name()}, {threads} threads" + (", AVX2 alone" if only_avx2 else ""),
    }


def cores(busy: int) -> str:
    return f"{busy} busy core{'s' if busy > 1 else ''}"


def output_tok_s(run: Run) -> float:
    return run.output_tokens / run.seconds


def median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
