"""The machine that a measurement runs on: its processor, GPU and software, and how fast its memory is read."""

import contextlib
import importlib
import math
import mmap
import platform
import subprocess
import time
from functools import partial
from pathlib import Path

from benchmarks.peers import nanopage as nanopage_peer

GIB = 2**30


def versions(*libraries: str) -> str:
    """Versions of nanopage (with its commit), torch, these libraries and Python."""
    known = nanopage_peer.versions() | {name: importlib.import_module(name).__version__ for name in libraries}
    known["Python"] = platform.python_version()
    return ", ".join(f"{name} {version}" for name, version in known.items())


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def cpu_has(feature: str) -> bool:
    """Whether the processor has these instructions, by their name in torch, such as "avx512_f". Ignores the
    environment, which can keep torch from using them."""
    import torch

    return bool(torch.cpu.get_capabilities().get(feature))


def nvidia_smi(gpu: str) -> str | None:
    """Driver, clocks and power limit of the GPU with this id. None where nvidia-smi is missing or does not answer."""
    fields = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit"
    command = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={fields}", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        driver, sm, most_sm, memory, most_memory, power = answer.strip().split(", ")
        return f"driver {driver}, SM {sm} of {most_sm}, memory {memory} of {most_memory}, power limit {power}"
    return None


def machine_state(device: str) -> tuple[str, dict[str, str]]:
    """The name of the CPU or GPU, and further fields of a header: for a GPU, what `nvidia_smi` says, if anything."""
    if device == "cpu":
        return cpu_name(), {}
    import torch

    properties = torch.cuda.get_device_properties("cuda")
    state = nvidia_smi(f"GPU-{properties.uuid}")
    return properties.name, {"nvidia-smi": state} if state else {}


def read_bandwidth(threads: int) -> float:
    """The GB/s at which all threads together read a buffer of 1 GiB, far more than caches hold: the best of 7 readings.

    The buffer is in pages of 2 MiB if the system has them. With small pages, the figure depends on where they lie.
    """
    import torch

    torch.set_num_threads(threads)
    memory = mmap.mmap(-1, GIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.float32).fill_(1)  # until it is written, all of it is one page
    best = math.inf
    for _ in range(7):
        started = time.perf_counter()
        buffer.amax()  # the one reduction of torch that is limited by memory alone
        best = min(best, time.perf_counter() - started)
    return GIB / best / 1e9


def product_speed(threads: int, dtype: str, quantization: str | None) -> float:
    """GFLOP/s of the fastest matrix products that an engine could use, 512 x 1024 by 1024 x 1024, with torch's
    libraries: the best of 30 products of each kind, or of as many as fit into a second.

    The kinds are float32; with the dtype bfloat16, also bfloat16, if the processor has instructions for it; with int8
    or int4 weights, also int8 by int8. torch multiplies float32 with MKL, which does not fully use some processors, so
    oneDNN is tried as well. In every kind, a multiplication and an addition count as two operations.
    """
    import torch

    from nanopage.cpu.packed_linear import can_pack, pack, packed_linear
    from nanopage.device import computes_natively

    torch.set_num_threads(threads)
    kinds = [torch.float32]
    kinds += [torch.bfloat16] if dtype == "bfloat16" and computes_natively(dtype, torch.device("cpu")) else []
    kinds += [torch.int8] if quantization else []
    best = math.inf
    for kind in kinds:
        x, weights = torch.ones(512, 1024, dtype=kind), torch.ones(1024, 1024, dtype=kind)
        products = [partial(torch._int_mm if kind == torch.int8 else torch.mm, x, weights)]
        if can_pack(kind):
            products.append(partial(packed_linear, x, pack(weights), None))
        for product in products:
            end = time.perf_counter() + 1
            for _ in range(30):
                started = time.perf_counter()
                product()
                finished = time.perf_counter()
                best = min(best, finished - started)
                if finished > end:
                    break
    return 2 * 512 * 1024 * 1024 / best / 1e9


def data_sheet_bandwidth(clock_khz: int, bus_bits: int) -> float:
    """GB/s of memory that moves data on both edges of its clock."""
    return 2 * clock_khz * 1e3 * bus_bits / 8 / 1e9
