"""Memory of a context, and time of a decode after it: of layers with windows, with states or with neither.

`python -m benchmarks.contexts` compares models of random weights, and those whose layers are of several types with the
same model whose layers all attend to everything. Contexts are not computed: a sequence gets its blocks, filled with
zeros, and decodes after them, which takes as long as after a real context.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.machine import cpu_name, versions
from benchmarks.report import console, figure, show_table, table_of
from nanopage import EngineConfig
from nanopage.build import build_engine
from nanopage.engine.block_manager import BlockManager
from nanopage.reading.config import config_from_dict
from nanopage.state.layer_kinds import BlockNeeds
from nanopage.step import Batch, BlockUpdate, NewSequence, SamplingSettings

CONFIGS = Path(__file__).parent / "configs"
MODELS = [CONFIGS / "gemma-3-270m", CONFIGS / "LFM2-350M"]
CONTEXTS = 1, 2048, 8192, 32512  # tokens; the decodes follow
NUM_STEPS = 40
app = typer.Typer(add_completion=False)


@app.command()
def main(
    models: Annotated[
        list[Path] | None, typer.Argument(help="Directories with a config.json. None: two of ours.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "auto",
    eager: Annotated[bool, typer.Option("--eager", help="Without compiled layers.")] = False,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a prompt that a step computes.")] = 512,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
) -> None:
    """Measure memory and time of a decode at several lengths of the context."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for model in models or MODELS:
            rows += measure(model.name, model, dtype, eager, chunk)
            if (path := with_attention(model, Path(scratch))) is not None:
                rows += measure(f"{model.name}, all layers attend to everything", path, dtype, eager, chunk)
    table = table_of(
        f"{rows[0]['dtype']}, {rows[0]['way']}",
        ["", "context", "blocks", "MiB", "MiB at most, in a prompt", "ms a decode"],
    )
    for row in rows:
        sizes = figure(row["mib"]), figure(row["most_mib"]), figure(row["decode_ms"])
        table.add_row(row["name"], f"{row['context']:,}", f"{row['blocks']:,}", *sizes)
    show_table(table)
    if json_file is not None:
        header = {"chunk": chunk, "cpu": cpu_name(), "versions": versions()}
        json_file.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")
        console.print(f"written to {json_file}")


def with_attention(model: Path, directory: Path) -> Path | None:
    """The same model whose layers all attend to everything, in `directory`. None: they do."""
    config = json.loads((model / "config.json").read_text())
    if config_from_dict(config).sliding_windows == (None,) * config["num_hidden_layers"]:
        return None
    config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def measure(name: str, path: Path, dtype: str, eager: bool, chunk: int) -> list[dict]:
    """One row for each of CONTEXTS."""
    longest = max(CONTEXTS) + NUM_STEPS + 1
    options = {"max_num_seqs": 1, "load_format": "dummy", "max_model_len": longest, "enforce_eager": eager}
    engine = build_engine(EngineConfig(model=str(path), dtype=dtype, **options))
    executor: Any = engine.executor  # a LocalExecutor
    size, capacity = engine.config.block_size, engine.capacity
    if not eager:
        executor.compile()
    cache = executor.worker.kv_cache.tensor
    mib = cache.nbytes / capacity.num_blocks / 2**20  # size of a block
    cache.zero_()
    rows = []
    for context in CONTEXTS:
        manager = BlockManager(capacity.num_blocks, size, windows=capacity.windows)
        held, seconds = decode(executor, manager, context, chunk)
        most = BlockNeeds(capacity.windows, size, chunk).of([context + NUM_STEPS])
        rows.append(
            {
                "name": name,
                "context": context,
                "blocks": held,
                "mib": held * mib,
                "most_mib": most * mib,
                "decode_ms": 1000 * statistics.median(seconds),
                "kinds": len(capacity.windows),
                "dtype": capacity.dtype,
                "way": "eager" if eager else "compiled layers",
            }
        )
    engine.shutdown()
    return rows


def decode(executor, manager: BlockManager, context: int, chunk: int) -> tuple[int, list[float]]:
    """Decode after a context of `context` tokens. Returns the blocks in use, and the seconds of each step."""
    manager.allocate(0)
    for start in range(0, context, chunk):
        grow(manager, start, min(start + chunk, context))
    new = NewSequence(0, [5] * (context + 1), context + 1, 0, SamplingSettings(temperature=0))
    batch, seconds, num_sent = Batch(new=[new]), [], 0
    for step in range(NUM_STEPS):
        end = context + step + 1
        table = grow(manager, end - 1, end)
        batch.blocks = [BlockUpdate(0, num_sent, table[num_sent:])]
        num_sent = len(table)
        batch.rows, batch.starts, batch.counts = [0], [end - 1], [1]
        batch.sampled_from, batch.sampled_rows = [0], [0]
        started = time.perf_counter()
        executor.submit(batch)
        executor.result()
        seconds.append(time.perf_counter() - started)
        batch = Batch()
    return manager.num_blocks - manager.num_free_blocks, seconds[NUM_STEPS // 4 :]


def grow(manager: BlockManager, start: int, end: int) -> list[int]:
    """Give the sequence blocks for a step with the tokens from `start` to `end`. Returns its table in this step."""
    if not manager.grow(0, start, end):
        raise RuntimeError("the KV cache is too small")
    table = list(manager.block_tables[0])
    manager.slide(0, end)
    return table


if __name__ == "__main__":
    app()
