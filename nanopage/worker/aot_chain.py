"""Calls code that AOTInductor has compiled, one function after another, without holding Python's global lock.

torch's own loader holds the lock while compiled code runs. The other threads of the process stand still meanwhile, and
those of a server send nothing. Here, calls go through ctypes, which releases the lock, to the C interface of a compiled
library. `aot_chain.cpp` calls the layers of a decode in one go.

A tensor crosses as a handle: the address of a tensor object, which the called function frees.
"""

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p, py_object
from pathlib import Path

from torch import Tensor
from torch._C import _aoti

# torch hands over handles as capsules. Unlike the functions of a CDLL, these two do not release the lock.
_address_in = ctypes.PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
_capsule_of = ctypes.PYFUNCTYPE(py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", ctypes.pythonapi))


class _Function(ctypes.Structure):
    _fields_ = (("run", c_void_p), ("container", c_void_p), ("fixed", POINTER(c_void_p)), ("num_fixed", c_size_t))


class Library:
    """A compiled function of tensors that returns one tensor. Threads must not call it at the same time.

    Raises:
        OSError: the file is not a library that can be loaded.
        RuntimeError: it cannot be initialized.
    """

    def __init__(self, file: Path):
        self.library = ctypes.CDLL(str(file))
        self.container = c_void_p()
        if self.library.AOTInductorModelContainerCreateWithDevice(byref(self.container), c_size_t(1), b"cpu", None):
            raise RuntimeError(f"{file} cannot be initialized")
        weakref.finalize(self, self.library.AOTInductorModelContainerDelete, self.container).atexit = False


class FixedInputs:
    """Tensors that a compiled function takes in every call, after its other inputs: a layer's weights, for example."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.handles = _handles(tensors)
        weakref.finalize(self, _tensors, self.handles).atexit = False


class Chain:
    """Compiled functions that are called one after another.

    Each function takes the output of the one before as its first input. Its other inputs are those of the call, which
    are the same for all functions, and then its fixed inputs.

    Args:
        chain_library: compiled from aot_chain.cpp.
        libraries, fixed: of each function.
    """

    def __init__(self, chain_library: ctypes.CDLL, libraries: Sequence[Library], fixed: Sequence[FixedInputs]):
        self.run = chain_library.run_chain
        self.libraries, self.fixed = libraries, fixed  # kept, because `functions` has their addresses
        self.functions = (_Function * len(libraries))(
            *(
                _Function(
                    ctypes.cast(library.library.AOTInductorModelContainerRunSingleThreaded, c_void_p),
                    library.container,
                    inputs.handles,
                    len(inputs.handles),
                )
                for library, inputs in zip(libraries, fixed, strict=True)
            )
        )
        self.copy = ctypes.cast(libraries[0].library.aoti_torch_new_tensor_handle, c_void_p)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The output of the last function. Raises: RuntimeError if a function fails; its error is on stderr."""
        handles, output = _handles(inputs), c_void_p()
        if self.run(self.copy, self.functions, len(self.functions), handles, len(handles), byref(output)):
            raise RuntimeError("compiled code failed; it has written its error to standard error")
        return _tensors([output.value])[0]


def load_chain_library(file: Path) -> ctypes.CDLL:
    """Load what was compiled from aot_chain.cpp. Raises: OSError."""
    library = ctypes.CDLL(str(file))
    library.run_chain.argtypes = [
        c_void_p,
        POINTER(_Function),
        c_size_t,
        POINTER(c_void_p),
        c_size_t,
        POINTER(c_void_p),
    ]
    library.run_chain.restype = c_int
    return library


def _handles(tensors: Sequence[Tensor]) -> "ctypes.Array[c_void_p]":
    """New handles."""
    capsules = _aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))
    return (c_void_p * len(capsules))(*(_address_in(capsule, None) for capsule in capsules))


def _tensors(handles) -> list[Tensor]:
    """The tensors of handles, which are freed."""
    return _aoti.alloc_tensors_by_stealing_from_void_ptrs([_capsule_of(handle, None, None) for handle in handles])
