"""aot_chain.py: what is called, what is freed, and who runs meanwhile. test_aot.py has what compiled layers compute."""

import ctypes
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._inductor.cpp_builder import get_cpp_compiler

from nanopage.cpu import aot_compile
from nanopage.cpu.aot_chain import Chain, FixedInputs, Layers, Library
from nanopage.kernels.grouped_attention import GroupedAttention
from nanopage.layers.attention import StepContext
from nanopage.state.layer_kinds import MOST_KINDS

# Stands in for a compiled function. It returns its first input once another thread has set `flag` to 1, and fails where
# that is -1, or 0 for a second.
WAITING = """
#include <unistd.h>
#include <cstddef>
extern "C" {
volatile int flag = 0;
int AOTInductorModelContainerCreateWithDevice(void** container, size_t, const char*, const char*) { return 0; }
int AOTInductorModelContainerDelete(void*) { return 0; }
int aoti_torch_delete_tensor_object(void*);
int AOTInductorModelContainerRunSingleThreaded(void*, void** in, size_t num, void** out, size_t, void*, void*) {
    out[0] = in[0];
    for (size_t i = 1; i < num; i++) aoti_torch_delete_tensor_object(in[i]);
    for (int i = 0; i < 100 && !flag; i++) usleep(10000);
    return flag != 1;
}
}
"""


NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 2, 4, 8


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    directory = tmp_path_factory.mktemp("chain")
    constants = {"HEAD_DIM": HEAD_DIM, "NUM_KV_HEADS": NUM_KV_HEADS, "GROUP": 1, "BLOCK_SIZE": BLOCK_SIZE}
    constants |= {"SCALE": "0.5", "SOFTCAP": "0.0", "BFLOAT16": 0, "KV_CACHE": "Stored"}
    constants |= {"MOST_KINDS": MOST_KINDS, "BATCH_INVARIANT": 0}
    aot_compile.compile_chain(constants, directory / "chain.so")
    (file,) = directory.glob("chain.*.so")
    return Chain(file)


@pytest.fixture
def waiting(tmp_path):
    """The function that waits, and its flag."""
    (tmp_path / "waiting.cpp").write_text(WAITING)
    torch_libraries = Path(torch.__file__).parent / "lib"
    command = [get_cpp_compiler(), "-shared", "-fPIC", str(tmp_path / "waiting.cpp")]
    command += [f"-L{torch_libraries}", "-ltorch_cpu", "-o", str(tmp_path / "waiting.so")]
    subprocess.run(command, check=True)
    library = Library(tmp_path / "waiting.so", 2)
    return library, ctypes.c_int.in_dll(library.library, "flag")


def test_other_threads_run_while_compiled_code_does(chain, waiting):
    function, flag = waiting
    threading.Timer(0.1, lambda: setattr(flag, "value", 1)).start()
    x = torch.arange(3.0)
    assert torch.equal(chain.call(function, FixedInputs([]), x)[0], x)


def layers_of(function, states):
    """Layers that do the same, with a state or with attention."""
    kv_cache, zeros = torch.zeros(len(states), 2, 1, NUM_KV_HEADS, 32), [0] * len(states)
    functions = [[function] * (1 if has_state else 2) for has_state in states]
    return Layers(functions, [FixedInputs([])] * len(states), kv_cache, zeros, zeros, [*map(int, states)])


def run_layers(chain, function, states, x, num_parts=1):
    zeros = torch.zeros(1, dtype=torch.int64)
    attention = GroupedAttention(zeros.expand(len(x)), zeros[None], zeros + 1, zeros + 1)
    state = SimpleNamespace(sources=zeros.expand(len(x)), targets=zeros.expand(len(x)))
    step = StepContext(zeros, [attention, state], [], [], rotations=[(x, x)])
    layers = layers_of(function, states)
    return chain.run_layers(layers, range(len(states)), x, step, torch.empty_like(x), num_parts)


def test_a_function_that_fails_is_an_error(chain, waiting):
    function, flag = waiting
    flag.value = -1
    x = torch.arange(32.0).view(4, NUM_KV_HEADS, HEAD_DIM)
    for fails in (
        lambda: chain.call(function, FixedInputs([]), x),
        lambda: run_layers(chain, function, [False, False], x),
        lambda: run_layers(chain, function, [False, True], x, num_parts=2),
        lambda: run_layers(chain, function, [True], x),
    ):
        with pytest.raises(RuntimeError, match="compiled code failed"):
            fails()


def test_calls_and_the_end_of_fixed_inputs_free_their_tensors(chain, waiting):
    function, flag = waiting
    flag.value = 1
    array = np.arange(32, dtype=np.float32)
    before = sys.getrefcount(array)
    x = torch.from_numpy(array).view(4, NUM_KV_HEADS, HEAD_DIM)
    held = sys.getrefcount(array)
    assert torch.equal(chain.call(function, FixedInputs([]), x)[0], x)
    for states in ([False], [True], [False] * 3, [True, False, True], [False, True, False]):
        for num_parts in (1, 2):
            assert torch.equal(run_layers(chain, function, states, x, num_parts), x)
    assert sys.getrefcount(array) == held
    fixed = FixedInputs([x])
    del x
    assert sys.getrefcount(array) > before
    del fixed
    assert sys.getrefcount(array) == before


def test_what_is_no_library_is_an_error(tmp_path):
    (tmp_path / "text.so").write_text("text")
    with pytest.raises(OSError, match=r"text\.so"):
        Library(tmp_path / "text.so")
