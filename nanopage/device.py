"""The device and dtype to compute with, its memory, torch's precision on it, and copies that nobody waits for."""

from pathlib import Path

import psutil
import torch
from torch import Tensor


def resolve_device(name: str) -> torch.device:
    """ "auto" is CUDA if there is one. Raises ValueError for "cuda" without one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda': torch sees no CUDA device here (torch.cuda.is_available() is False)")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def resolve_dtype(name: str, checkpoint: str, device: torch.device) -> tuple[torch.dtype, str | None]:
    """The dtype to compute in, and one line saying why it is not the checkpoint's, if "auto" had to choose another: on
    a GPU older than compute capability 8.0 float16 for bfloat16, on a CPU float32 for either."""
    if name != "auto":
        return getattr(torch, name), None
    if checkpoint == "float64" or computes_natively(checkpoint, device):
        return getattr(torch, checkpoint), None
    here, nearest = ("GPU", "float16") if device.type == "cuda" else ("CPU", "float32")
    return getattr(torch, nearest), f"this {here} does not compute in {checkpoint} natively: using {nearest}"


def computes_natively(dtype: str, device: torch.device) -> bool:
    """Whether the device multiplies matrices of this dtype in hardware.

    On a CPU, ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA count as well: they keep torch and oneDNN from using
    instructions that the processor has, so that one machine can stand in for an older one.
    """
    if dtype == "float32":
        return True
    if device.type == "cuda":
        return dtype == "float16" or torch.cuda.get_device_capability(device) >= (8, 0)
    if not torch.backends.mkldnn.is_available():
        return False
    hardware = torch.cpu.get_capabilities()
    if dtype == "bfloat16":
        allowed = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # follows both variables, and so does the next one
        return allowed and any(hardware.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    allowed = torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return allowed and any(hardware.get(name) for name in ("avx512_fp16", "amx_fp16", "fp16_arith"))


def set_cuda_precision() -> None:
    """Have torch's products on a GPU be as exact as their dtype; settings of torch, for the whole process.

    Those of float32 are in full float32 ("ieee"), not in TF32, which keeps 10 of its 23 bits. Those of bfloat16 and
    float16 add up in float32: how many partial sums there are (split-K) is up to the kernel that cuBLAS chooses by the
    batch's size, and if each were rounded to bfloat16 before they are added, the answer would depend on that choice.
    """
    # Not by the newer names (`fp32_precision`): Inductor reads the old ones, too, an error once the two are mixed.
    torch.set_float32_matmul_precision("highest")  # allow_tf32 = False, whichever way it was set
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def free_bytes(device: torch.device) -> int:
    """The memory of a device that can be had now; on a CPU, of the RAM and of what the container may use."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    limit, used = _container_limit()
    return free if limit is None else max(0, min(free, limit - used))


def total_ram() -> int:
    """The RAM, or what the container may use of it."""
    total = psutil.virtual_memory().total
    limit, _ = _container_limit()
    return total if limit is None else min(total, limit)


def _container_limit(group: Path = Path("/sys/fs/cgroup")) -> tuple[int | None, int]:
    """(limit, in use) of the control group we run in; (None, 0) where there is none."""
    try:
        limit = (group / "memory.max").read_text().strip()
        most = None if limit == "max" else int(limit)
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Cached pages of files are given up when memory is needed: among them those of the weights just read.
        used -= int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))
    except (OSError, ValueError):
        return None, 0
    return (None, 0) if most is None else (most, max(0, used))


def to_device(values: list | Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of Python numbers, or that of a tensor on the CPU. A GPU has it once its work so far is done: unlike
    `Tensor.to`, this does not wait for that."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def to_host(tensor: Tensor) -> Tensor:
    """A tensor's values as they are now, on the CPU; of a GPU's they are there once its work so far is done."""
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
