"""CompiledProduct: products in compiled C++, for steps that run eagerly.

There are products with weights in tiles, also in mixtures of experts, and products of adapters. PyTorch alone would
convert all weights in tiles for each product, and multiply by one adapter after another.
"""

import ctypes
import hashlib
import logging
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from nanopage.cpu import toolchain
from nanopage.cpu.aot_chain import new_handles, take_tensors
from nanopage.cpu.compiled_files import LOCK, DamagedFile, find_file, find_whole, may_compile, processor
from nanopage.cpu.toolchain import KERNELS, SCRATCH, TILE_SOURCES, compile_library, product_constants
from nanopage.files.private_files import check_private, make_private, private_cache

logger = logging.getLogger("nanopage")


class CompiledProduct:
    """Computes the same as the operator nanopage::NAME.

    Raises: OSError if the file is not a library that can be loaded; AttributeError if it is another library.
    """

    def __init__(self, file: Path, name: str):
        self._library = ctypes.CDLL(str(file))
        self._product = getattr(self._library, f"aoti_torch_cpu_{name}")

    def __call__(self, *arguments: Tensor | Sequence[int]) -> Tensor:
        """Call it with tensors and, after them, lists of integers."""
        return self._call(self._product, arguments)

    def experts(self, *arguments: Tensor | int) -> Tensor:
        """Call nanopage::tile_experts, which is in tile_linear's library, too, with tensors and then numbers."""
        return self._call(self._library.aoti_torch_cpu_tile_experts, arguments)

    def _call(self, function: Any, arguments: Sequence[Any]) -> Tensor:
        tensors = [argument.contiguous() for argument in arguments if isinstance(argument, Tensor)]
        others: list[Any] = []
        for value in arguments[len(tensors) :]:
            if isinstance(value, bool):
                others.append(ctypes.c_int32(value))
            elif isinstance(value, int):
                others.append(ctypes.c_int64(value))
            else:
                others += [(ctypes.c_int64 * len(value))(*value), ctypes.c_int64(len(value))]
        handles, output = new_handles(tensors), ctypes.c_void_p()
        code = function(*map(ctypes.c_void_p, handles), *others, ctypes.byref(output))
        take_tensors(handles)  # frees them
        if code:
            raise RuntimeError("a compiled product failed; it has written its error to standard error")
        return take_tensors([output.value])[0]


def tile_product(dtype: torch.dtype) -> CompiledProduct | None:
    """nanopage::tile_linear and, as `experts`, nanopage::tile_experts for activations of this dtype. Returns: as
    `_product`."""
    return _product("tile_linear", TILE_SOURCES, dtype, "products with weights in tiles")


def adapter_product(dtype: torch.dtype) -> CompiledProduct | None:
    """nanopage::add_adapters for activations of this dtype, float32 or bfloat16. Returns: as `_product`."""
    return _product("add_adapters", ("lora.cpp",), dtype, "products of adapters")


def _product(name: str, sources: Sequence[str], dtype: torch.dtype, what: str) -> CompiledProduct | None:
    """The compiled operator. Compiles it on first use, which takes seconds.

    Args: sources: files in this folder. what: a description for messages.
    Returns: None if NANOPAGE_COMPILE forbids compiling, or, after a warning, if compiling fails.
    """
    try:
        constants = product_constants(dtype)
        directory = private_cache("compiled") / _key(name, sources, constants)
        make_private(directory)
        with FileLock(directory / LOCK, mode=0o600):
            _remove_damaged(directory, name)
            if find_file(directory, name) is None:
                if not may_compile():
                    logger.info(f"NANOPAGE_COMPILE=never: {what} are not compiled")
                    return None
                compile_library(constants, [KERNELS / source for source in sources], directory / name)
            check_private(directory)
            return CompiledProduct(find_whole(directory, name), name)
    except (OSError, AttributeError, RuntimeError, DamagedFile, subprocess.CalledProcessError) as error:
        logger.warning(f"compiled {what} cannot be used: {error}")
        return None


def _remove_damaged(directory: Path, name: str) -> None:
    """Remove a damaged library, and the files that killed processes have left."""
    for stale in directory.glob(f"{SCRATCH}*"):
        shutil.rmtree(stale, ignore_errors=True)
    try:
        if find_file(directory, name) is not None:
            find_whole(directory, name)
    except DamagedFile as damaged:
        logger.warning(f"{damaged.file} is damaged, and will be compiled again")
        damaged.file.unlink()


def _key(name: str, sources: Sequence[str], constants: dict[str, int]) -> str:
    """A digest of what the compiled code depends on: the sources, torch, the CPU and the constants."""
    parts = torch.__version__, *processor(), sorted(constants.items())
    key = hashlib.sha256(repr(parts).encode())
    files = [*sorted(KERNELS.glob("*.h")), *(KERNELS / source for source in sources)]
    for file in [*files, Path(toolchain.__file__)]:
        key.update(file.read_bytes())
    return f"{name}-{key.hexdigest()[:24]}"
