"""A server with three models and memory for two, under mixed load: loads, waits, lost requests, memory that is left.

`python -m benchmarks.models` serves models with random weights. To serve others, give `--model NAME=PATH` three times;
they must have tokenizers. It first loads all models once, to see what each needs. Then clients send streams and whole
calls to models that they draw, the first most often. At the end, the models become idle, and no process is left.
"""

import contextlib
import http.client
import json
import random
import re
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from benchmarks.machine import GIB, cpu_name, versions
from benchmarks.outputs import check_outputs, write
from benchmarks.report import console, show_table, table_of

CONFIGS = Path(__file__).parent / "configs"
DUMMIES = ("SmolLM2-135M-8-heads", "gemma-3-270m", "LFM2-350M")
WEIGHTS = (6, 3, 1)  # how often each model is drawn
LOADS = r'nanopage:(model_\w+)\{model_name="(\w+)"\} (\S+)'
app = typer.Typer(add_completion=False)


class Server:
    """`nanopage serve` with these models. Args: memory: bytes."""

    def __init__(self, models: dict[str, str], memory: int, keep_alive: int, options: list[str]):
        command = [sys.executable, "-m", "nanopage", "serve", "--port", "0", *options]
        command += [part for name, path in models.items() for part in ("--model", f"{name}={path}")]
        command += ["--models-memory", f"{memory / 1e6:.0f}MB", "--keep-alive", str(keep_alive)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        found = re.search(r"http://\S+?(?=/v1)", self.process.stdout.readline())
        if found is None:
            raise RuntimeError("the server has not started: its log says why")
        self.address = urllib.parse.urlsplit(found[0]).netloc

    def call(self, method: str, path: str, body: dict | None = None) -> tuple[int, bytes, float]:
        """(status, reply, seconds until its first byte that is no comment) of a call."""
        started = time.perf_counter()
        with contextlib.closing(http.client.HTTPConnection(self.address, timeout=600)) as connection:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            first = reply.readline()
            while first.startswith(b":") or first == b"\n":
                first = reply.readline()
            waited = time.perf_counter() - started
            return reply.status, first + reply.read(), waited

    def counts(self) -> dict[str, dict[str, float]]:
        """model -> metric -> value."""
        found: dict[str, dict[str, float]] = {}
        for name, model, value in re.findall(LOADS, self.call("GET", "/metrics")[1].decode()):
            found.setdefault(model, {})[name] = float(value)
        return found

    def processes(self) -> list[psutil.Process]:
        """The processes of loaded models."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def memory(self) -> float:
        """GiB that become free when these processes end."""
        total = 0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().uss
        return total / GIB


@contextlib.contextmanager
def serving(*arguments: Any) -> Iterator[Server]:
    server = Server(*arguments)
    try:
        yield server
    finally:
        server.process.terminate()
        server.process.wait(60)


@app.command()
def main(
    model: Annotated[list[str] | None, typer.Option(help="NAME=PATH, three times. None: random weights.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Time in which requests are sent.")] = 120.0,
    clients: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 6,
    keep_alive: Annotated[int, typer.Option(min=1, help="Seconds until idle models are unloaded.")] = 30,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a reply.")] = 64,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results there.")] = None,
) -> None:
    """Measure a server with three models and memory for two."""
    check_outputs({"--json": json_file})
    models = dict(each.split("=", 1) for each in model or [f"m{i}={CONFIGS / name}" for i, name in enumerate(DUMMIES)])
    if len(models) != len(WEIGHTS):
        raise typer.BadParameter(f"give {len(WEIGHTS)} models", param_hint="--model")
    options = ["--max-model-len=1024", "--kv-cache-gib=0.25", "--enforce-eager"]
    options += [] if model else ["--load-format=dummy"]
    rng, names = random.Random(0), [*models]

    def body(name: str) -> dict[str, Any]:
        length = rng.randint(1, max_tokens)
        prompt: Any = "Once upon a time" if model else [rng.randint(10, 1000) for _ in range(20)]
        shape = {"max_tokens": length, "ignore_eos": True, "stream": rng.random() < 0.5}
        return {"model": name, "prompt": prompt, "temperature": 0} | shape

    def load_each(server: Server) -> None:
        for name in names:
            status, reply, _ = server.call("POST", "/v1/completions", body(name))
            if status != 200:
                raise RuntimeError(reply.decode())

    with serving(models, 1024 * GIB, -1, options) as server:
        load_each(server)
        needed = {name: values["model_memory_bytes"] / GIB for name, values in server.counts().items()}
    budget = sum(needed.values()) - min(needed.values()) / 2  # two models fit, even if they grow, and three do not
    header = {
        "bench": f"{clients} clients for {seconds:g} s, replies of 1 to {max_tokens} tokens",
        "models": ", ".join(f"{name}: {Path(path).name} ({needed[name]:.2f} GiB)" for name, path in models.items()),
        "budget": f"{budget:.2f} GiB",
        "device": cpu_name(),
        "versions": versions(),
    }
    with serving(models, int(budget * GIB), keep_alive, options) as server:
        before = psutil.virtual_memory().available / GIB
        load_each(server)  # from then on, the server knows what each needs
        result = drive(server, names, body, seconds, clients, rng)
        idle = wait_until_idle(server, 4 * keep_alive + 60)
    after = psutil.virtual_memory().available / GIB
    result |= {"seconds_until_empty": idle, "budget_gib": budget, "needed_gib": needed}
    result |= {"available_before_gib": before, "available_after_gib": after}
    show(result)
    if json_file is not None:
        write(json_file, (json.dumps({"header": header, "results": result}, indent=1) + "\n").encode())
    if result["lost"] or idle is None or result["most_loaded"] > 2:
        raise typer.Exit(1)


def drive(server: Server, names: list[str], body: Any, seconds: float, clients: int, rng: random.Random) -> dict:
    """Send requests. Returns what became of them."""
    waits: dict[str, list[float]] = {name: [] for name in names}
    lost: list[str] = []
    end, lock = time.perf_counter() + seconds, threading.Lock()

    def client() -> None:
        while time.perf_counter() < end:
            with lock:
                name = rng.choices(names, WEIGHTS)[0]
                sent = body(name)
            try:
                status, reply, waited = server.call("POST", "/v1/completions", sent)
                ok = status == 200 and b'"error"' not in reply and (not sent["stream"] or reply.endswith(b"[DONE]\n\n"))
                why = reply[-300:].decode()
            except (OSError, http.client.HTTPException) as error:
                ok, why, waited = False, repr(error), 0.0
            with lock:
                waits[name].append(waited)
                lost.extend([] if ok else [why])

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    most, most_loaded = 0.0, 0
    while any(thread.is_alive() for thread in threads):
        most = max(most, server.memory())
        loaded = sum(values["model_loaded"] for values in server.counts().values())
        most_loaded = max(most_loaded, int(loaded))
        time.sleep(0.5)
    counts = server.counts()
    rows = {
        name: {
            "requests": len(waits[name]),
            "mean_wait_s": sum(waits[name]) / max(1, len(waits[name])),
            "max_wait_s": max(waits[name], default=0.0),
            **{key: counts[name][f"model_{key}"] for key in ("loads_total", "unloads_total", "load_failures_total")},
        }
        for name in names
    }
    return {"models": rows, "lost": lost, "most_gib": most, "most_loaded": most_loaded}


def wait_until_idle(server: Server, most: float) -> float | None:
    """Seconds until no process of a model is left; None if some are left after `most` seconds."""
    started = time.perf_counter()
    while server.processes():
        if time.perf_counter() - started > most:
            return None
        time.sleep(0.2)
    return time.perf_counter() - started


def show(result: dict[str, Any]) -> None:
    columns = ["model", "requests", "mean wait s", "max wait s", "loads", "unloads", "failures"]
    table = table_of("Several models", columns)
    for name, row in result["models"].items():
        table.add_row(name, *(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    show_table(table)
    before, after = result["available_before_gib"], result["available_after_gib"]
    console.print(f"lost: {len(result['lost'])}; models loaded at once: {result['most_loaded']}")
    console.print(f"processes took at most {result['most_gib']:.2f} GiB of {result['budget_gib']:.2f}")
    console.print(f"available before: {before:.2f} GiB, after: {after:.2f} GiB")


if __name__ == "__main__":
    app()
