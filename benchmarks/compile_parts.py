"""Measures what the engine compiles, part by part: the time to compile, and the size.

On a CPU, these are the parts of layers that are compiled ahead of time (cpu/aot.py). For a GPU, they are the pieces
between attentions (generated_code.py). A separate process compiles them with an empty cache, so nothing is reused.

    python -m benchmarks.compile_parts SPEC DIRECTORY [DTYPE]     compiles all parts; prints their times as JSON
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report import console, figure, show_table, table_of

CONFIGS = Path(__file__).parent / "configs"
FAMILIES = (
    *(("Llama-3.1-8B", None), ("Llama-3.1-8B", "int8"), ("Qwen3-0.6B", None), ("Qwen3-0.6B", "int8")),
    *(("gemma-3-270m", None), ("gemma-3-270m", "int8"), ("Mixtral-8x7B", None)),  # experts stay floats on a GPU
)
PRODUCTS = "tile_linear"  # multiplies by weights in tiles in eager steps
COLUMNS = ("s", "export", "Inductor", "C++", "MB", "load ms")
KEYS = ("seconds", "export", "inductor", "compiler", "megabytes", "load_ms")


def run_module(name: str, home: str, *arguments: str) -> Any:
    """Run a module as a program with its caches in `home`. Returns the JSON that it prints. Raises: RuntimeError."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= dict.fromkeys(("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TMPDIR"), home)
    environment["PYTHONPATH"] = str(CONFIGS.parents[1])
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", name, *arguments]
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:
        try:
            printed, log = process.communicate()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # the C++ compilers that it runs, too
    if process.returncode:
        raise RuntimeError(f"compiling failed:\n{log[-2000:]}")
    return json.loads(printed.splitlines()[-1])


def compile_for_cpu(engine: Any, results: dict[str, Any]) -> None:
    """Compile and load what this engine would compile. Fills "parts". For the parts of layers and the head, also fills
    "seconds" (all of them together) and "seconds_before" (until the first one began).

    Raises: ValueError if the engine compiles nothing.
    """
    worker = engine.executor.worker
    if (compiled := worker.compiled) is None:
        raise ValueError(f"nothing to compile: steps run {worker.way}")
    if not compiled.may_compile:
        raise ValueError("NANOPAGE_COMPILE=never: nothing is compiled")
    with_products = worker.wings.stored_as is not None or engine.model_config.experts is not None
    with tempfile.TemporaryDirectory() as home, console.status("compiling"):
        directory = Path(home, "layers")
        directory.mkdir(mode=0o700)
        arguments = [json.dumps(compiled.spec), str(directory), *([compiled.spec["dtype"]] if with_products else [])]
        made = run_module("benchmarks.compile_parts", home, *arguments)
        results |= {name: made[name] for name in ("seconds", "seconds_before")}
        parts = results["parts"] = []
        for name, times in made["parts"].items():
            part, rows = compiled.files.get(name, ("eager products", ""))
            folder = directory if name != PRODUCTS else next(Path(home, "nanopage", "compiled").iterdir())
            parts.append({"part": part, "rows": rows, **times, **load(folder, name, compiled.spec["threads"])})
    table = table_of("Compiled ahead of time", ["", "rows", *COLUMNS])
    for row in (*parts, {"part": "sum", "rows": ""} | {key: sum(part.get(key, 0) for part in parts) for key in KEYS}):
        table.add_row(row["part"], row["rows"], *(figure(row.get(key)) for key in KEYS))
    show_table(table)
    everything, before = figure(results["seconds"]), figure(results["seconds_before"])
    text = (
        f"layers and head: {everything} s; the first part began after {before} s, then several were compiled at a time"
    )
    console.print(text, highlight=False)


def load(directory: Path, name: str, threads: int) -> dict[str, float]:
    """Check a compiled file and load it, as an engine does. Returns megabytes and milliseconds."""
    from nanopage.cpu.aot_chain import Chain, Library
    from nanopage.cpu.aot_parts import CHAIN
    from nanopage.cpu.aot_products import CompiledProduct
    from nanopage.cpu.compiled_files import find_whole

    started = time.perf_counter()
    file = find_whole(directory, name)
    loaders: dict[str, Any] = {CHAIN: Chain, PRODUCTS: partial(CompiledProduct, name=PRODUCTS)}
    loaders.get(name, partial(Library, count=threads))(file)
    return {"megabytes": file.stat().st_size / 1e6, "load_ms": 1000 * (time.perf_counter() - started)}


def time_part(spec: dict[str, Any], config: Any, directory: Path, name: str) -> tuple[float, dict[str, float]]:
    """Compile a part, in a forked process. Returns: the start, by the system's clock, and durations in seconds."""
    from torch._dynamo.utils import compilation_time_metrics as phases

    from nanopage.cpu.aot_compile import make_part

    phases.clear()
    begun = time.time()
    make_part(spec, config, directory, name)
    seconds = time.time() - begun
    if "compile_file" not in phases:
        return begun, {"seconds": seconds, "compiler": seconds}  # the whole part is C++
    inductor, compiler = sum(phases["fx_codegen_and_compile"]), sum(phases["compile_file"])
    times = {"seconds": seconds, "export": seconds - inductor, "inductor": inductor - compiler, "compiler": compiler}
    return begun, times


def main(started: float, spec: str, directory: str, dtype: str | None = None) -> None:
    """Args: started: the time when this process was started. dtype: the dtype of eager steps' products, if any."""
    import torch

    from nanopage.cpu.aot_compile import main as compile_all
    from nanopage.cpu.aot_products import tile_product

    made = compile_all(json.loads(spec), Path(directory), time_part)
    ended, parts = time.time(), {name: times for name, (_, times) in made.items()}
    if dtype is not None:
        tile_product(getattr(torch, dtype))
        parts[PRODUCTS] = dict.fromkeys(("seconds", "compiler"), time.time() - ended)
    before = min(begun for begun, _ in made.values()) - started
    print(json.dumps({"parts": parts, "seconds": ended - started, "seconds_before": before}))


def compile_for_gpu(path: Path, switches: dict[str, Any], results: dict[str, Any]) -> None:
    """Compile the pieces of a model for a GPU, and the pieces of other families from one attention to the next. Fills
    "pieces" and "families"."""
    own = {"model": str(path), "dtype": switches["dtype"], "quantization": switches["quantization"]}
    small = {"num_layers": 2, "pieces": ["between"]}
    others = [{"model": str(CONFIGS / name), "quantization": kind, **small} for name, kind in FAMILIES]
    with tempfile.TemporaryDirectory() as home, console.status("compiling"):
        own_pieces, *found = run_module("benchmarks.generated_code", home, json.dumps([own, *others]))
    results["pieces"], results["families"] = own_pieces, []
    columns = ["tokens", "s", "KB of code", "fused", "cuBLAS", "others", "kernels"]
    table = table_of("Pieces", ["", *columns])
    for piece in own_pieces:
        table.add_row(piece["piece"], *cells(piece))
    show_table(table)
    table = table_of("Families, from one attention to the next", ["", "weights", *columns])
    for (name, kind), pieces in zip(FAMILIES, found, strict=True):
        for piece in pieces:
            results["families"].append({"family": name, "quantization": kind, **piece})
            table.add_row(name, kind or "bfloat16", *cells(piece))
    show_table(table)


def cells(piece: dict[str, Any]) -> list[str]:
    """The cells of a piece in the tables."""
    kinds = Counter(name.rpartition(".")[0] for name in piece["launches"])  # "": kernels of Triton
    counts = [kinds[""], kinds["extern_kernels"], kinds["torch.ops.aten"] + piece["inside"]]
    sizes = figure(piece["seconds"]), figure(piece["size"] / 1e3)
    return [str(piece["tokens"]), *sizes, *map(str, (*counts, sum(counts)))]


if __name__ == "__main__":
    main(time.time(), *sys.argv[1:])
