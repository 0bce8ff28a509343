"""The device and dtype to compute with, its memory, torch's precision on it, and non-blocking copies."""

from pathlib import Path

import psutil
import torch
from torch import Tensor

GIB = 2**30


def resolve_device(name: str) -> torch.device:
    """ "auto" is CUDA if there is one. Raises ValueError for "cuda" without one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda': torch sees no CUDA device here (torch.cuda.is_available() is False)")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def resolve_dtype(name: str, checkpoint: str, device: torch.device) -> tuple[torch.dtype, str | None]:
    """The dtype to compute in and, if "auto" cannot use the checkpoint's, one line saying why (else None).

    A device that does not compute in the checkpoint's dtype natively uses float16 on a GPU and float32 on a CPU.
    """
    if name != "auto":
        return getattr(torch, name), None
    if checkpoint == "float64" or computes_natively(checkpoint, device):
        return getattr(torch, checkpoint), None
    here, nearest = ("GPU", "float16") if device.type == "cuda" else ("CPU", "float32")
    return getattr(torch, nearest), f"this {here} does not compute in {checkpoint} natively: using {nearest}"


def resolve_kv_dtype(
    kv_cache_dtype: str, name: str, checkpoint: str, dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    """The dtype of K and V. `kv_cache_dtype` is as in EngineConfig.

    "auto" is `dtype`, which `resolve_dtype` has chosen for `name`, with one exception. If `dtype` is float32 because a
    CPU does not compute in the checkpoint's 16 bits, K and V keep the 16 bits and are widened as they are read.
    """
    if kv_cache_dtype != "auto":
        return torch.float8_e4m3fn
    if name == "auto" and device.type == "cpu" and checkpoint in ("bfloat16", "float16"):
        return getattr(torch, checkpoint)
    return dtype


def computes_natively(dtype: str, device: torch.device) -> bool:
    """Whether the device multiplies matrices of this dtype in hardware.

    On a CPU, ONEDNN_MAX_CPU_ISA counts as well: it keeps oneDNN from using instructions that the processor has, so a
    machine can act as an older one.
    """
    if dtype == "float32":
        return True
    if device.type == "cuda":
        return dtype == "float16" or torch.cuda.get_device_capability(device) >= (8, 0)
    if not torch.backends.mkldnn.is_available():
        return False
    hardware = torch.cpu.get_capabilities()
    if dtype == "bfloat16":
        allowed = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # follows ONEDNN_MAX_CPU_ISA
        return allowed and any(hardware.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    allowed = torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return allowed and any(hardware.get(name) for name in ("avx512_fp16", "amx_fp16", "fp16_arith"))


def set_cuda_precision() -> None:
    """Make matrix products on a GPU as exact as their dtype. These are settings of torch, for the whole process.

    float32 products use full float32 ("ieee"), not TF32, which keeps 10 of the 23 mantissa bits. bfloat16 and float16
    products add up in float32. cuBLAS chooses a kernel, and with it the number of partial sums (split-K), by the size
    of the batch. If each partial sum were rounded to bfloat16, the result would depend on that choice.
    """
    # Not with the newer names (`fp32_precision`): Inductor reads the old ones, and mixing the two is an error.
    torch.set_float32_matmul_precision("highest")  # allow_tf32 = False, whichever way it was set
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def free_bytes(device: torch.device) -> int:
    """The bytes that are free on a device now. On a CPU: the available RAM, within the container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    limit, used = _container_limit()
    return free if limit is None else max(0, min(free, limit - used))


def check_weights_fit(num_bytes: int, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Raises: MemoryError if weights of `num_bytes` bytes, in `dtype` if they have one, exceed the free memory."""
    free = free_bytes(device)
    if num_bytes > free:
        kind = "" if dtype is None else f" in {str(dtype).removeprefix('torch.')}"
        raise MemoryError(
            f"the weights take {num_bytes / GIB:,.2f} GiB{kind}, and {free / GIB:,.2f} GiB are free on {device.type}: "
            "use a smaller model"
        )


def total_ram() -> int:
    """The bytes of RAM, or the container's limit if that is less."""
    total = psutil.virtual_memory().total
    limit, _ = _container_limit()
    return total if limit is None else min(total, limit)


def _container_limit(group: Path = Path("/sys/fs/cgroup")) -> tuple[int | None, int]:
    """(limit, in use) of our container (its cgroup v2); (None, 0) where there is none."""
    try:
        limit = (group / "memory.max").read_text().strip()
        most = None if limit == "max" else int(limit)
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # The system frees cached pages of files when memory is needed, also the pages of weights just read.
        used -= int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))
    except (OSError, ValueError):
        return None, 0
    return (None, 0) if most is None else (most, max(0, used))


def to_device(values: list | Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy Python numbers or a CPU tensor to a device, without blocking: a GPU copies after the work in its stream. On
    a CPU, a tensor is returned as it is."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU, without blocking: synchronize with a GPU before reading the values."""
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
