"""What bench.py and an engine in its own process say to each other: JSON lines on the engine's stdin and stdout.

    DIR/vllm/bin/python -m benchmarks.peers.vllm MODEL --dtype bfloat16 --threads 2 --kv-gib 2 --kv-tokens 8192 \
        --max-model-len 4096

The engine loads and answers {"versions": {...}}. From then on every line
{"prompts": [[ids], ...], "output_lens": [...]} is answered with a `Run`, until stdin is closed. This file needs only
the standard library, so it runs in any environment.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import select
import shutil
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO


@dataclass
class Options:
    """The options of every engine. An engine that cannot follow them raises."""

    model: Path  # a Hugging Face directory; for the engines in compare.WITH_GGUF, also a .gguf file
    device: str  # cpu; for the engines in compare.ON_GPU also cuda
    dtype: str  # of weights, activations and KV (llama.cpp's KV is float16 with bfloat16): bfloat16 or float32
    threads: int
    kv_tokens: int  # that the KV cache must hold at least
    kv_gib: int  # the same as a size, for engines that take one
    max_model_len: int  # most tokens of a request, prompt and output
    eager: bool  # nanopage only: nothing compiled
    compiled: bool  # nanopage only: compile everything before the first answer, unless eager
    quantization: str | None  # of the weights: "int8" or "int4", for the engines in compare.WITH_QUANTIZATION
    draft_tokens: int = 0  # most tokens of a draft found in the context, for the engines in speculation.PEERS; 0: none
    batch_invariant: bool = False  # nanopage only: as in EngineConfig


@dataclass
class Work:
    """One request: token ids in, how many to generate."""

    prompt: list[int]
    output_len: int


@dataclass
class Output:
    """The result of one request; times of its first and last token on `time.perf_counter`'s clock, if known."""

    token_ids: list[int]
    first: float | None = None
    last: float | None = None


@dataclass
class Run:
    """One batch of requests, times in seconds. `ttft` and `decode_tok_s` are means over the requests; `decode_seconds`
    is the time from the last first token to the last token of all."""

    seconds: float
    output_tokens: int
    total_tokens: int
    ttft: float | None = None
    decode_tok_s: float | None = None
    peak_rss: int | None = None  # bytes, since the process was started
    decode_seconds: float | None = None


Engine = Callable[[list[Work]], list[Output]]


def measure(engine: Engine, work: list[Work]) -> Run:
    """Run a batch. Raises RuntimeError if a request did not get exactly the tokens asked for."""
    started = time.perf_counter()
    outputs = engine(work)
    seconds = time.perf_counter() - started
    pairs = list(zip(outputs, work, strict=True))
    if wrong := [str(i) for i, (output, w) in enumerate(pairs) if len(output.token_ids) != w.output_len]:
        raise RuntimeError(f"requests {', '.join(wrong)} did not give the tokens asked for")
    firsts = [output.first - started for output in outputs if output.first is not None]
    speeds = [
        (w.output_len - 1) / (output.last - output.first)
        for output, w in pairs
        if output.first is not None and output.last is not None and output.last > output.first
    ]
    return Run(
        seconds,
        sum(w.output_len for w in work),
        sum(len(w.prompt) + w.output_len for w in work),
        statistics.mean(firsts) if firsts else None,
        statistics.mean(speeds) if speeds else None,
        peak_rss(),
        decode_time(outputs),
    )


def decode_time(outputs: list[Output]) -> float | None:
    """`Run.decode_seconds`."""
    firsts = [output.first for output in outputs if output.first is not None]
    lasts = [output.last for output in outputs if output.last is not None]
    return max(lasts) - max(firsts) if firsts and lasts else None


def serve(
    load: Callable[[Options], tuple[dict[str, str], Engine]], prepare: Callable[[Options], None] = lambda options: None
) -> None:
    """Run an engine in this process: answer requests until stdin is closed.

    Args:
        load: returns versions by name, and the engine.
        prepare: makes what the engine needs and keeps, such as the weights in its own format; run by --prepare, so
            that the time to start does not count it.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--kv-tokens", type=int, required=True)
    parser.add_argument("--kv-gib", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--quantization", choices=["int8", "int4"])
    parser.add_argument("--draft-tokens", type=int, default=0)
    parser.add_argument("--prepare", action="store_true")
    arguments = vars(parser.parse_args())
    only_prepare = arguments.pop("prepare")
    options = Options(**arguments)
    threading.Thread(target=end_with, args=[os.getppid()], daemon=True).start()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print, from C as well, goes to the log
    if only_prepare:
        prepare(options)
        return
    versions, engine = load(options)
    answer({"versions": versions}, answers)
    for line in sys.stdin:
        request = json.loads(line)
        work = [Work(*pair) for pair in zip(request["prompts"], request["output_lens"], strict=True)]
        answer(asdict(measure(engine, work)), answers)


def end_with(parent: int) -> None:
    """Wait until `parent`, bench.py, has died, and kill this process and its descendants, whatever they are doing. A
    parent that lives closes stdin when it needs no more answers: then the engine ends by itself."""
    hangup = select.poll()
    hangup.register(0, 0)  # no events: a closed end is always reported
    hangup.poll()
    while os.getppid() == parent:
        time.sleep(0.1)
    for pid in reversed(list(process_tree())):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(1)  # where there is no /proc


def answer(message: dict, answers: TextIO) -> None:
    print(json.dumps(message), file=answers, flush=True)


def peak_rss() -> int | None:
    """Bytes: VmHWM of this process and of its descendants, added up. None where there is no /proc."""
    total = 0
    for pid in process_tree():
        with contextlib.suppress(OSError):  # it has ended
            if peak := re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()):
                total += int(peak[1]) * 1024
    return total or None


def process_tree() -> Iterator[int]:
    """The ids of this process and of its descendants, parents first."""
    pids = [os.getpid()]
    for pid in pids:  # grows during the loop
        yield pid
        with contextlib.suppress(OSError):  # it has ended, or there is no /proc
            for task in Path(f"/proc/{pid}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())


def common_prefix(texts: list[list[int]]) -> int:
    """The length of the common prefix of all texts. It leaves out the last token of a text, whose logits are needed."""
    first, last = min(texts), max(texts)
    most = min(len(text) for text in texts) - 1
    return next((i for i in range(most) if first[i] != last[i]), most)


def similar_prompts(work: list[Work], size: int = 16, spread: int = 64) -> list[list[int]]:
    """Static batches for engines that have no others, as indices into `work`: shortest prompts first, at most `size`
    requests, whose prompts differ by at most `spread` tokens."""
    batches: list[list[int]] = []
    for i in sorted(range(len(work)), key=lambda i: len(work[i].prompt)):
        if batches and len(batches[-1]) < size and len(work[i].prompt) - len(work[batches[-1][0]].prompt) <= spread:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def converted(options: Options, form: str) -> Path:
    """Where this environment keeps the model in a form of its own. The path changes when the model's files do."""
    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(options.model.iterdir())]
    key = hashlib.sha256(repr((options.model.resolve(), files)).encode()).hexdigest()[:12]
    return Path(sys.prefix) / "models" / f"{options.model.resolve().name}-{key}-{form}"


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Write to the path that this yields; `path` appears when all is written, or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    if partial.is_dir():  # of a process that was killed
        shutil.rmtree(partial)
    yield partial
    os.replace(partial, path)
