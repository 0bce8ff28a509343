"""WorkerStandby: gives the memory of a worker back, takes it again, and replaces the weights in it.

On a CPU, the system takes pages back and the addresses stay, so compiled code goes on with them. On a GPU, storages are
emptied and filled again at other addresses, so the ways to run a step are made anew, with their graphs.
"""

import ctypes
import gc
import logging
import mmap
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, UntypedStorage, nn

from nanopage.cpu.tiled_experts import TiledExperts
from nanopage.device import GIB
from nanopage.worker.ways import list_ways
from nanopage.worker.worker import Worker

logger = logging.getLogger("nanopage")


class WorkerStandby:
    """What a worker does when its engine sleeps, wakes up or gets other weights (see standby/engine.py). Each method
    may be called again after it was interrupted.

    Args:
        model: as it was loaded, before adapters and exchanges with other workers are put into it.
        load: loads a model from other files in the same way. None if the engine refuses other weights.
    """

    def __init__(self, model: nn.Module, load: Callable[[Path], nn.Module] | None):
        self.weights, self.kv_scales, self._load = tensors_of(model), kv_scales_of(model), load
        self._fresh: list[Tensor] = []  # weights that `take` copies
        # On a GPU, what sleeps by its tag: (storage, its bytes, a copy in host memory or None)
        self._asleep: dict[str, list[tuple[UntypedStorage, int, UntypedStorage | None]]] = {
            "weights": [],
            "kv_cache": [],
        }

    def sleep(self, worker: Worker, level: int) -> None:
        cache = worker.kv_cache
        cache.host = None
        if worker.wings.items is not None:
            worker.wings.items.forget()
        if worker.setup.on_gpu:
            self._sleep_on_gpu(worker, level)
            return
        released = sum(map(give_back, [cache.tensor, *(self.weights if level == 2 else [])]))
        trim()
        stay = "" if level == 2 else "; the weights stay in memory"
        logger.info(f"asleep: up to {released / GIB:.2f} GiB given back to the system{stay}")

    def _sleep_on_gpu(self, worker: Worker, level: int) -> None:
        torch.cuda.synchronize(worker.setup.device)
        free, _ = torch.cuda.mem_get_info(worker.setup.device)
        worker.runner.ways = []  # their graphs have the addresses
        collect()
        if level == 2:
            self._asleep["weights"] = [(storage, size, None) for storage, size, _ in self._asleep["weights"]]
        for tag, tensors in {"weights": self.weights, "kv_cache": [worker.kv_cache.tensor]}.items():
            storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
            for storage in storages.values():
                if size := storage.nbytes():
                    keeps = tag == "weights" and level == 1
                    self._asleep[tag].append((storage, size, UntypedStorage(size).copy_(storage) if keeps else None))
                    storage.resize_(0)
        torch.cuda.empty_cache()
        released = torch.cuda.mem_get_info(worker.setup.device)[0] - free
        logger.info(f"asleep: {released / GIB:.2f} GiB of GPU memory given back")

    def wake_up(self, worker: Worker, tags: list[str]) -> None:
        for tag in tags:
            for storage, size, kept in self._asleep[tag]:
                storage.resize_(size)
                if kept is not None:
                    storage.copy_(kept)
            self._asleep[tag].clear()
        runner = worker.runner
        if not runner.ways and not any(self._asleep.values()):
            made = worker.model, worker.kv_cache, runner.table
            found = list_ways(worker.setup, worker.wings, *made, runner.sampler.sample_all)
            runner.ways, worker.way, worker.compiled = found

    def load(self, worker: Worker, path: str) -> None:
        """Load other weights beside those that the model has. Raises: as `load_model`; ValueError if the model cannot
        take them as they are stored."""
        assert self._load is not None
        model = self._load(Path(path))
        fresh = tensors_of(model)
        if [*map(_form, fresh)] != [*map(_form, self.weights)]:
            raise ValueError(
                f"{path}: these weights would be stored in other types than the model's: make a new engine"
            )
        if kv_scales_of(model) != self.kv_scales:
            raise ValueError(f"{path}: its scales of K and V are not those that the model runs with: make a new engine")
        self._fresh = fresh

    @torch.inference_mode()
    def take(self, worker: Worker) -> None:
        """Copy what `load` has loaded to where the model's weights are."""
        for old, new in zip(self.weights, self._fresh, strict=True):
            if old.is_mkldnn:
                ctypes.memmove(_memory_of(old)[0], *_memory_of(new))
            else:
                old.copy_(new)
        if worker.setup.on_gpu:
            torch.cuda.synchronize(worker.setup.device)
        if worker.wings.items is not None:
            worker.wings.items.forget()
        self.drop(worker)

    def drop(self, worker: Worker) -> None:
        """Forget what `load` has loaded."""
        self._fresh = []
        trim()


def tensors_of(model: nn.Module) -> list[Tensor]:
    """The weights of a model as they are stored, and its buffers, in the order of its modules."""
    tensors: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, TiledExperts):  # has only the addresses of the experts' weights
            tensors += [tensor for experts in module.experts for tensor in tensors_of(experts)]
        else:
            tensors += [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return tensors


def kv_scales_of(model: nn.Module) -> list[tuple[float, float]]:
    """The scales of K and V that a checkpoint has, which are no tensors of the model."""
    scorings = (getattr(module, "scoring", None) for module in model.modules())
    return [scoring.kv_scales for scoring in scorings if scoring is not None]


def _form(tensor: Tensor) -> tuple:
    return tensor.dtype, tensor.shape


def _memory_of(tensor: Tensor) -> tuple[int, int]:
    """The address and the number of bytes of a contiguous tensor on a CPU, which may be an opaque one of oneDNN."""
    if tensor.is_mkldnn:
        return torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)
    return tensor.data_ptr(), tensor.nbytes


def give_back(tensor: Tensor) -> int:
    """Give the whole pages of a tensor on a CPU back to the system, on Linux. When read again, they are zeros.
    Returns: the number of bytes given back."""
    if sys.platform != "linux" or not (tensor.is_mkldnn or tensor.is_contiguous()):
        return 0
    address, size = _memory_of(tensor)
    begin, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin >= end:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED):
        logger.warning(f"the system does not take memory back (error {ctypes.get_errno()})")
        return 0
    return end - begin


def trim() -> None:
    """Have glibc give free memory of its heap back to the system, which it keeps otherwise (weights/allocation.py)."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def collect() -> None:
    """Collect garbage, also of objects that a server has frozen: graphs of pieces refer to themselves."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    gc.collect()
    if frozen:
        gc.freeze()
