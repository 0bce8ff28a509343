"""CompiledProduct: compiled products with weights in tiles (kernels/cpu/tile_linear.cpp) and mixtures of experts
(tile_experts.cpp), for steps that run eagerly.

PyTorch alone would convert a whole weight for each product.
"""

import ctypes
import hashlib
import logging
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from nanopage.kernels.cpu import tile_linear
from nanopage.private_files import check_private, make_private
from nanopage.weights import hub
from nanopage.worker.aot import LOCK, DamagedFile, find_file, find_whole, may_compile, processor
from nanopage.worker.aot_chain import new_handles, take_tensors

logger = logging.getLogger("nanopage")

NAME = "tiles.so"
SOURCES = ("tile_linear.cpp", "tile_experts.cpp")
SCRATCH = "scratch-"  # prefix of the names of temporary directories


class CompiledProduct:
    """Computes the same as the operators nanopage::tile_linear and, `experts`, nanopage::tile_experts.

    Raises: OSError if the file is not a library that can be loaded; AttributeError if it is another library.
    """

    def __init__(self, file: Path):
        library = ctypes.CDLL(str(file))
        self._product, self._experts = library.aoti_torch_cpu_tile_linear, library.aoti_torch_cpu_tile_experts
        self._product.argtypes = [ctypes.c_void_p] * 4
        self._experts.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_int64] * 2 + [ctypes.c_int32, ctypes.c_void_p]

    def __call__(self, x: Tensor, tiles: Tensor, scales: Tensor) -> Tensor:
        return self._call(self._product, [x.contiguous(), tiles, scales])

    def experts(self, x: Tensor, *arguments: Any) -> Tensor:
        tensors = [x.contiguous(), *(value for value in arguments if isinstance(value, Tensor))]
        return self._call(self._experts, tensors, *arguments[len(tensors) - 1 :])

    def _call(self, function: Any, tensors: list[Tensor], *numbers: int) -> Tensor:
        handles, output = new_handles(tensors), ctypes.c_void_p()
        code = function(*handles, *numbers, ctypes.byref(output))
        take_tensors(handles)  # frees them
        if code:
            raise RuntimeError("a compiled product failed; it has written its error to standard error")
        return take_tensors([output.value])[0]


def tile_product(dtype: torch.dtype) -> CompiledProduct | None:
    """The compiled product for activations of this dtype. Compiles it on first use, which takes seconds.

    Returns: None if NANOPAGE_COMPILE forbids it, or, after a warning, if that is not possible.
    """
    try:
        constants = product_constants(dtype)
        directory = hub.private_cache("compiled") / _key(constants)
        make_private(directory)
        with FileLock(directory / LOCK, mode=0o600):
            _remove_damaged(directory)
            if find_file(directory, NAME) is None:
                if not may_compile():
                    logger.info("NANOPAGE_COMPILE=never: products with weights in tiles are not compiled")
                    return None
                _compile(constants, directory)
            check_private(directory)
            return CompiledProduct(find_whole(directory, NAME))
    except (OSError, AttributeError, RuntimeError, DamagedFile, subprocess.CalledProcessError) as error:
        logger.warning(f"compiled products with weights in tiles cannot be used: {error}")
        return None


def product_constants(dtype: torch.dtype) -> dict[str, int]:
    """What SOURCES are compiled for."""
    return {"BFLOAT16": int(dtype == torch.bfloat16)}


def _remove_damaged(directory: Path) -> None:
    """Remove a damaged library, and what processes that were killed have left."""
    for stale in directory.glob(f"{SCRATCH}*"):
        shutil.rmtree(stale, ignore_errors=True)
    try:
        if find_file(directory, NAME) is not None:
            find_whole(directory, NAME)
    except DamagedFile as damaged:
        logger.warning(f"{damaged.file} is damaged, and will be compiled again")
        damaged.file.unlink()


def _compile(constants: dict[str, int], directory: Path) -> None:
    from nanopage.worker import aot_compile  # imports what the compiler needs

    with tempfile.TemporaryDirectory(dir=directory, prefix=SCRATCH) as scratch:
        made = Path(scratch, NAME)
        sources = [aot_compile.KERNELS / name for name in SOURCES]
        aot_compile.run_compiler(constants, *sources, *aot_compile.shared(made))
        made.chmod(0o600)
        aot_compile.move(made, directory / NAME)


def _key(constants: dict[str, int]) -> str:
    """A digest of what the compiled code depends on: the sources, torch, the CPU and the constants."""
    parts = torch.__version__, *processor(), sorted(constants.items())
    key = hashlib.sha256(repr(parts).encode())
    kernels = Path(tile_linear.__file__).parent
    sources = [*sorted(kernels.glob("*.h")), *(kernels / name for name in SOURCES)]
    for source in [*sources, Path(__file__).with_name("aot_compile.py")]:
        key.update(source.read_bytes())
    return f"tiles-{key.hexdigest()[:24]}"
