"""How well nanopage uses its device: MBU, the share of the time a GPU is busy, the host's time; a trace of it all.

MBU is model bandwidth utilization (Databricks, "LLM Inference Performance Engineering", 2023; gpt-fast): the bytes that
a step must read, divided by its time and by the memory's bandwidth. A step must read the weights once, and the K and V
of every sequence's context. A listener watches the engine.
"""

import statistics
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import machine
from benchmarks.outputs import write
from benchmarks.peers.protocol import Engine, Work
from benchmarks.report import console, figure, show_table, spread, table_of
from nanopage.cpu.tiled_experts import TiledExperts
from nanopage.experts.moe import MixtureOfExperts
from nanopage.outputs import StepStats
from nanopage.worker.memory import block_bytes

PHASES = {"decode": "decode steps", "all": "whole run"}


@dataclass
class Step:
    stats: StepStats
    seconds: float
    busy_seconds: float | None = None  # on a GPU

    @property
    def only_decodes(self) -> bool:
        return self.stats.decode_tokens > 0 and not self.stats.prefill_tokens


@dataclass
class Phase:
    """Several steps together. `mbu` has a share for each known bandwidth. `host_us` has the mean microseconds of a step
    for each kind of the host's work. On a CPU, "model" and "sample" are the computation itself."""

    steps: int
    seconds: float
    context_tokens: int
    bytes_read: int
    mbu: dict[str, float]
    gpu_busy: float | None
    host_us: dict[str, float]


class StepRecorder:
    """Keeps the StepStats of every step that `engine` makes from now on.

    Args:
        engine: an LLMEngine.
        bandwidth: the result of `bandwidth`.
    """

    def __init__(self, engine: Any, bandwidth: dict[str, float]):
        self.bandwidth = bandwidth
        self.weight_bytes = weight_bytes(engine.executor.worker.model)
        self.kv_bytes = block_bytes(engine.model_config, 1, engine.executor.worker.kv_cache.tensor.dtype)  # of a token
        self._on_gpu = engine.capacity.device == "cuda"
        self.taken: list[Step] = []  # the steps of the last call of take()
        self.cached_tokens = 0  # tokens that these steps found in the prefix cache
        self._stats: list[StepStats] = []
        engine.listeners.append(self._stats.append)

    def take(self) -> dict[str, Phase | None]:
        """Summarize the steps since the last call: "all", and "decode" for steps without prompt tokens, which is None
        if there were none."""
        taken = self._stats.copy()
        self._stats.clear()
        self.cached_tokens = sum(stats.cached_tokens for stats in taken)
        steps = [Step(stats, stats.seconds, stats.device_seconds if self._on_gpu else None) for stats in taken]
        self.taken = steps
        decode = [step for step in steps if step.only_decodes]
        return {"decode": self._phase(decode) if decode else None, "all": self._phase(steps)}

    def _phase(self, steps: list[Step]) -> Phase:
        seconds = sum(step.seconds for step in steps)
        context_tokens = sum(step.stats.context_tokens for step in steps)
        weights = self.weight_bytes * sum(step.stats.context_tokens > 0 for step in steps)
        bytes_read = weights + self.kv_bytes * context_tokens
        busy = [step.busy_seconds for step in steps if step.busy_seconds is not None]
        host_us = {
            name: 1e6 * statistics.mean(getattr(step.stats, f"{name}_seconds") for step in steps)
            for name in ("schedule", "prepare", "model", "sample", "wait", "update", "output")
        }
        mbu = {name: bytes_read / seconds / 1e9 / gb_s for name, gb_s in self.bandwidth.items()}
        return Phase(
            len(steps), seconds, context_tokens, bytes_read, mbu, sum(busy) / seconds if busy else None, host_us
        )


def weight_bytes(model: Any) -> int:
    """Bytes of a model's weights that a step reads: the decoder layers, the final norm and the head, in their present
    form. An embedding counts only if it is the head, because a step reads few rows of it. A mixture counts with as many
    experts as one token has, although steps of more tokens read more."""
    unread = 0.0
    for mixture in [module for module in model.modules() if isinstance(module, MixtureOfExperts)]:
        num_chosen = mixture.gate.num_chosen
        if isinstance(mixture.experts, TiledExperts):  # only the first of its experts is a module in the model
            unread -= (num_chosen - 1) * _num_bytes(mixture.experts.first)
        else:
            unread += (1 - num_chosen / len(mixture.gate.weight)) * _num_bytes(mixture.experts)
    return _num_bytes(nn.ModuleList([*model.layers, model.norm, model.lm_head])) - round(unread)


def _num_bytes(module: nn.Module) -> int:
    sizes = {}  # by address: a weight in oneDNN's layout has two tensors for the same memory
    for tensor in chain(module.parameters(), module.buffers()):
        if tensor.is_mkldnn:
            sizes[torch.ops.mkldnn.data_ptr(tensor)] = torch.ops.mkldnn._nbytes(tensor)
        else:
            sizes[tensor.data_ptr()] = tensor.nbytes
    return sum(sizes.values())


def bandwidth(device: torch.device) -> dict[str, float]:
    """GB/s: "measured" and, for a GPU whose clock and bus torch knows, "data sheet". On a GPU, this measures a copy,
    counting bytes read and written. On a CPU, it measures reading, with as many threads as torch has."""
    if device.type == "cpu":
        return {"measured": machine.read_bandwidth(torch.get_num_threads())}
    from benchmarks.kernels import copy_bandwidth

    measured = {"measured": copy_bandwidth()}
    torch.cuda.empty_cache()
    properties = torch.cuda.get_device_properties(device)
    sheet = machine.data_sheet_bandwidth(
        getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    )
    return measured | ({"data sheet": sheet} if sheet else {})


def write_trace(run: Engine, work: list[Work], file: Path) -> bool:
    """Run the work under torch's profiler, for the CPU and a GPU if there is one, and write a Chrome trace
    (chrome://tracing, ui.perfetto.dev). Returns whether the file could be written."""
    with torch.profiler.profile() as profiler:
        run(work)
    with tempfile.TemporaryDirectory() as scratch:  # torch itself would only log that it cannot write `file`
        trace = Path(scratch) / f"trace{file.suffix}"
        profiler.export_chrome_trace(str(trace))
        return write(file, trace.read_bytes())


def show(iterations: list[dict[str, Phase | None]], bandwidth: dict[str, float]) -> None:
    """Print a table and a line: medians, with the lowest and highest iteration."""
    on_gpu = any(phase and phase.gpu_busy is not None for phases in iterations for phase in phases.values())
    speeds = ", ".join(f"{name} {gb_s:.1f} GB/s" for name, gb_s in bandwidth.items())
    columns = ["", "steps", "ms a step", "GB/s", *(f"MBU, {name} (%)" for name in bandwidth)]
    table = table_of(f"memory read by nanopage's steps; bandwidth {speeds}", columns + ["GPU busy (%)"] * on_gpu)
    for key, title in PHASES.items():
        phases = [phase for iteration in iterations if (phase := iteration[key])]
        if not phases:  # no decodes: one token for each request
            continue
        cells = [figure(statistics.median_low(phase.steps for phase in phases))]
        cells.append(spread([1000 * phase.seconds / phase.steps for phase in phases]))
        cells.append(spread([phase.bytes_read / phase.seconds / 1e9 for phase in phases]))
        cells += [spread([100 * phase.mbu[name] for phase in phases]) for name in bandwidth]
        if on_gpu:
            cells.append(spread([100 * phase.gpu_busy if phase.gpu_busy is not None else None for phase in phases]))
        table.add_row(title, *cells)
    show_table(table)
    lines = {
        title: host_line(phase for iteration in iterations if (phase := iteration[key]))
        for key, title in PHASES.items()
    }
    text = "; ".join(f"{title}: {line}" for title, line in lines.items() if line)
    console.print(f"host us a step, {text}", style="dim", highlight=False)


def host_line(phases: Iterable[Phase]) -> str:
    """ "schedule 12, model 340, sample 20, output 30": the medians."""
    times = [phase.host_us for phase in phases]
    names = times[0] if times else []
    return ", ".join(f"{name} {statistics.median(each[name] for each in times):.0f}" for name in names)
