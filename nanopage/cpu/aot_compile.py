"""Compiles decoder layers ahead of time. `aot.py` runs `python -m nanopage.cpu.aot_compile SPEC DIRECTORY LOG`.

Each part of a layer (see `aot_parts.py`) is exported as a function of its inputs and weights, and compiled
to a file. Several parts are compiled at the same time, in processes of their own.
"""

import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import psutil
import torch
from filelock import FileLock
from torch import Tensor, nn

from nanopage.adapters.layers import Running
from nanopage.adapters.model import AdaptedDecoder
from nanopage.config.model import ModelConfig
from nanopage.cpu import lora  # noqa: F401 (registers an operator)
from nanopage.cpu.aot import TIME_LIMIT, tensors_of
from nanopage.cpu.aot_parts import CROSS, PLAIN, file_kinds
from nanopage.cpu.compiled_files import LOCK, find_file
from nanopage.cpu.packed import PackedRowWeight, PackedWeight, pack
from nanopage.cpu.packed_linear import TILE, matvec, tile_width
from nanopage.cpu.tiled import tile
from nanopage.cpu.tiled_experts import join_experts
from nanopage.cpu.toolchain import (
    KERNELS,
    OPERATORS,
    SCRATCH,
    TILE_SOURCES,
    compile_library,
    compile_operators,
    move,
    only_avx2,
    product_constants,
)
from nanopage.layers.attention import StepContext
from nanopage.models.decoder import scale_logits
from nanopage.models.meta import meta_model
from nanopage.recurrent.sequences import Prompts, Sequences, make_prompts
from nanopage.recurrent.states import state_of
from nanopage.sampling.argmax import argmax
from nanopage.state import pages
from nanopage.state.layer_kinds import MOST_KINDS, STATE

OPTIONS: dict[str, Any] = {
    "size_asserts": False,  # packed weights have no strides to assert on
    "alignment_asserts": False,
    "assert_indirect_indexing": False,  # pages are indexed in the innermost loops
    "cpp.enable_floating_point_contract_flag": "fast",  # fused multiply-add
    "aot_inductor.custom_ops_to_c_shims": {
        torch.ops.nanopage.tile_linear.default: [
            "int aoti_torch_cpu_tile_linear(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle*)"
        ],
        torch.ops.nanopage.tile_experts.default: [
            "int aoti_torch_cpu_tile_experts(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, "
            "AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, int64_t, int64_t, int32_t, AtenTensorHandle*)"
        ],
        torch.ops.nanopage.add_adapters.default: [
            "int aoti_torch_cpu_add_adapters(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, "
            "AtenTensorHandle, const int64_t*, int64_t, AtenTensorHandle*)"
        ],
    },
}
MAX_PROCESSES = 4  # processes that compile at the same time
PROCESS_BYTES = 2**30  # memory of each process: 700 MB were measured


class _Exported(nn.Module):
    """Computes a part of a layer as a function of its inputs, and of its KV cache or state and weights."""

    def __init__(self, layer: nn.Module, part: str, running: Running | None):
        super().__init__()
        self.part = [_Part(layer, part, running)]  # in a list, so that its weights do not become constants
        self.names = [f"layer.{name}" for name in tensors_of(layer)]

    def forward(self, inputs: list[Tensor], kv_cache: Tensor, weights: list[Tensor]) -> Tensor:
        tensors = dict(zip(self.names, weights, strict=True))
        return torch.func.functional_call(self.part[0], tensors, (*inputs, kv_cache))


class _Part(nn.Module):
    def __init__(self, layer: nn.Module, part: str, running: Running | None):
        super().__init__()
        self.layer: Any = layer
        self.part, self.running = part, running

    def forward(self, *tensors: Tensor) -> Tensor:
        *inputs, kv_cache = tensors
        if self.running is not None:
            *inputs, slots = inputs
            self.running.step = SimpleNamespace(adapters=slots)
        if self.part == "after":
            return self.layer.after(*inputs)
        if self.part == "mixer":
            x, sources, targets, *prompts = inputs
            sequences = Sequences(x.shape[0], sources, targets, prompts=Prompts(*prompts) if prompts else None)
            return self.layer(x, StepContext(x, [SimpleNamespace(divided=[sequences])], [0], [kv_cache]))
        x, cos, sin, slot_mapping = inputs
        made = self.layer.before(x, cos, sin)
        if isinstance(made, Tensor):  # of CROSS
            return made.contiguous()
        q, k, v = made
        pages.write(k, v, kv_cache, slot_mapping)
        return q.contiguous()  # flash_attention.cpp assumes this layout


def compile_layer(
    layer: Any,
    config: ModelConfig,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    block_size: int,
    part: str,
    num_rows: int,
    running: Running | None,
    file: Path,
    prompts: Prompts | None = None,
) -> None:
    """Compile one part of a decoder layer to `file`, for a single row or for several. Takes tens of seconds at most.

    Args:
        running: the AdaptedDecoder's `running`, if rows have adapters.
        prompts: those of the rows, for a layer with a state whose sequences have several tokens.
    """
    x = torch.zeros(num_rows, config.hidden_size, dtype=dtype)
    if part == "after":
        inputs = [x, torch.zeros(num_rows, config.num_heads, config.head_dim, dtype=dtype)]
    elif part == "mixer":
        num_sequences = len(x) if prompts is None else len(prompts.starts)
        inputs = [x, *torch.zeros(2, num_sequences, dtype=torch.int64), *(prompts.tensors() if prompts else [])]
    else:
        tables = 1 if config.rope.temperature is None else 2
        cos, sin = torch.zeros(2, num_rows, tables, config.rope.num_rotated(config.head_dim) // 2, dtype=dtype)
        inputs = [x, cos, sin, torch.zeros(num_rows, dtype=torch.int64)]
    if running is not None:
        inputs.append(torch.zeros(num_rows, dtype=torch.int64))
    # oneDNN's tensors are opaque: tracing uses plain tensors of the same shape instead.
    stand_ins = [torch.empty(t.shape, dtype=t.dtype) if t.is_mkldnn else t for t in tensors_of(layer).values()]
    kv_cache = torch.zeros(2, 8, config.num_kv_heads, config.head_dim * block_size, dtype=kv_dtype)
    if part == "mixer":
        kv_cache = state_of(kv_cache, dtype)
    any_size = torch.export.Dim.DYNAMIC
    dims = [[{0: None if num_rows == 1 else any_size}] * len(inputs), {1: any_size}, [None] * len(stand_ins)]
    # Memory planning saves allocations, which take a twentieth of a step of a single token.
    options = {"memory_planning": num_rows == 1}
    _export(_Exported(layer, part, running), [inputs, kv_cache, stand_ins], dims, file, options)


class _ExportedHead(nn.Module):
    """Computes the last norm and the head as a function of their input and tensors. Returns logits, and for a single
    row also the token with the largest logit."""

    def __init__(self, norm: nn.Module, config: ModelConfig, one_row: bool):
        super().__init__()
        self.norm, self.names, self.config, self.one_row = [norm], list(tensors_of(norm)), config, one_row

    def forward(self, x, norm_tensors, tiles, scales=None):
        x = torch.func.functional_call(self.norm[0], dict(zip(self.names, norm_tensors, strict=True)), x)
        if scales is None:
            logits = matvec(x, tiles, None)
        else:
            logits = torch.ops.nanopage.tile_linear(x, tiles, scales)[:, : self.config.vocab_size]
        logits = scale_logits(logits, self.config.logit_divisor, self.config.logit_softcap)
        return (logits, argmax(logits)) if self.one_row else logits


def compile_head(
    norm: nn.Module, config: ModelConfig, dtype: torch.dtype, tiled: bool, num_rows: int, file: Path
) -> None:
    """Compile the last norm and the head, for a single row or for several, to `file`."""
    any_size = torch.export.Dim.DYNAMIC
    width = TILE if tiled else tile_width(dtype)
    num_tiles = -(-config.vocab_size // width)
    if tiled:  # tiles of any kind: compiled code does not check sizes
        weight = [torch.empty(num_tiles, config.hidden_size, TILE, dtype=torch.bfloat16), torch.empty(num_tiles, TILE)]
    else:
        per_word = 4 // dtype.itemsize
        word = torch.int32 if per_word == 2 else torch.float32
        weight = [torch.empty(num_tiles, config.hidden_size // per_word, width, dtype=word)]
    tensors = list(tensors_of(norm).values())
    inputs = [torch.zeros(num_rows, config.hidden_size, dtype=dtype), tensors, *weight]
    dims = [{0: None if num_rows == 1 else any_size}, [None] * len(tensors), *[None] * len(weight)]
    _export(_ExportedHead(norm, config, num_rows == 1), inputs, dims, file, {})


@torch.no_grad()
def _export(module: nn.Module, inputs: list[Any], dims: list[Any], file: Path, options: dict[str, Any]) -> None:
    from torch._inductor import aoti_compile_and_package

    with tempfile.TemporaryDirectory(dir=file.parent, prefix=SCRATCH) as scratch:
        program = torch.export.export(module, tuple(inputs), dynamic_shapes=tuple(dims), strict=False)
        package = Path(scratch, "package.pt2")
        aoti_compile_and_package(program, package_path=str(package), inductor_configs=OPTIONS | options)
        with zipfile.ZipFile(package) as archive:
            (library,) = (name for name in archive.namelist() if name.endswith(".so"))
            made = Path(scratch, file.name)
            made.write_bytes(archive.read(library))
        move(made, file)


def attention_constants(
    config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype, block_size: int, invariant: bool = False
) -> dict[str, int | str]:
    """What flash_attention.cpp is compiled for. Args: invariant: as in `aot.Compiled`."""
    stored = {torch.bfloat16: "Bfloat16", torch.float16: "Float16"}
    return {
        "HEAD_DIM": config.head_dim,
        "NUM_KV_HEADS": config.num_kv_heads,
        "GROUP": config.num_heads // config.num_kv_heads,
        "BLOCK_SIZE": block_size,
        "SCALE": repr(config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale),
        "SOFTCAP": repr(config.attention_softcap),
        "KV_CACHE": "Stored" if kv_dtype == dtype else stored[kv_dtype],
        "MOST_KINDS": MOST_KINDS,
        "BATCH_INVARIANT": int(invariant),
        **product_constants(dtype),
    }


def compile_chain(constants: dict[str, int | str], file: Path) -> None:
    """Compile aot_chain.cpp with flash_attention.cpp."""
    compile_library(constants, [Path(__file__).with_name("aot_chain.cpp"), KERNELS / "flash_attention.cpp"], file)


def main(spec: dict[str, Any], directory: Path, make: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Compile the parts that `spec` needs and `directory` does not have. `aot.Compiled` makes `spec`.

    Args: make: compiles a part in a forked process. None: `make_part`.
    Returns: name of a file -> what `make` returned.
    """
    os.umask(0o077)
    timer = threading.Timer(TIME_LIMIT, _give_up)
    timer.daemon = True
    timer.start()
    config = msgspec.json.decode(spec["config"], type=ModelConfig)
    with FileLock(directory / LOCK):
        for stale in directory.glob(f"{SCRATCH}*"):  # left by a process that was killed
            shutil.rmtree(stale, ignore_errors=True)
        names = file_kinds(config, spec["tiled"], spec["adapted"], spec["invariant"])
        missing = [name for name in names if find_file(directory, name) is None]
        if not missing:
            return {}
        # Importing the compiler takes seconds.
        torch._inductor.config.force_disable_caches = True  # `directory` is the cache
        if only_avx2():
            torch._inductor.config.cpp.simdlen = 256
        _register_lowering()
        _probe_compiler()
        # Forked processes import nothing again.
        with (
            tempfile.TemporaryDirectory(dir=directory, prefix=SCRATCH) as scratch,
            ProcessPoolExecutor(_num_processes(spec["threads"]), multiprocessing.get_context("fork")) as pool,
        ):
            sources = [*TILE_SOURCES] if spec["tiled"] or config.experts is not None else []
            sources += ["lora.cpp"] if spec["adapted"] else []
            if sources:
                compile_operators(product_constants(getattr(torch, spec["dtype"])), sources, Path(scratch))
                os.environ["LIBRARY_PATH"] = scratch  # where the linker looks for the operators
                torch._inductor.config.aot_inductor.custom_op_libs = [OPERATORS]
            made = pool.map(partial(make or make_part, spec, config, directory), missing)
            return dict(zip(missing, made, strict=True))  # raises the exceptions of the processes


def _num_processes(num_threads: int) -> int:
    """How many processes may compile at the same time. Raises: MemoryError if there is no memory for one."""
    available = psutil.virtual_memory().available
    if available < PROCESS_BYTES:
        raise MemoryError(f"compiling needs 1 GiB of memory, and {available / 2**30:.2f} GiB are available")
    return min(num_threads, MAX_PROCESSES, available // PROCESS_BYTES)


def _give_up() -> None:
    """End this process, and the processes and C++ compilers that it has started."""
    print(f"compiling took longer than {TIME_LIMIT} s", file=sys.stderr, flush=True)
    if os.getpgrp() == os.getpid():  # true if `aot.py` has started it
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def make_part(spec: dict[str, Any], config: ModelConfig, directory: Path, name: str) -> None:
    """Compile one part. Runs in a forked process."""
    torch.set_num_threads(spec["threads"])
    dtype, kv_dtype, tiled = getattr(torch, spec["dtype"]), getattr(torch, spec["kv_dtype"]), spec["tiled"]
    part, kind = file_kinds(config, tiled, spec["adapted"], spec["invariant"])[name]
    has_state, has_experts = part == "mixer" or part.endswith(CROSS), not part.endswith(PLAIN)
    part = part.removesuffix(PLAIN).removesuffix(CROSS)
    adapted, kind = kind.startswith("adapted-"), kind.removeprefix("adapted-")
    if part == "chain":
        constants = attention_constants(config, dtype, kv_dtype, spec["block_size"], spec["invariant"])
        compile_chain(constants, directory / name)
        return
    # Inductor uses the number of rows to decide which loops are worth several threads.
    num_rows = {"one": 1, "many": 90, "prompts": 90}[kind]
    counts = np.array([50, 37, 3])
    prompts = make_prompts(counts, counts, torch.device("cpu")) if kind == "prompts" else None
    # The smallest model with such a layer. Its weights are never filled.
    experts = None if config.experts is None else replace(config.experts, layers=(has_experts,))
    windows = (STATE if has_state else None,)
    small = replace(config, num_layers=1, sliding_windows=windows, vocab_size=64, experts=experts, encoders={})
    model = meta_model(small).to(dtype).to_empty(device="cpu").requires_grad_(False)
    if part == "head":
        compile_head(model.norm, config, dtype, tiled, num_rows, directory / name)
        return
    layer, running = model.layers[0], None
    join_experts(layer, torch.bfloat16)
    if tiled:
        tile(layer, "bfloat16")
    else:
        pack(layer, PackedRowWeight if kind == "one" else PackedWeight)
    if adapted:  # the code reads the number of slots and their rank from the tensors
        add = torch.ops.nanopage.add_adapters
        running = AdaptedDecoder(model, 1, 1, dtype, torch.device("cpu"), add).running
    compile_layer(
        layer, config, dtype, kv_dtype, spec["block_size"], part, num_rows, running, directory / name, prompts
    )


def _probe_compiler() -> None:
    """Find the vector extensions that the C++ compiler supports. Takes seconds, so it is done once, before forking."""
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list
    from torch._inductor.utils import fresh_cache

    with fresh_cache():  # probes are loaded, so they must not come from torch's shared cache
        valid_vec_isa_list()


def _register_lowering() -> None:
    """Make Inductor call oneDNN from C++ for nanopage::packed_linear, instead of our Python function."""
    from torch._inductor.ir import TensorBox
    from torch._inductor.lowering import register_lowering
    from torch._inductor.mkldnn_ir import LinearUnary

    @register_lowering(torch.ops.nanopage.packed_linear.default, type_promotion_kind=None)
    def _(x, packed_weight, bias):
        return TensorBox.create(LinearUnary.create(x, packed_weight, bias, "none", [], ""))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
    Path(sys.argv[3]).unlink(missing_ok=True)  # the log matters only after a failure
