"""Compiled: runs steps on a CPU with decoder layers that torch.export and AOTInductor compile ahead of time.

Weights are inputs of the compiled code, so the code of one layer serves all layers of its kind, and the time to
compile does not depend on the depth: for SmolLM2-135M, 40 s on two cores with AVX512-BF16, 92 s with AVX2. A process
of the lowest priority (`aot_compile.py`) compiles while the engine works eagerly, and writes shared libraries to
`$XDG_CACHE_HOME/nanopage/compiled`, or to `~/.cache/nanopage/compiled`. A later start only loads these, which takes
milliseconds and does not import the compiler. A call (`aot_chain.py`) costs microseconds, because there are no guards
to evaluate and C++ calls the kernels. In return, nothing checks the shapes of inputs.
"""

import atexit
import contextlib
import ctypes
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nanopage
from nanopage.config import ModelConfig
from nanopage.kernels.chunks import Chunks
from nanopage.kernels.cpu.flash_decoding import FlashDecoding, Splits, split
from nanopage.kernels.reference import LARGEST_ROUNDED_SCORE, attend_chunks, paged_attention
from nanopage.models import find_family
from nanopage.models.decoder import Decoder, run_layers
from nanopage.private_files import check_private, make_private
from nanopage.step import Batch
from nanopage.weights import hub
from nanopage.worker.aot_chain import Chain, FixedInputs, Library, load_chain_library
from nanopage.worker.eager import Inputs, Output, prepare, run_model
from nanopage.worker.kv_cache import KVCache
from nanopage.worker.sequence_table import SequenceTable

logger = logging.getLogger("nanopage")

# What is compiled of a layer:
#   one, decode   the whole layer, for a single token and for several sequences with one token each
#   before        of a step with prompts: the layer up to the write to the cache
#   flash, tile   its attention: of the sequences with one token, and of a tile
#   after         the rest of the layer
WHOLE = ("one", "decode")
PARTS = ("before", "flash", "tile", "after")
FEW_KEYS = 256  # up to which compiled attention of several tiles is faster than plain attention
WITH_WINDOW = ("one", "decode", "flash", "tile")  # the kinds that depend on the layer's window
HEAD = "head.so"  # the head, for one row
HEAD_OF_FEW = "head-of-few.so"  # the head with int8 weights, for several rows
CHAIN = "chain.so"  # aot_chain.cpp


class Compiled:
    """Runs steps with compiled decoder layers and a compiled head, once another process has compiled them.

    Switches to compiled code only while no request runs, because it rounds differently. An engine that is never idle
    stays eager. Compiling starts when a second request begins to run, or one runs again after a preemption: a program
    that asks only one question would end before compiling pays. A damaged file is compiled again, once. Any other
    failure to compile or load is logged once, and steps run eagerly from then on. With the environment variable
    NANOPAGE_COMPILE=never, only code that exists is used.

    Args:
        path: the directory or file of the model.
        config: of the same model.
        dtype: of weights, activations and KV: float32 or bfloat16 (see kernels/cpu/packed_linear.py).
        quantization: of the weights, as in EngineConfig.

    Raises: ValueError for another value of NANOPAGE_COMPILE.
    """

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        table: SequenceTable,
        path: Path,
        config: ModelConfig,
        dtype: torch.dtype,
        quantization: str | None = None,
    ):
        self.model, self.kv_cache, self.table, self.config = model, kv_cache, table, config
        self.spec: dict[str, Any] = {
            "path": str(path.absolute()),
            "dtype": str(dtype).removeprefix("torch."),
            "block_size": kv_cache.block_size,
            "quantization": quantization,
            "threads": torch.get_num_threads(),  # the compiled loops are divided among them
        }
        self.files = file_kinds(config, quantization)
        self.directory = hub.cache_directory() / "compiled" / _key(config, self.spec)
        self.layers: CompiledLayers | None = None  # None until they are loaded
        self.head: CompiledHead | None = None
        self._num_sequences = 0
        self._process: subprocess.Popen | None = None
        self._log: Path | None = None  # what the process prints
        self._given_up = False
        self._damaged: set[str] = set()  # names of parts whose files were damaged
        setting = os.environ.get("NANOPAGE_COMPILE")
        if setting not in (None, "", "never"):
            raise ValueError(f"NANOPAGE_COMPILE must be 'never' or not set, got {setting[:100]!r}")
        self.may_compile = setting != "never"
        self._load_if_ready()

    def fits(self, batch: Batch) -> bool:
        self._num_sequences += len(batch.new)
        if self.layers is None and batch.idle:
            self._load_if_ready()
            if self.layers is not None:
                logger.info("the decoder layers are compiled: from now on steps use them")
        if self.layers is None and self._num_sequences >= 2:
            self.start()
        return self.layers is not None

    def run(self, batch: Batch) -> Output:
        inputs = prepare(batch, self.table)
        attention = compiled_attention(inputs, self.kv_cache.block_size)
        return run_model(self.model, batch, inputs, attention, self.kv_cache, self.table, self.layers, self.head)

    def compile(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Compile and load everything now.

        Args: on_progress: called from time to time with the number of parts that are compiled, and of all parts.
        Raises: RuntimeError with the end of the log if that fails, or if NANOPAGE_COMPILE forbids it.
        """
        if self.layers is None and not self.may_compile:
            raise RuntimeError("NANOPAGE_COMPILE=never: the decoder layer is not compiled")
        while self.layers is None and not self._given_up:  # a second time if a file is damaged
            self.start()
            while self._process is not None and self._process.poll() is None:
                if on_progress is not None:
                    made = [name for name in self.files if find_file(self.directory, name) is not None]
                    on_progress(len(made), len(self.files))
                time.sleep(0.1)
            self._load_if_ready()
        if self.layers is None:
            log = self._log.read_text(errors="replace")[-2000:] if self._log is not None else ""
            raise RuntimeError(f"compiling the decoder layer failed ({self._log or self.directory}):\n{log}")

    def ready(self) -> bool:
        """Whether everything has been compiled. Logs once if the process that compiles has failed."""
        if self._given_up:
            return False
        if all(find_file(self.directory, name) for name in self.files):
            return True
        if self._process is not None and self._process.poll() is not None:
            self._give_up(f"compiling the decoder layer failed (see {self._log})")
        return False

    def start(self) -> None:
        """Start the process that compiles, if it is needed and allowed. It ends when this process ends."""
        if not self.may_compile or self._process is not None or self._given_up or self.ready():
            return
        try:
            self._process = self._spawn()
        except OSError as error:
            self._give_up(f"the decoder layer cannot be compiled: {error}")
            return
        if hasattr(os, "SCHED_IDLE"):  # Linux: it runs only when the CPU is idle, from its first import on
            with contextlib.suppress(OSError):  # some containers forbid this; the process also calls nice
                os.sched_setscheduler(self._process.pid, os.SCHED_IDLE, os.sched_param(0))
        atexit.register(self.stop)
        logger.info("compiling the decoder layer in the background; steps run eagerly until that is done")

    def _spawn(self) -> subprocess.Popen:
        make_private(self.directory)
        descriptor, log = tempfile.mkstemp(dir=self.directory, prefix="log-")
        self._log = Path(log)
        # -P and `cwd` keep the process from importing files in the user's current directory.
        command = [
            sys.executable,
            "-P",
            "-m",
            "nanopage.worker.aot_compile",
            json.dumps(self.spec),
            str(self.directory),
        ]
        inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = [str(Path(nanopage.__file__).parents[1]), *filter(os.path.isabs, inherited)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
        try:
            # The process reads from a pipe that this one holds open, so it ends however this one ends.
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=descriptor, stderr=descriptor, start_new_session=True,
                cwd=self.directory, env=environment,
            )  # fmt: skip
        finally:
            os.close(descriptor)

    def stop(self) -> None:
        """Kill the process that compiles, if it still runs."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # the C++ compilers that it runs, too
            self._process.wait()

    def _load_if_ready(self) -> None:
        if self.layers is not None or not self.ready():
            return
        try:
            check_private(self.directory)
            chain = load_chain_library(_find_whole(self.directory, CHAIN))
            libraries = {name: Library(_find_whole(self.directory, name)) for name in self.files if name != CHAIN}
            self.layers, self.head = self._make_layers(chain, libraries), self._make_head(chain, libraries)
        except DamagedFile as damaged:
            self._set_aside(damaged.file)
            return
        except (OSError, RuntimeError, AttributeError) as error:  # AttributeError: a library lacks a function
            self._give_up(f"the compiled code in {self.directory} cannot be loaded: {error}")
            return
        if self._log is not None:
            self._log.unlink(missing_ok=True)

    def _make_layers(self, chain_library: ctypes.CDLL, libraries: dict[str, Library]) -> "CompiledLayers":
        windows, caches = self.config.sliding_windows, self.kv_cache.tensor.unbind(0)
        fixed = [
            FixedInputs([cache, *tensors_of(layer).values()])
            for cache, layer in zip(caches, self.model.layers, strict=True)
        ]

        def chain(kind: str, layers: range) -> Chain:
            of_each = [libraries[file_name(kind, windows[i])] for i in layers]
            return Chain(chain_library, of_each, [fixed[i] for i in layers])

        numbers = range(len(fixed))
        whole = {kind: chain(kind, numbers) for kind in WHOLE}
        parts = [{kind: chain(kind, range(i, i + 1)) for kind in PARTS} for i in numbers]
        return CompiledLayers(whole, [CompiledLayer(parts[i], windows[i]) for i in numbers])

    def _make_head(self, chain_library: ctypes.CDLL, libraries: dict[str, Library]) -> "CompiledHead | None":
        """The compiled head; None if the head has no tiles, because oneDNN chose another layout for it."""
        head: Any = self.model.lm_head
        if head.tiles is None:
            return None
        weights = [head.tiles] if (scales := getattr(head, "scales", None)) is None else [head.tiles, scales]
        fixed = FixedInputs(weights)
        of_one, of_few = (
            Chain(chain_library, [libraries[name]], [fixed]) if name in libraries else None
            for name in (HEAD, HEAD_OF_FEW)
        )
        return CompiledHead(of_one, of_few, head)

    def _set_aside(self, file: Path) -> None:
        """Rename a damaged file, so that its part is compiled again. Give up if that part was damaged before."""
        name = file.name.split(".")[0]
        again = name in self._damaged
        self._damaged.add(name)
        self._process = None
        try:
            file.rename(file.with_suffix(".damaged"))
        except OSError as error:
            self._give_up(f"the compiled code in {file} is damaged and cannot be renamed: {error}")
            return
        if again:
            self._give_up(f"the compiled code in {file} is damaged again")
        else:
            logger.warning(f"the compiled code in {file} is damaged: it has been renamed, and will be compiled again")

    def _give_up(self, why: str) -> None:
        self._given_up = True
        logger.warning(f"{why}; running eagerly")


class DamagedFile(Exception):
    """The contents of a compiled file are not what was written."""

    def __init__(self, file: Path):
        super().__init__(f"{file} is damaged")
        self.file = file


def find_file(directory: Path, name: str) -> Path | None:
    """The file of the compiled part `name`, or None. The name of the file contains a digest of its contents."""
    stem = name.removesuffix(".so")
    return next((file for file in sorted(directory.glob(f"{stem}.*.so")) if file.name.count(".") == 2), None)


@dataclass(slots=True)
class MixedAttention:
    """Attention of a step with prompts, for compiled layers. Its tokens begin with those of the decodes.

    slot_mapping                       int64 [T], as in ReferenceAttention, for all tokens
    num_decodes, splits                how many sequences have one token, and their splits; None if none has
    block_tables, query_lens, seq_lens of the other sequences, as in ReferenceAttention
    """

    slot_mapping: Tensor
    num_decodes: int
    splits: Splits | None
    block_tables: Tensor
    query_lens: Tensor
    seq_lens: Tensor


def compiled_attention(inputs: Inputs, block_size: int) -> Any:
    """Attention for compiled layers: FlashDecoding if every sequence has one token, else MixedAttention."""
    tables, counts, lengths = inputs.block_tables, inputs.query_lens, inputs.seq_lens
    num_decodes = next((i for i, count in enumerate(counts.tolist()) if count > 1), len(counts))
    splits = split(tables[:num_decodes], lengths[:num_decodes], block_size) if num_decodes else None
    if splits is not None and num_decodes == len(counts):
        return FlashDecoding(inputs.slot_mapping, splits)
    prompts = tables[num_decodes:], counts[num_decodes:], lengths[num_decodes:]
    return MixedAttention(inputs.slot_mapping, num_decodes, splits, *prompts)


class CompiledLayers:
    """Computes the same as `run_layers`, with compiled code.

    Args:
        whole: kind -> all layers of a step in which every sequence has one token.
        layers: those of other steps.
    """

    def __init__(self, whole: dict[str, Chain], layers: list["CompiledLayer"]):
        self.whole, self.layers = whole, layers

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, attention: Any, rows: Tensor | None
    ) -> Tensor:
        if not isinstance(attention, FlashDecoding):
            return run_layers(self.layers, x, cos, sin, kv_cache, attention, rows)
        chain = self.whole["one" if len(x) == 1 else "decode"]
        x = chain(x, cos, sin, attention.slot_mapping, *tensors_in(attention.splits))
        return x if rows is None else x[rows]


class CompiledLayer:
    """Computes the same as a DecoderLayer in a step with prompts, with compiled parts.

    Args:
        parts: kind -> the compiled function.
        window: of the layer's attention.
    """

    def __init__(self, parts: dict[str, Chain], window: int | None):
        self.parts, self.window = parts, window

    def __call__(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_cache: Tensor,
        attention: MixedAttention,
        rows: Tensor | None = None,
    ) -> Tensor:
        q = self.parts["before"](x, cos, sin, attention.slot_mapping)
        count, prompts = attention.num_decodes, (attention.block_tables, attention.query_lens, attention.seq_lens)
        attended = paged_attention(q[count:], kv_cache, *prompts, self.window, self._attend)
        if attention.splits is not None:
            decodes = self.parts["flash"](q[:count], *tensors_in(attention.splits))
            attended = torch.cat((decodes, attended))
        if rows is not None:
            x, attended = x[rows], attended[rows]
        return self.parts["after"](x, attended)

    def _attend(self, chunks: Chunks, q: Tensor, kv_cache: Tensor, block_tables: Tensor, out: Tensor) -> None:
        """Does the same as `attend_chunks`, with compiled code where that is faster: for groups of a single tile or of
        few keys."""
        compiled = len(chunks.tiles) == 1 or chunks.num_keys <= FEW_KEYS
        if not compiled or not self._attend_tiles(chunks, q, kv_cache, block_tables, out):
            attend_chunks(chunks, q, kv_cache, block_tables, out)

    def _attend_tiles(self, chunks: Chunks, q: Tensor, kv_cache: Tensor, block_tables: Tensor, out: Tensor) -> bool:
        """Compute a group. Returns False if its scores were too large to be rounded to bfloat16."""
        block_size = kv_cache.shape[3] // q.shape[2]
        for begin, end, _, last, _ in chunks.tiles:
            # Compiled code assumes contiguous inputs.
            tables = block_tables[:, : -(-last // block_size)].contiguous()
            rows, positions = chunks.rows[:, begin:end].contiguous(), chunks.positions[:, begin:end].contiguous()
            bound = self.parts["tile"](q, tables, rows, positions, out)
            if q.dtype != torch.float32 and bound.item() > LARGEST_ROUNDED_SCORE**2:
                return False
        return True


class CompiledHead:
    """Computes logits: of one row with `of_one`, of several rows with `of_few`, or with `head` if that is None."""

    def __init__(self, of_one: Chain | None, of_few: Chain | None, head: nn.Module):
        self.of_one, self.of_few, self.head = of_one, of_few, head

    def __call__(self, x: Tensor) -> Tensor:
        compiled = self.of_one if len(x) == 1 else self.of_few
        if compiled is None:
            return self.head(x)
        return compiled(x)[:, : self.head.out_features]


def tensors_of(layer: nn.Module) -> dict[str, Tensor]:
    """The tensors that compiled code of a layer takes in addition to activations, by name."""
    return dict(layer.named_parameters()) | dict(layer.named_buffers())


def tensors_in(splits: Splits) -> list[Tensor]:
    """The tensors of `splits`, in the order in which compiled code takes them."""
    return [splits.blocks, splits.owner, splits.start, splits.end, splits.by_sequence, splits.valid]


def file_name(kind: str, window: int | None) -> str:
    return f"{kind}.so" if window is None or kind not in WITH_WINDOW else f"{kind}-window-{window}.so"


def file_kinds(config: ModelConfig, quantization: str | None) -> dict[str, tuple[str, int | None]]:
    """The files to compile: name -> (kind, window of a layer that it serves)."""
    windows = dict.fromkeys(config.sliding_windows)
    files = {file_name(kind, window): (kind, window) for kind in WHOLE + PARTS for window in windows}
    files[CHAIN] = ("chain", None)
    return files | dict.fromkeys([HEAD] if quantization is None else [HEAD, HEAD_OF_FEW], ("head", None))


def _key(config: ModelConfig, spec: dict[str, Any]) -> str:
    """A digest of what compiled code depends on: our sources, torch, the CPU, the number of threads, the types and the
    model's sizes. The C++ compiler's version is not part of it."""
    here = Path(nanopage.__file__).parent
    family = find_family(config.architecture)
    assert family is not None and family.__file__ is not None
    sources = [*sorted(here.glob("kernels/cpu/*.py")), here / "kernels" / "pages.py", Path(family.__file__)]
    sources += [*sorted(here.glob("layers/*.py")), here / "models" / "decoder.py", here / "quantization" / "int8.py"]
    sources += sorted(here.glob("worker/aot*"))
    sizes = asdict(config) | {"num_layers": None, "vocab_size": None, "max_position_embeddings": None}
    sizes["sliding_windows"] = None  # part of the name of a file
    processor = sorted(torch.cpu.get_capabilities().items()), torch.backends.cpu.get_cpu_capability()
    parts = [torch.__version__, *processor, spec["dtype"], spec["block_size"]]
    parts += [spec["threads"], spec["quantization"], sorted((name, repr(value)) for name, value in sizes.items())]
    digest = hashlib.sha256(repr(parts).encode())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


def _find_whole(directory: Path, name: str) -> Path:
    """The file of the compiled part `name`. Raises: DamagedFile; FileNotFoundError if it is gone."""
    file = find_file(directory, name)
    if file is None:
        raise FileNotFoundError(f"{name} has just been removed")
    # Nothing else checks the contents, and damaged code would run.
    if digest(file) != file.name.split(".")[1]:
        raise DamagedFile(file)
    return file


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
