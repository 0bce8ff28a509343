"""How long `nanopage chat` takes from the start of its process to its first token: with a model that `nanopage serve`
has loaded, which it uses by itself, and with an engine of its own.

python -m benchmarks.attached

Each question is new, so the prefix cache can hold only its system message. The server first answers one question. Then
the benchmark waits until the machine is idle, because the server compiles in the background.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import psutil
import typer

from benchmarks.machine import cpu_name, versions
from benchmarks.outputs import check_outputs, write
from benchmarks.report import show_table, spread, table_of

ROOT = Path(__file__).parent.parent
LONGEST_WAIT = 300.0  # seconds
IDLE = 10.0  # percent of all cores
PROGRAM = [sys.executable, "-m", "nanopage"]


def main(
    model: Annotated[str | None, typer.Option(help="Directory, .gguf file or hub id [default: SmolLM2-135M].")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Questions to the server.")] = 9,
    alone: Annotated[int, typer.Option(min=0, help="Questions to engines of their own.")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
) -> None:
    """Measure the time from the start of a program to its first token."""
    check_outputs({"--json": json_file})
    of_model = [] if model is None else ["--model", model]
    rows: dict[str, list[float]] = {"attached": [], "an engine of its own": []}
    with serving(of_model) as env:
        ask(of_model, 0, env)
        wait_until_idle()
        for number in range(1, runs + 1):
            rows["attached"].append(ask(of_model, number, env))
    for number in range(alone):
        rows["an engine of its own"].append(ask([*of_model, "--no-attach"], number, os.environ))
        wait_until_idle()
    table = table_of(f"start of the process to its first token, {cpu_name()}", ["", "s"])
    for name, seconds in rows.items():
        if seconds:
            table.add_row(name, spread(seconds))
    show_table(table)
    if json_file is not None:
        header = {"cpu": cpu_name(), "versions": versions()}
        write(json_file, (json.dumps({"header": header, "seconds": rows}, indent=1) + "\n").encode())


@contextlib.contextmanager
def serving(of_model: list[str]) -> Iterator[dict[str, str]]:
    """Run a server. Yields environment variables with which programs find this server, and no other one."""
    with tempfile.TemporaryDirectory(prefix="nanopage-bench-") as directory:
        env = os.environ | {"XDG_RUNTIME_DIR": directory, "PYTHONUNBUFFERED": "1"}
        command = [*PROGRAM, "serve", "--port", "0", *of_model]
        server = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            assert server.stdout is not None
            if not any(line.startswith("ready") for line in server.stdout):
                raise RuntimeError(f"the server has ended: {' '.join(command)} says why")
            while not list(Path(directory).glob("nanopage/*.json")):
                time.sleep(0.01)
            yield env
        finally:
            server.terminate()
            server.wait()


def ask(options: list[str], number: int, env: os._Environ | dict[str, str]) -> float:
    """Ask in a new process. Returns the seconds to the first token. Raises: RuntimeError if the process fails, or
    loads the model though a server has it."""
    question = f"Question {number}: which number comes after {number * 7919}?"
    command = [*PROGRAM, "chat", *options, "--max-tokens", "16", "-p", question]
    started = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.read(1)
    seconds = time.perf_counter() - started
    _, said = process.communicate()
    attached = b"Using the nanopage server" in said
    if process.returncode or attached == ("--no-attach" in options):
        raise RuntimeError(said.decode(errors="replace"))
    return seconds


def wait_until_idle() -> None:
    """Wait until the machine has little to do, at most LONGEST_WAIT."""
    started = time.perf_counter()
    while psutil.cpu_percent(interval=2.0) > IDLE and time.perf_counter() - started < LONGEST_WAIT:
        pass


if __name__ == "__main__":
    typer.run(main)
