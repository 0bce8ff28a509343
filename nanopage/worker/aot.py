"""Decoder layers compiled ahead of time: torch.export and AOTInductor once, a shared library on disk ever after.

One layer's code serves all layers of its kind, because weights are inputs: compiling takes a minute whatever the depth.
It is done by a process of the lowest priority while the engine works eagerly; a later start only maps the libraries
(milliseconds, without importing the compiler). Calling one costs microseconds: there are no guards to evaluate and
the kernels are called from C++. In turn nothing checks the shapes of inputs.
"""

import atexit
import contextlib
import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor, nn

import nanopage
from nanopage.config import ModelConfig
from nanopage.kernels import pages, reference
from nanopage.kernels.cpu.flash_decoding import Splits
from nanopage.kernels.cpu.int8_linear import product_of_few
from nanopage.kernels.cpu.packed_linear import TILE, matvec
from nanopage.kernels.cpu.tile_attention import attend_tile
from nanopage.layers.attention import AttentionMetadata
from nanopage.layers.embedding import LMHead
from nanopage.layers.linear import Linear, pack
from nanopage.private_files import check_private, make_private
from nanopage.weights import hub, loader

logger = logging.getLogger("nanopage")

OPTIONS: dict[str, Any] = {
    "size_asserts": False,  # packed weights have no strides to assert on
    "alignment_asserts": False,
    "assert_indirect_indexing": False,  # of pages, in the innermost loops
    "cpp.enable_floating_point_contract_flag": "fast",  # fused multiply-add
}
# A layer's graphs. Whole: of one token; of several sequences of one token each. In parts, if there are prompts: what
# comes before attention with the write to the cache, attention of a tile, and what comes after it.
KINDS = ("one", "decode", "before", "tile", "after")
MAX_PROCESSES = 4  # that compile at once
WITH_WINDOW = ("one", "decode", "tile")  # those that depend on the layer's window
SCRATCH = "scratch-"  # begins the names of directories to compile in
HEAD = "head.pt2"  # the language-model head of one row
HEAD_OF_FEW = "head-of-few.pt2"  # and of several, of int8 weights


class Graphs:
    """The compiled decoder layers and head of one model: made in the background, then put in the modules' place.

    Whatever goes wrong with them is said once, and the engine goes on without: compiled code is an optimization.

    Args:
        path: of the model.
        config: the same model's.
        dtype: of weights, activations and KV: float32 or bfloat16 (see kernels/packed_linear.py).
        block_size: of the KV cache.
        quantization: of the weights, as in EngineConfig.
    """

    def __init__(
        self, path: Path, config: ModelConfig, dtype: torch.dtype, block_size: int, quantization: str | None = None
    ):
        self.config = config
        self.spec = {"path": str(path.absolute()), "dtype": str(dtype).removeprefix("torch."), "block_size": block_size}
        self.spec["quantization"] = quantization
        self.files = _files(config, quantization)
        self.spec["threads"] = torch.get_num_threads()  # the code divides its loops by them
        self.directory = hub.cache_directory() / "compiled" / _key(config, self.spec)
        self._process: subprocess.Popen | None = None
        self._log: Path | None = None  # what that process prints
        self._given_up = False
        self._damaged: set[str] = set()  # names of graphs

    def ready(self) -> bool:
        """Whether all graphs are there. If the process that makes them has failed, says so once."""
        if self._given_up:
            return False
        if all(find_file(self.directory, name) for name in self.files):
            return True
        if self._process is not None and self._process.poll() is not None:
            self._give_up(f"compiling the decoder layer failed (see {self._log})")
        return False

    def start(self) -> None:
        """Have the graphs made by another process, which ends with this one."""
        if self._process is not None or self._given_up or self.ready():
            return
        try:
            self._process = self._spawn()
        except OSError as error:
            self._give_up(f"the decoder layer cannot be compiled: {error}")
            return
        if hasattr(os, "SCHED_IDLE"):  # Linux: it runs when nobody else wants to, from its first import on
            with contextlib.suppress(OSError):  # some containers forbid it; the process is nice, too
                os.sched_setscheduler(self._process.pid, os.SCHED_IDLE, os.sched_param(0))
        atexit.register(self.stop)
        logger.info("compiling the decoder layer in the background; until that is done it runs eagerly")

    def _spawn(self) -> subprocess.Popen:
        make_private(self.directory)
        descriptor, log = tempfile.mkstemp(dir=self.directory, prefix="log-")
        self._log = Path(log)
        # -P and the working directory: what lies in the user's current directory must not be imported.
        command = [sys.executable, "-P", "-m", "nanopage.worker.aot", json.dumps(self.spec), str(self.directory)]
        inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = [str(Path(nanopage.__file__).parents[1]), *filter(os.path.isabs, inherited)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
        try:
            # The process reads from a pipe that this one holds open: it ends with this one, however that ends.
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=descriptor, stderr=descriptor, start_new_session=True,
                cwd=self.directory, env=environment,
            )  # fmt: skip
        finally:
            os.close(descriptor)

    def stop(self) -> None:
        """End the process that `start` began, if it is still at work."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # its C++ compilers, too
            self._process.wait()

    def wait(self) -> None:
        """Until all graphs are there. Raises RuntimeError with the end of the log if they could not be made."""
        self.start()
        if self._process is not None:
            self._process.wait()
        if not self.ready():
            log = self._log.read_text(errors="replace")[-2000:] if self._log is not None else ""
            raise RuntimeError(f"compiling the decoder layer failed ({self._log or self.directory}):\n{log}")

    def install(self, model: Any) -> bool:
        """Call the graphs in the place of the modules' own code. Returns whether that was possible."""
        try:
            check_private(self.directory)
            loaded = {name: _load(find_file(self.directory, name)) for name in self.files}
        except DamagedFile as damaged:
            self._set_aside(damaged.file)
            return False
        except Exception as error:  # torch raises what its C++ code threw, as several types
            where = f"{self.directory} (unpacked in {tempfile.gettempdir()})"
            self._give_up(f"the compiled code in {where} cannot be loaded: {error}")
            return False
        for layer, window in zip(model.model.layers, self.config.sliding_windows, strict=True):
            graphs = {kind: loaded[_file(kind, window)] for kind in KINDS}
            layer.forward = _CompiledLayer(graphs, list(tensors_of(layer).values()), window)
        if model.lm_head.tiles is not None:
            model.lm_head.forward = _CompiledHead(loaded[HEAD], loaded.get(HEAD_OF_FEW), model.lm_head)
        if self._log is not None:
            self._log.unlink(missing_ok=True)
        return True

    def _set_aside(self, file: Path) -> None:
        """Have a damaged file made again, but not twice."""
        name = file.name.split(".")[0]
        again = name in self._damaged
        self._damaged.add(name)
        self._process = None
        try:
            file.rename(file.with_suffix(".damaged"))
        except OSError as error:
            self._give_up(f"the compiled code in {file} is damaged, and cannot be set aside: {error}")
            return
        if again:
            self._give_up(f"the compiled code in {file} is damaged again")
        else:
            logger.warning(f"the compiled code in {file} is damaged: it is set aside, and will be made again")

    def _give_up(self, why: str) -> None:
        self._given_up = True
        logger.warning(f"{why}; running eagerly")


class DamagedFile(Exception):
    """A compiled graph whose contents are not those that were written."""

    def __init__(self, file: Path):
        super().__init__(f"{file} is damaged")
        self.file = file


def find_file(directory: Path, name: str) -> Path | None:
    """The file that holds the graph `name`. The digest of its contents is part of its name."""
    stem = name.removesuffix(".pt2")
    return next((file for file in sorted(directory.glob(f"{stem}.*.pt2")) if file.name.count(".") == 2), None)


class _CompiledLayer:
    """A decoder layer's forward, by its graphs."""

    def __init__(self, graphs: dict[str, Any], weights: list[Tensor], window: int | None):
        self.graphs, self.weights, self.window = graphs, weights, window

    def __call__(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        rows: Tensor | None = None,
    ) -> Tensor:
        if metadata.splits is not None:
            kind = "one" if len(x) == 1 else "decode"
            inputs = [x, cos, sin, kv_cache, metadata.slot_mapping, *tensors_in(metadata.splits)]
            return self.graphs[kind]([*inputs, *self.weights])[0]
        q = self.graphs["before"]([x, cos, sin, kv_cache, metadata.slot_mapping, *self.weights])[0]
        lengths = metadata.query_lens, metadata.seq_lens
        attended = reference.paged_attention(q, kv_cache, metadata.block_tables, *lengths, self.window, self._tile)
        if rows is not None:
            x, attended = x[rows], attended[rows]
        return self.graphs["after"]([x, attended, *self.weights])[0]

    def _tile(self, chunks: reference.Chunks, q: Tensor, kv_cache: Tensor, block_tables: Tensor, out: Tensor) -> bool:
        (bound,) = self.graphs["tile"]([q, kv_cache, block_tables, chunks.rows, chunks.positions, out, *self.weights])
        return q.dtype == torch.float32 or bound.item() <= reference.LARGEST_ROUNDED_SCORE**2


class _CompiledHead:
    """The head's forward: of one row by its graph, of more by another or, where there is none, by oneDNN."""

    def __init__(self, of_one: Any, of_few: Any, head: LMHead):
        self.of_one, self.of_few, self.head = of_one, of_few, head
        self.weights = [tensor for tensor in (head.tiles, head.scales) if tensor is not None]

    def __call__(self, x: Tensor) -> Tensor:
        graph = self.of_one if len(x) == 1 else self.of_few
        if graph is None:
            return type(self.head).forward(self.head, x)
        return graph([x, *self.weights])[0][:, : self.head.out_features]


def tensors_of(layer: nn.Module) -> dict[str, Tensor]:
    """What a layer's graph takes beside activations, by name."""
    return dict(layer.named_parameters()) | dict(layer.named_buffers())


def tensors_in(splits: Splits) -> list[Tensor]:
    return [splits.blocks, splits.owner, splits.start, splits.end, splits.of, splits.merged]


def _file(kind: str, window: int | None) -> str:
    return f"{kind}.pt2" if window is None or kind not in WITH_WINDOW else f"{kind}-window-{window}.pt2"


def _files(config: ModelConfig, quantization: str | None) -> dict[str, tuple[str, int | None]]:
    """File -> the kind of its graph and the window of the layers it is for."""
    windows = dict.fromkeys(config.sliding_windows)
    files = {_file(kind, window): (kind, window) for kind in KINDS for window in windows}
    return files | dict.fromkeys([HEAD] if quantization is None else [HEAD, HEAD_OF_FEW], ("head", None))


def _key(config: ModelConfig, spec: dict[str, Any]) -> str:
    """Of everything the code depends on: our source, torch, this kind of CPU, and the sizes it is made for."""
    here = Path(nanopage.__file__).parent
    sources = [*sorted(here.glob("kernels/cpu/*.py")), here / "kernels" / "pages.py"]
    sources += [*sorted(here.glob("layers/*.py")), here / "models" / f"{config.family}.py", Path(__file__)]
    sizes = asdict(config) | {"num_layers": None, "vocab_size": None, "max_position_embeddings": None}
    sizes["sliding_windows"] = None  # in the name of the file
    processor = sorted(torch.cpu.get_capabilities().items()), torch.backends.cpu.get_cpu_capability()
    parts = [torch.__version__, *processor, spec["dtype"], spec["block_size"]]
    parts += [spec["threads"], spec["quantization"], sorted((name, repr(value)) for name, value in sizes.items())]
    digest = hashlib.sha256(repr(parts).encode())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


def _load(file: Path | None) -> Any:
    """Raises: DamagedFile; FileNotFoundError if there is no file any more; and what torch raises."""
    from torch._C._aoti import AOTIModelPackageLoader

    if file is None:
        raise FileNotFoundError("a file has just been removed")
    # torch does not notice a changed byte, and would run what it makes of it.
    if _digest(file) != file.name.split(".")[1]:
        raise DamagedFile(file)
    return AOTIModelPackageLoader(str(file), "model", True, 1, -1).boxed_run


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


class _Part(nn.Module):
    """What a graph does of a layer's work."""

    def __init__(self, layer: nn.Module, kind: str):
        super().__init__()
        self.layer: Any = layer
        self.kind = kind
        for part in layer.modules():
            if isinstance(part, Linear):
                part.few_rows = kind in ("one", "decode")

    def forward(self, *inputs: Tensor) -> Tensor:
        if self.kind == "after":
            return self.layer.after(*inputs)
        if self.kind == "tile":
            q, kv_cache, block_tables, rows, positions, out = inputs
            return attend_tile(q, kv_cache, block_tables, rows, positions, out, self.layer.self_attn.window)
        x, cos, sin, kv_cache, slot_mapping, *splits = inputs
        if self.kind == "before":
            q, k, v = self.layer.before(x, cos, sin)
            pages.write(k, v, kv_cache, slot_mapping)
            return q.contiguous()  # as the graphs that take it believe it to be
        # With splits, attention looks at nothing else.
        metadata = AttentionMetadata(slot_mapping, slot_mapping, slot_mapping, slot_mapping, Splits(*splits))
        return self.layer(x, cos, sin, kv_cache, metadata)


class _Exported(nn.Module):
    """A part of a layer as a function of tensors."""

    def __init__(self, part: _Part):
        super().__init__()
        self.part = [part]  # in a list: its weights are not constants of this module
        self.names = [f"layer.{name}" for name in tensors_of(part.layer)]

    def forward(self, inputs: list[Tensor], weights: list[Tensor]) -> Tensor:
        tensors = dict(zip(self.names, weights, strict=True))
        return torch.func.functional_call(self.part[0], tensors, tuple(inputs))


def compile_layer(layer: Any, config: ModelConfig, dtype: torch.dtype, block_size: int, kind: str, file: Path):
    """Write the graph of `kind` of a decoder layer to `file`. Takes up to tens of seconds."""
    inputs, dims = example(config, dtype, block_size, kind)
    # A single token takes so little time that allocating for it shows: a twentieth of a step.
    options = {"memory_planning": kind == "one"}
    # oneDNN's tensors are opaque; plain ones of their shape are traced in their place.
    stand_ins = [torch.empty(t.shape, dtype=t.dtype) if t.is_mkldnn else t for t in tensors_of(layer).values()]
    _export(_Exported(_Part(layer, kind)), [inputs, stand_ins], [dims, [None] * len(stand_ins)], file, options)


class _ExportedHead(nn.Module):
    """The head as a function of tensors: the vocabulary may have any size."""

    def forward(self, x, tiles, scales=None):
        return matvec(x, tiles, None) if scales is None else product_of_few(x, tiles, scales)


def compile_head(config: ModelConfig, dtype: torch.dtype, quantized: bool, file: Path):
    """Write one of the head's graphs to `file`."""
    any_size = {0: torch.export.Dim.DYNAMIC}
    num_rows, many = (1, None) if file.name == HEAD else (16, any_size)
    num_tiles = 500
    if quantized:
        weight = [torch.zeros(num_tiles, config.hidden_size, TILE, dtype=torch.int8), torch.zeros(num_tiles, TILE)]
    else:
        per_word = 4 // dtype.itemsize
        word = torch.int32 if per_word == 2 else torch.float32
        weight = [torch.zeros(num_tiles, config.hidden_size // per_word, TILE, dtype=word)]
    inputs = [torch.zeros(num_rows, config.hidden_size, dtype=dtype), *weight]
    _export(_ExportedHead(), inputs, [many, *[any_size] * len(weight)], file, {})


@torch.no_grad()
def _export(module: nn.Module, inputs: list[Any], dims: list[Any], file: Path, options: dict[str, Any]) -> None:
    from torch._inductor import aoti_compile_and_package

    with tempfile.TemporaryDirectory(dir=file.parent, prefix=SCRATCH) as scratch:
        program = torch.export.export(module, tuple(inputs), dynamic_shapes=tuple(dims), strict=False)
        made = Path(scratch, file.name)
        aoti_compile_and_package(program, package_path=str(made), inductor_configs=OPTIONS | options)
        os.replace(made, file.with_name(f"{file.stem}.{_digest(made)}.pt2"))  # it appears whole or not at all


def example(config: ModelConfig, dtype: torch.dtype, block_size: int, kind: str) -> tuple[list[Tensor], list[Any]]:
    """(inputs of a graph but the weights, their dynamic dimensions). Sizes are hints of what is worth a thread."""
    from torch.export import Dim

    from nanopage.kernels.cpu.flash_decoding import split

    num_tokens = {"one": 1, "decode": 16}.get(kind, 90)
    many, any_size = None if kind == "one" else Dim.DYNAMIC, Dim.DYNAMIC
    x = torch.zeros(num_tokens, config.hidden_size, dtype=dtype)
    cos, sin = torch.zeros(2, num_tokens, 1, config.head_dim // 2, dtype=dtype)
    q = torch.zeros(num_tokens, config.num_heads, config.head_dim, dtype=dtype)
    kv_cache = torch.zeros(2, 8, config.num_kv_heads, config.head_dim * block_size, dtype=dtype)
    if kind == "after":
        return [x, q], [{0: many}, {0: many}]
    if kind == "tile":
        tables, rows = torch.zeros(2, 20, dtype=torch.int64), torch.zeros(2, 45, dtype=torch.int64)
        any_table = {0: any_size, 1: any_size}
        inputs = [q, kv_cache, tables, rows, rows.int(), q.clone()]
        return inputs, [{0: many}, {1: any_size}, any_table, any_table, any_table, {0: many}]
    inputs = [x, cos, sin, kv_cache, torch.zeros(num_tokens, dtype=torch.int64)]
    dims = [{0: many}, {0: many}, {0: many}, {1: any_size}, {0: many}]
    if kind != "before":
        seq_lens = torch.full((num_tokens,), 1000)
        tables = torch.zeros(num_tokens, -(-1000 // block_size), dtype=torch.int64)
        inputs += tensors_in(split(tables, seq_lens, block_size))
        dims += [*[{0: any_size}] * 4, *[{0: many, 1: any_size}] * 2]
    return inputs, dims


def main(spec: dict[str, Any], directory: Path) -> None:
    """Make the graphs of `spec` that `directory` does not have, as many at a time as there are threads."""
    os.umask(0o077)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    os.nice(19)  # where there is no SCHED_IDLE
    torch._inductor.config.force_disable_caches = True  # ours is the cache
    _register_lowering()
    config = loader.read_config(Path(spec["path"]))
    with FileLock(directory / "lock"):
        for stale in directory.glob(f"{SCRATCH}*"):  # of a process that was killed
            shutil.rmtree(stale, ignore_errors=True)
        missing = [name for name in _files(config, spec["quantization"]) if find_file(directory, name) is None]
        if missing:
            _probe_compiler()
        # Forked, so that nothing is imported again; each takes some 700 MB meanwhile.
        pool = ProcessPoolExecutor(min(spec["threads"], MAX_PROCESSES), multiprocessing.get_context("fork"))
        with pool:
            for _ in pool.map(partial(_make, spec, config, directory), missing):
                pass  # an exception comes out here


def _end_with_the_parent() -> None:
    """The parent holds the other end of our standard input, and never writes."""
    os.read(0, 1)
    if os.getpgrp() == os.getpid():  # the parent has given us a group of our own: the C++ compilers end, too
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _make(spec: dict[str, Any], config: ModelConfig, directory: Path, name: str) -> None:
    """One graph, in a process of its own."""
    torch.set_num_threads(spec["threads"])
    dtype = getattr(torch, spec["dtype"])
    kind, window = _files(config, spec["quantization"])[name]
    if kind == "head":
        compile_head(config, dtype, spec["quantization"] is not None, directory / name)
        return
    # The smallest model with such a layer; its weights are never filled.
    small = replace(config, num_layers=1, sliding_windows=(window,), vocab_size=64)
    model: Any = loader.build_model(small, dtype, torch.device("cpu"))
    layer = model.model.layers[0]
    pack(layer, spec["quantization"])
    compile_layer(layer, config, dtype, spec["block_size"], kind, directory / name)


def _probe_compiler() -> None:
    """Find the vector extensions that the C++ compiler supports, for seconds, before each graph's process does."""
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list
    from torch._inductor.utils import fresh_cache

    with fresh_cache():  # the probes are loaded: not from torch's shared cache
        valid_vec_isa_list()


def _register_lowering() -> None:
    """Have Inductor call oneDNN for nanopage::packed_linear from C++, not our Python function."""
    from torch._inductor.ir import TensorBox
    from torch._inductor.lowering import register_lowering
    from torch._inductor.mkldnn_ir import LinearUnary

    @register_lowering(torch.ops.nanopage.packed_linear.default, type_promotion_kind=None)
    def _(x, packed_weight, bias):
        return TensorBox.create(LinearUnary.create(x, packed_weight, bias, "none", [], ""))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
