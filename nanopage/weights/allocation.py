"""Allocates the parameters of a model, and checks their values."""

import ctypes
import sys

import torch
from torch import Tensor, nn

from nanopage.device import check_weights_fit


def materialize(model: nn.Module, dtype: torch.dtype, device: torch.device, for_use: bool = True) -> None:
    """Allocate the parameters of a model that is on the meta device, in `dtype`. Parameters in float64 stay so. Raises
    MemoryError as `loader.load_model`.

    Args: for_use: whether the model runs on this device.
    """
    sizes = [parameter.numel() * dtype.itemsize for parameter in model.parameters()]
    check_weights_fit(sum(sizes), device, dtype)
    if for_use and device.type == "cpu" and sys.platform == "linux":
        _prepare_heap(sum(sizes) + max(sizes))  # packing them holds one weight twice
    materialized: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay tied
    for layer in model.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if parameter not in materialized:
                own_dtype = parameter.dtype if parameter.dtype == torch.float64 else dtype
                empty = torch.empty(parameter.shape, dtype=own_dtype, device=device)
                materialized[parameter] = nn.Parameter(empty, requires_grad=False)
            layer.register_parameter(name, materialized[parameter])
        for name, buffer in layer.named_buffers(recurse=False):
            layer.register_buffer(name, buffer.to(device), persistent=False)


def _prepare_heap(num_bytes: int) -> None:
    """Configure glibc's malloc for speed on a CPU. Process-wide, and without effect under another allocator.

    malloc keeps the memory of activations after every operator. Taking it from the system again would cost a page fault
    for every 4 KiB, a tenth of the time of a prefill. The next `num_bytes`, the weights, come in pages of 2 MiB where
    the system allows it: they are then read faster, which makes a single request's decoding faster by a seventh.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    m_trim_threshold, m_mmap_threshold, madv_hugepage = -1, -3, 14  # malloc.h, mman.h
    libc.mallopt(m_mmap_threshold, 2**30)
    libc.mallopt(m_trim_threshold, 2**31 - 1)
    # Memory that is taken from the heap, advised and freed without being touched stays there and keeps the advice.
    malloc, free, madvise = libc.malloc, libc.free, libc.madvise
    malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    free.restype, free.argtypes = None, [ctypes.c_void_p]
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    piece, huge_page = 2**29, 2**21
    pieces = [(malloc(size) or 0, size) for size in [piece] * (num_bytes // piece) + [num_bytes % piece + huge_page]]
    for address, size in pieces:  # address 0: there was no memory
        begin, end = -(-address // huge_page) * huge_page, (address + size) // huge_page * huge_page
        if address and begin < end:
            madvise(begin, end - begin, madv_hugepage)
    for address, _ in pieces:
        free(address)


def all_finite(tensor: Tensor) -> bool:
    # The sum is much cheaper. It is finite only if every value is, but may overflow even then.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
