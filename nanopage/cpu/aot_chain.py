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
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _aoti

from nanopage.kernels.grouped_attention import GroupedAttention
from nanopage.layers.attention import StepContext
from nanopage.models.decoder import Decoder
from nanopage.recurrent.sequences import CHUNK, divide
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
        ("before", c_void_p),
        ("after", c_void_p),
        ("kv_cache", c_void_p),
        ("window", c_int64),
        ("rope", c_int64),
        ("kind", c_int64),
    )


class _Part(ctypes.Structure):
    _fields_ = (
        ("x", 1 * c_void_p),
        ("places", MOST_KINDS * c_void_p),
        ("targets", MOST_KINDS * c_void_p),
        ("attended", 1 * c_void_p),
        ("cos", 2 * c_void_p),
        ("sin", 2 * c_void_p),
        ("adapters", 1 * c_void_p),
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
    """What all steps of a kind need to know of the layers.

    Args:
        functions: of each layer: `before` and `after`, or, if it has a state, one for the whole layer.
        fixed: the fixed inputs of each layer's functions.
        kv_caches: the KV cache of each layer, as in KVCache.
        windows: how many of the last tokens the attention of each layer sees; None for all up to the token itself.
            STATE, which is negative: if the layer has attention, every token sees all keys.
        ropes: which of the model's ropes each layer has.
        kinds: the kind of each layer (see layer_kinds.py).
    """

    def __init__(
        self,
        functions: Sequence[Sequence[Library]],
        fixed: Sequence[FixedInputs],
        kv_caches: Sequence[Tensor],
        windows: Sequence[int | None],
        ropes: Sequence[int],
        kinds: Sequence[int],
    ):
        self.functions, self.fixed, self.kv_caches = functions, fixed, kv_caches  # `structures` has their addresses
        self.num_blocks = kv_caches[0].shape[1]
        addresses = [[ctypes.addressof(library.functions) for library in of_layer] for of_layer in functions]
        self.structures = (_Layer * len(fixed))(
            *(
                _Layer(inputs.structure, *([None] * (2 - len(own))), *own, cache.data_ptr(), window or 0, rope, kind)
                for own, inputs, cache, window, rope, kind in zip(
                    addresses, fixed, kv_caches, windows, ropes, kinds, strict=True
                )
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
            c_void_p, c_size_t, POINTER(POINTER(Step)), c_int64, POINTER(_Part), c_int, c_int64, c_void_p,
        ]  # fmt: skip
        self.attend.argtypes = [POINTER(Step), POINTER(c_void_p), c_int64, c_void_p, c_int64, c_int64, c_void_p]
        self.attend.restype = None

    def call(self, library: Library, fixed: FixedInputs, *inputs: Tensor, num_outputs: int = 1) -> list[Tensor]:
        """Call a function. Raises: RuntimeError if it fails; its error is on stderr."""
        handles, outputs = new_handles(inputs), (c_void_p * num_outputs)()
        _check(self._call(library.functions, handles, len(handles), fixed.structure, outputs, num_outputs))
        return take_tensors(outputs)

    def run_layers(
        self, layers: Layers, run: range, x: Tensor, step: StepContext, attended: Tensor, num_parts: int
    ) -> Tensor:
        """Run adjacent layers, up to the attention of the last one if it has one.

        Args:
            run: which of the layers.
            x: [T, hidden_size]. T is the number of tokens.
            step: with the rotations. Its attentions are GroupedAttentions, or, if they are states, StatePages of T
                sequences. States of fewer sequences are allowed if no layer of the run has one. Its adapters, if there
                are any, are a further input of all functions: the adapter slot of each token, int64 [T].
            attended: [T, num_heads, head_dim], contiguous. Each layer writes the output of its attention here, and the
                last layer's output stays.
            num_parts: the rows are divided into at most this many parts, which are computed at the same time, each by
                a single thread. 1: all threads compute all rows together.

        Returns: the input of the last layer, [T, hidden_size]; or its output, if it has a state.
        Raises: RuntimeError if a function fails; its error is on stderr.
        """
        num_rows = x.shape[0]
        part_rows = -(-num_rows // num_parts)
        while num_rows > 1 and num_rows % part_rows == 1:
            part_rows += 1  # because the code for several rows may be wrong for one row
        parts = (_Part * -(-num_rows // part_rows))()
        cos, sin = zip(*step.rotations, strict=True)
        tensors: dict[str, Sequence[Tensor | None]] = {"x": [x], "attended": [attended], "cos": cos, "sin": sin}
        tensors["places"] = [places_of(attention) for attention in step.attentions]
        tensors["targets"] = [getattr(attention, "targets", None) for attention in step.attentions]
        tensors["adapters"] = [step.adapters]
        fields: list[tuple[str, int]] = []  # which array and element of a part each tensor goes to
        divided: list[Tensor] = []
        for name, values in tensors.items():
            for index, tensor in enumerate(values):
                if tensor is not None and tensor.shape[0] == num_rows:
                    fields.append((name, index))
                    divided += [tensor] if len(parts) == 1 else tensor.split(part_rows)
        handles = new_handles(divided)
        for place, handle in enumerate(handles):
            name, index = fields[place // len(parts)]
            getattr(parts[place % len(parts)], name)[index] = handle
        steps = {kind: Step(each) for kind, each in enumerate(step.attentions) if isinstance(each, GroupedAttention)}
        of_kinds = (POINTER(Step) * len(step.attentions))()  # null for a kind with a state
        for kind, of_kind in steps.items():
            of_kinds[kind] = pointer(of_kind)
        code = self._run_layers(
            ctypes.addressof(layers.structures[run.start]), len(run),
            of_kinds, layers.num_blocks, parts, len(parts), part_rows, attended.data_ptr(),
        )  # fmt: skip
        take_tensors(handles)  # frees the handles
        _check(code)
        outputs = take_tensors([part.output for part in parts])
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class CompiledLayers:
    """Computes the layers of a Decoder, with compiled code. If a sequence has several tokens, layers with a state are
    called by themselves: once for the sequences with a single token, and once for the others. They run eagerly if the
    others are short.

    With `batch_invariant`, there are no functions for a single row: such a row is computed twice.

    Args:
        layers: by the kind of step, by rows and adapters.
        prompts: of each layer with a state, its function for sequences with several tokens.
        modules: the layers of the Decoder.
        heads: num_heads and head_dim of attention.
        num_threads: the most threads that a step may have.
    """

    def __init__(
        self,
        chain: Chain,
        layers: dict[str, Layers],
        prompts: dict[int, Library],
        modules: Sequence[nn.Module],
        heads: tuple[int, int],
        num_threads: int,
    ):
        self.chain, self.layers, self.prompts, self.modules = chain, layers, prompts, modules
        self.heads, self.num_threads = heads, num_threads
        self.have_state = [len(functions) == 1 for functions in layers["many"].functions]

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """Run all layers on x [T, hidden_size]. Returns: the output of the last layer, for the rows that the step
        keeps."""
        if "one" in self.layers:
            return self._run_all(x, step)
        num_kept = len(x if step.rows is None else step.rows)
        if len(x) == 1:
            x, step = _double(x), _double_step(step)
        elif num_kept == 1 and step.rows is not None:
            step = replace(step, rows=_double(step.rows))
        return self._run_all(x, step)[:num_kept]

    def _run_all(self, x: Tensor, step: StepContext) -> Tensor:
        """As `__call__`, for numbers of rows that there are functions for."""
        whole, num_layers = all(places_of(each).shape[0] == x.shape[0] for each in step.attentions), len(self.modules)
        if whole and not step.taps:
            return self._run(range(num_layers), x, step)

        def kind_of(index: int) -> tuple[bool, int]:
            return self.have_state[index] and not whole, sum(tap <= index for tap in step.taps)

        for (has_state, _), run in groupby(range(num_layers), kind_of):
            indexes = list(run)
            if indexes[0] in step.taps:
                step.taps[indexes[0]] = x
            if has_state:
                for index in indexes:
                    x = self._run_state(index, x, step)
            else:
                x = self._run(range(indexes[0], indexes[-1] + 1), x, step)
        if num_layers in step.taps:
            step.taps[num_layers] = x
        return x

    def _run_state(self, index: int, x: Tensor, step: StepContext) -> Tensor:
        """As `__call__`, for a layer with a state."""
        sequences, outputs = divide(step.attentions[step.kinds[index]]), []
        if (prompts := sequences[-1].prompts) is not None and prompts.tokens.shape[1] < CHUNK:
            return self.modules[index](x, step)
        for part, rows in zip(sequences, x.split([part.num_rows for part in sequences]), strict=True):
            layers, inputs = self._layers(rows, step), [rows, part.sources, part.targets]
            function = layers.functions[index][0] if part.prompts is None else self.prompts[index]
            inputs += [] if part.prompts is None else part.prompts.tensors()
            outputs += self.chain.call(function, layers.fixed[index], *inputs)
        x = torch.cat(outputs)
        return x if step.rows is None or index + 1 < len(self.modules) else x[step.rows]

    def _run(self, run: range, x: Tensor, step: StepContext) -> Tensor:
        """As `__call__`, for some adjacent layers."""
        attended = x.new_empty(len(x), *self.heads)
        num_threads = min(self.num_threads, torch.get_num_threads())
        num_parts = num_threads if len(x) >= num_threads * PART_ROWS else 1
        x = self.chain.run_layers(self._layers(x, step), run, x, step, attended, num_parts)
        last = run[-1]
        if self.have_state[last]:
            return x if step.rows is None or run.stop < len(self.modules) else x[step.rows]
        x, attended = step.keep(self.modules[last].self_attn, x, attended)
        inputs = (x, attended) if step.adapters is None else (x, attended, step.adapters)
        layers = self._layers(x, step)
        return self.chain.call(layers.functions[last][-1], layers.fixed[last], *inputs)[0]

    def _layers(self, x: Tensor, step: StepContext) -> Layers:
        """The layers with functions for as many rows as x has."""
        kind = "one" if len(x) == 1 else "many"
        return self.layers[kind if step.adapters is None else f"adapted-{kind}"]


def _double_step(step: StepContext) -> StepContext:
    """A step of a single token, as one of two sequences that are the same. Both write the same to the same slots."""
    attentions = [
        GroupedAttention(*map(_double, (each.slot_mapping, each.block_tables, each.query_lens, each.seq_lens)))
        for each in step.attentions
    ]
    rotations = [(_double(cos), _double(sin)) for cos, sin in step.rotations]
    return replace(step, positions=_double(step.positions), attentions=attentions, rotations=rotations, rows=None)


def _double(tensor: Tensor) -> Tensor:
    return torch.cat((tensor, tensor))


def places_of(attention: Any) -> Tensor:
    """Where the K and V of each token go, or, of layers with a state, where the state of each sequence is."""
    return attention.slot_mapping if isinstance(attention, GroupedAttention) else attention.sources


class CompiledHead:
    """Computes the last norm and the head: `logits` of a Decoder.

    Args:
        fixed: the tensors of the norm and the head.
        model: computes the logits of several rows if there is no compiled code for them.
    """

    def __init__(self, chain: Chain, libraries: dict[tuple[str, str], Library], fixed: FixedInputs, model: Decoder):
        self.chain, self.fixed, self.model = chain, fixed, model
        self.of_one, self.of_many = libraries.get(("head", "one")), libraries.get(("head", "many"))

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden_size] -> [T, vocab_size]"""
        if len(hidden) == 1:  # without code for one row, as in CompiledLayers
            return self(_double(hidden))[:1] if self.of_one is None else self.of_one_row(hidden)[0]
        if self.of_many is None:
            return self.model.logits(hidden)
        return self.chain.call(self.of_many, self.fixed, hidden)[0]

    def of_one_row(self, hidden: Tensor) -> list[Tensor]:
        """hidden [1, hidden_size] -> logits [1, vocab_size] and their `argmax`, int64 [1]."""
        assert self.of_one is not None
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
