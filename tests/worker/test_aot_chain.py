"""aot_chain.py: what is called, what is freed, and who runs meanwhile. test_aot.py has what compiled layers compute."""

import ctypes
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from torch._inductor.cpp_builder import get_cpp_compiler

from nanopage.worker import aot_compile
from nanopage.worker.aot_chain import Chain, FixedInputs, Library, load_chain_library

# Stands in for a compiled function of one input, which it returns once another thread has set `flag`.
WAITING = """
#include <unistd.h>
#include <cstddef>
extern "C" {
volatile int flag = 0;
int AOTInductorModelContainerCreateWithDevice(void** container, size_t, const char*, const char*) { return 0; }
int AOTInductorModelContainerDelete(void*) { return 0; }
int aoti_torch_new_tensor_handle(void*, void**) { return 1; }
int AOTInductorModelContainerRunSingleThreaded(void*, void** in, size_t, void** out, size_t, void*, void*) {
    out[0] = in[0];
    for (int i = 0; i < 3000 && !flag; i++) usleep(10000);
    return !flag;
}
}
"""


@pytest.fixture(scope="module")
def chain_library(tmp_path_factory):
    directory = tmp_path_factory.mktemp("chain")
    aot_compile.compile_chain(directory / "chain.so")
    (file,) = directory.glob("chain.*.so")
    return load_chain_library(file)


@pytest.fixture
def waiting(chain_library, tmp_path):
    """A chain of the function that waits, and its flag."""
    (tmp_path / "waiting.cpp").write_text(WAITING)
    command = [
        get_cpp_compiler(),
        "-shared",
        "-fPIC",
        str(tmp_path / "waiting.cpp"),
        "-o",
        str(tmp_path / "waiting.so"),
    ]
    subprocess.run(command, check=True)
    library = Library(tmp_path / "waiting.so")
    return Chain(chain_library, [library], [FixedInputs([])]), ctypes.c_int.in_dll(library.library, "flag")


def test_other_threads_run_while_compiled_code_does(waiting):
    chain, flag = waiting
    threading.Timer(0.1, lambda: setattr(flag, "value", 1)).start()
    x = torch.arange(3.0)
    assert torch.equal(chain(x), x)


def test_a_function_that_fails_is_an_error(chain_library, waiting):
    chain, flag = waiting
    flag.value = 1
    twice = Chain(chain_library, chain.libraries * 2, chain.fixed * 2)  # it can call, but not copy a handle
    assert torch.equal(twice(torch.arange(3.0)), torch.arange(3.0))
    with pytest.raises(RuntimeError, match="compiled code failed"):
        twice(torch.arange(3.0), torch.arange(3.0))


def test_a_call_and_the_end_of_fixed_inputs_free_their_tensors(waiting):
    chain, flag = waiting
    flag.value = 1
    array = np.arange(3.0)
    before = sys.getrefcount(array)
    chain(torch.from_numpy(array))
    assert sys.getrefcount(array) == before
    fixed = FixedInputs([torch.from_numpy(array)])
    assert sys.getrefcount(array) == before + 1
    del fixed
    assert sys.getrefcount(array) == before


def test_what_is_no_library_is_an_error(tmp_path):
    (tmp_path / "text.so").write_text("text")
    with pytest.raises(OSError, match=r"text\.so"):
        Library(tmp_path / "text.so")
