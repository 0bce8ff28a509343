"""Calls code that AOTInductor has compiled, one function after another, without holding Python's global lock.

torch's own loader holds the lock while compiled code runs. Meanwhile the other threads of the process stand still, and
a server sends nothing. Here, calls go through ctypes, which releases the lock, to the C interface of a compiled
library. `aot_chain.cpp` runs all layers of a step, with attention between their parts, in one call.

A tensor crosses as a handle: the address of a tensor object, which the called function frees.
"""

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_size_t, c_void_p, pointer, py_object
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C import _aoti

from nanopage.kernels.grouped_attention import GroupedAttention
from nanopage.layers.attention import StepContext
from nanopage.models.decoder import Decoder
from nanopage.state.layer_kinds import MOST_KINDS

# A step with at least this many rows for each thread is computed in parts, one by each thread. Every thread then reads
# all weights, but does not wait for the others at every loop, nor read what another core has just written. On two
# cores, this is 6 to 9 % faster for 200 to 600 rows, and 3 to 6 % slower for 32.
PART_ROWS = 64

# torch hands over handles as capsules. Unlike the functions of a CDLL, these two do not release the lock.
_address_in = ctypes.PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
_capsule_of = ctypes.PYFUNCTYPE(py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", ctypes.pythonapi))


class _Function(ctypes.Structure):
    _fields_ = (("run", c_void_p), ("container", c_void_p))


class _FixedInputs(ctypes.Structure):
    _fields_ = (("handles", POINTER(c_void_p)), ("count", c_size_t))


class _Layer(ctypes.Structure):
    _fields_ = (
        ("fixed", _FixedInputs),
        ("kv_cache", c_void_p),
        ("window", c_int64),
        ("rope", c_int64),
        ("kind", c_int64),
    )


class _Part(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("slot_mapping", MOST_KINDS * c_void_p),
        ("attended", c_void_p),
        ("cos", 2 * c_void_p),
        ("sin", 2 * c_void_p),
        ("adapters", c_void_p),
        ("output", c_void_p),
    )


class Step(ctypes.Structure):
    """The addresses of what attention needs to know of a step, for one kind of layers."""

    _fields_ = (
        ("num_sequences", c_int64),
        ("block_tables", c_void_p),
        ("table_width", c_int64),
        ("query_lens", c_void_p),
        ("seq_lens", c_void_p),
    )

    def __init__(self, attention: GroupedAttention):
        tensors = [attention.block_tables, attention.query_lens, attention.seq_lens]
        self.tensors = tables, query_lens, seq_lens = [tensor.contiguous() for tensor in tensors]  # kept
        super().__init__(
            *tables.shape[:1], tables.data_ptr(), tables.shape[1], query_lens.data_ptr(), seq_lens.data_ptr()
        )


class Library:
    """A compiled function of tensors.

    Args: count: the length of `functions`. Two threads must not call the same function at the same time.
    Raises:
        OSError: the file is not a library that can be loaded.
        RuntimeError: it cannot be initialized.
    """

    def __init__(self, file: Path, count: int = 1):
        self.library = ctypes.CDLL(str(file))
        run = ctypes.cast(self.library.AOTInductorModelContainerRunSingleThreaded, c_void_p)
        self.functions = (_Function * count)()
        for function in self.functions:
            container = c_void_p()
            if self.library.AOTInductorModelContainerCreateWithDevice(byref(container), c_size_t(1), b"cpu", None):
                raise RuntimeError(f"{file} cannot be initialized")
            weakref.finalize(self, self.library.AOTInductorModelContainerDelete, container).atexit = False
            function.run, function.container = run, container


class FixedInputs:
    """Tensors that a compiled function takes in every call, after its other inputs: a layer's weights, for example."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.handles = new_handles(tensors)
        self.structure = _FixedInputs(self.handles, len(self.handles))
        weakref.finalize(self, take_tensors, self.handles).atexit = False


class Layers:
    """What all steps need to know of the layers.

    Args:
        fixed: the fixed inputs of each layer's functions.
        kv_caches: the KV cache of each layer, as in KVCache.
        windows: how many of the last tokens the attention of each layer sees; None for all.
        ropes: which of the model's ropes each layer has.
        kinds: the kind of each layer (see layer_kinds.py).
    """

    def __init__(
        self,
        fixed: Sequence[FixedInputs],
        kv_caches: Sequence[Tensor],
        windows: Sequence[int | None],
        ropes: Sequence[int],
        kinds: Sequence[int],
    ):
        self.fixed, self.kv_caches = fixed, kv_caches  # kept, because `structures` has their addresses
        self.num_blocks = kv_caches[0].shape[1]
        self.structures = (_Layer * len(fixed))(
            *(
                _Layer(inputs.structure, cache.data_ptr(), window or 0, rope, kind)
                for inputs, cache, window, rope, kind in zip(fixed, kv_caches, windows, ropes, kinds, strict=True)
            )
        )


class Chain:
    """Calls compiled functions, with the code that was compiled from aot_chain.cpp and flash_attention.cpp.

    Raises: OSError if the file is not a library that can be loaded; AttributeError if it is another library.
    """

    def __init__(self, file: Path):
        library = ctypes.CDLL(str(file))
        self._call, self._run_layers, self.attend = library.call_function, library.run_layers, library.attend
        self._call.argtypes = [
            POINTER(_Function), c_void_p, c_size_t, POINTER(_FixedInputs), POINTER(c_void_p), c_size_t,
        ]  # fmt: skip
        self._run_layers.argtypes = [
            POINTER(_Function), POINTER(_Function), POINTER(_Layer), c_size_t, POINTER(POINTER(Step)), c_int64,
            POINTER(_Part), c_int, c_int64, c_void_p,
        ]  # fmt: skip
        self.attend.argtypes = [POINTER(Step), POINTER(c_void_p), c_int64, c_void_p, c_int64, c_int64, c_void_p]
        self.attend.restype = None

    def call(self, library: Library, fixed: FixedInputs, *inputs: Tensor, num_outputs: int = 1) -> list[Tensor]:
        """Call a function. Raises: RuntimeError if it fails; its error is on stderr."""
        handles, outputs = new_handles(inputs), (c_void_p * num_outputs)()
        _check(self._call(library.functions, handles, len(handles), fixed.structure, outputs, num_outputs))
        return take_tensors(outputs)

    def run_layers(
        self,
        before: Library,
        after: Library,
        layers: Layers,
        x: Tensor,
        step: StepContext,
        attended: Tensor,
        num_parts: int,
    ) -> Tensor:
        """Run layers up to the attention of the last one.

        Args:
            before, after: the parts of a layer before and after attention.
            x: [T, hidden_size]. T is the number of tokens.
            step: with the rotations. Its attentions are GroupedAttentions. Its adapters, if there are any, are a
                further input of both functions: the adapter slot of each token, int64 [T].
            attended: [T, num_heads, head_dim], contiguous. Each layer writes the output of its attention here, and the
                last layer's output stays.
            num_parts: the rows are divided into at most this many parts, which are computed at the same time, each by
                a single thread. 1: all threads compute all rows together.

        Returns: the input of the last layer, [T, hidden_size].
        Raises: RuntimeError if a function fails; its error is on stderr.
        """
        part_rows = -(-len(x) // num_parts)
        while len(x) > 1 and len(x) % part_rows == 1:
            part_rows += 1  # because the code for several rows may be wrong for one row
        attentions, rotations, adapters = step.attentions, step.rotations, step.adapters
        slots = [attention.slot_mapping for attention in attentions]
        tensors = [x, attended, *slots, *(t for rotation in rotations for t in rotation)]
        inputs = [new_handles(t.split(part_rows)) for t in tensors]
        parts = (_Part * len(inputs[0]))()
        for part, of_part in zip(parts, zip(*inputs, strict=True), strict=True):
            part.x, part.attended, *others = of_part
            part.slot_mapping[: len(slots)], turns = others[: len(slots)], others[len(slots) :]
            part.cos[: len(rotations)], part.sin[: len(rotations)] = turns[::2], turns[1::2]
        steps = list(map(Step, attentions))
        if adapters is not None:
            inputs.append(new_handles(adapters.split(part_rows)))
            for part, handle in zip(parts, inputs[-1], strict=True):
                part.adapters = handle
        code = self._run_layers(
            before.functions, after.functions, layers.structures, len(layers.structures),
            (POINTER(Step) * len(steps))(*map(pointer, steps)), layers.num_blocks, parts, len(parts), part_rows,
            attended.data_ptr(),
        )  # fmt: skip
        for handles in inputs:
            take_tensors(handles)  # frees the handles
        _check(code)
        return torch.cat(take_tensors([part.output for part in parts]))


class CompiledLayers:
    """Computes the layers of a Decoder, with compiled code.

    Args:
        libraries: the compiled functions, by part and kind.
        layers: the layers without the weights of adapters.
        adapted: the layers with these weights. None: there are no slots for adapters.
        last: the attention of the last layer, a SelfAttention.
        num_threads: the most threads that a step may have.
    """

    def __init__(
        self,
        chain: Chain,
        libraries: dict[tuple[str, str], Library],
        layers: Layers,
        adapted: Layers | None,
        last: Any,
        num_threads: int,
    ):
        self.chain, self.libraries, self.layers, self.adapted = chain, libraries, layers, adapted
        self.last, self.num_threads = last, num_threads

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """Run all layers on x [T, hidden_size]. Returns: the output of the last layer, for the rows that the step
        keeps."""
        layers = self.layers if step.adapters is None else self.adapted
        assert layers is not None
        attended = x.new_empty(len(x), self.last.num_heads, self.last.head_dim)
        before, after = self._part("before", x, step), self._part("after", x, step)
        num_threads = min(self.num_threads, torch.get_num_threads())
        num_parts = num_threads if len(x) >= num_threads * PART_ROWS else 1
        x = self.chain.run_layers(before, after, layers, x, step, attended, num_parts)
        x, attended = step.keep(self.last, x, attended)
        inputs = (x, attended) if step.adapters is None else (x, attended, step.adapters)
        return self.chain.call(self._part("after", x, step), layers.fixed[-1], *inputs)[0]

    def _part(self, part: str, x: Tensor, step: StepContext) -> Library:
        """The function for as many rows as x has."""
        kind = "one" if len(x) == 1 else "many"
        return self.libraries[part, kind if step.adapters is None else f"adapted-{kind}"]


class CompiledHead:
    """Computes the last norm and the head: `logits` of a Decoder.

    Args:
        fixed: the tensors of the norm and the head.
        model: computes the logits of several rows if there is no compiled code for them.
    """

    def __init__(self, chain: Chain, libraries: dict[tuple[str, str], Library], fixed: FixedInputs, model: Decoder):
        self.chain, self.fixed, self.model = chain, fixed, model
        self.of_one, self.of_many = libraries["head", "one"], libraries.get(("head", "many"))

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden_size] -> [T, vocab_size]"""
        if len(hidden) == 1:
            return self.of_one_row(hidden)[0]
        if self.of_many is None:
            return self.model.logits(hidden)
        return self.chain.call(self.of_many, self.fixed, hidden)[0]

    def of_one_row(self, hidden: Tensor) -> list[Tensor]:
        """hidden [1, hidden_size] -> logits [1, vocab_size] and their `argmax`, int64 [1]."""
        return self.chain.call(self.of_one, self.fixed, hidden, num_outputs=2)


def _check(code: int) -> None:
    if code:
        raise RuntimeError("compiled code failed; it has written its error to standard error")


def new_handles(tensors: Sequence[Tensor]) -> "ctypes.Array[c_void_p]":
    """New handles."""
    capsules = _aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))
    return (c_void_p * len(capsules))(*(_address_in(capsule, None) for capsule in capsules))


def take_tensors(handles) -> list[Tensor]:
    """Turn handles into their tensors, and free the handles."""
    return _aoti.alloc_tensors_by_stealing_from_void_ptrs([_capsule_of(handle, None, None) for handle in handles])
