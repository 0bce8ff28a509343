"""`nanopage compile`: compiles the layers of a model for this machine, so that its first answer already uses them."""

from typing import Annotated, Any, cast

import typer

from nanopage.terminal.program import command
from nanopage.terminal.text import say
from nanopage.vllm.engine_args import takes_engine_options


@takes_engine_options("dtype", "quantization", "block_size", "enable_lora", "batch_invariant")
@command
def compile_layers(
    model: Annotated[
        str | None, typer.Argument(help="Directory, .gguf file or hub id [default: SmolLM2-135M-Instruct].")
    ] = None,
    *,
    switches: dict[str, Any],
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the engine's log and tracebacks.")] = False,
) -> int:
    """Compile the layers of a model for this CPU now. Engines with the same dtype, quantization, block size and number
    of threads (OMP_NUM_THREADS) then use them from their first token, engines that enable adapters if --enable-lora was
    given, and engines with batch_invariant if --batch-invariant was given."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from nanopage import EngineConfig
    from nanopage.build import build_engine
    from nanopage.weights import hub
    from nanopage.worker.executor import LocalExecutor

    # The code depends neither on the context nor on the size of the KV cache, so both are small. Nor does it depend on
    # the number and the rank of adapters.
    small = {"max_model_len": switches["block_size"], "num_gpu_blocks_override": 4}
    engine = build_engine(EngineConfig(model=str(hub.resolve(model)), device="cpu", **small, **switches))
    if engine.model_config.pooling is not None:
        raise ValueError("nothing to compile: models for embeddings and scores run eagerly")
    worker = cast(LocalExecutor, engine.executor).worker
    if worker.compiled is None:
        raise ValueError(f"nothing to compile: steps run {worker.way}")
    if worker.compiled.layers is not None:
        # An engine with batch_invariant compiles when it is built.
        word = "compiled" if switches["batch_invariant"] else "already compiled"
        say(f"{word}: {worker.compiled.directory}")
        return 0
    columns = (TextColumn("Compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=None)
        try:
            engine.executor.compile(lambda done, total: progress.update(task, completed=done, total=total))
            progress.update(task, completed=progress.tasks[task].total)
        finally:
            engine.shutdown()
    say(f"compiled: {worker.compiled.directory}")
    return 0
