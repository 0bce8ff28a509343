"""Compiled: runs steps on a CPU with decoder layers that torch.export and AOTInductor compile ahead of time.

A layer is compiled in two parts: before attention and after it. Attention itself is C++ (cpu/flash_attention.cpp). A
layer with a state (recurrent/states.py) is compiled whole, once for sequences with a single token and once for others.
Weights are inputs of the compiled code, so the code of one layer serves all layers of the same form. The time to
compile therefore does not depend on the depth: for SmolLM2-135M, 30 s on two cores. A process of the lowest priority
(`aot_compile.py`) compiles while the engine works eagerly, and writes shared libraries to
`$XDG_CACHE_HOME/nanopage/compiled`, or to `~/.cache/nanopage/compiled`. A later start only loads these libraries, which
takes milliseconds and does not import the compiler. A call (`aot_chain.py`) costs microseconds, because there are no
guards to evaluate and C++ calls the kernels. In return, nothing checks the shapes of inputs.
"""

import atexit
import contextlib
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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn

import nanopage
from nanopage.adapters.layers import lora_buffers
from nanopage.config.model import ModelConfig
from nanopage.cpu.aot_chain import Chain, CompiledHead, CompiledLayers, FixedInputs, Layers, Library
from nanopage.cpu.aot_parts import CHAIN, file_kinds, has_mixer, parts_of
from nanopage.cpu.compiled_files import LOCK, DamagedFile, find_file, find_whole, may_compile, processor
from nanopage.files.private_files import cache_directory, check_private, make_private
from nanopage.kernels.grouped_attention import GroupedAttention
from nanopage.layers.attention import StepContext
from nanopage.models.decoder import Decoder
from nanopage.models.meta import family_of
from nanopage.recurrent.states import state_of
from nanopage.state.kv_cache import KVCache
from nanopage.state.sequence_table import SequenceTable
from nanopage.step import Batch
from nanopage.worker.eager import Output, head_of, prepare, run_model
from nanopage.worker.prompt_outputs import wants_prompt_logprobs

logger = logging.getLogger("nanopage")

TIME_LIMIT = 20 * 60  # seconds, for compiling everything
LOOK_SECONDS = 1.0  # between two looks for compiled code
BUSY_SECONDS = 30.0  # without a rest, after which an engine compiles beside its steps
IDLE, BESIDE_STEPS = 19, 10  # the niceness of the process that compiles


class Compiled:
    """Runs steps with compiled decoder layers and a compiled head, once another process has compiled them.

    Compiling starts when no request is left for the first time, and takes only time in which the CPU is idle, because
    beside a step it slows the step down. If there is always a request for half a minute, it takes a tenth of the CPU:
    it would never get on otherwise. It goes on after this process has ended: a program that asks one question ends
    before the code is ready, and the next program finds the code. Steps use the code as soon as it is
    found, also in the middle of a request. Compiled code rounds differently, so a near-tie may fall the other way, as
    it may whenever another request begins or ends. float64 is not compiled, and with `invariant` no step is eager. A
    damaged file is compiled again, once. Any other failure to compile or load is logged once, and steps run eagerly
    from then on. With the environment variable NANOPAGE_COMPILE=never, only code that exists is used.

    Args:
        config: the config of the same model.
        dtype: the dtype of weights and activations, float32 or bfloat16 (see cpu/packed_linear.py).
        tiled: whether the weights are in tiles (cpu/tiled.py). The code is the same for all kinds of tiles. The weights
            of experts are always in tiles (cpu/tiled_experts.py).
        invariant: whether a row of a step must not depend on the rows beside it (`batch_invariant`). The weights must
            be in tiles. Missing code is then compiled here, because no step may run eagerly.

    Raises:
        ValueError: NANOPAGE_COMPILE is set to anything but "never".
        RuntimeError: as `compile`, if `invariant`.
    """

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        table: SequenceTable,
        config: ModelConfig,
        dtype: torch.dtype,
        tiled: bool = False,
        invariant: bool = False,
    ):
        self.model, self.kv_cache, self.table, self.config = model, kv_cache, table, config
        self.spec: dict[str, Any] = {
            "config": msgspec.json.encode(config).decode(),
            "dtype": str(dtype).removeprefix("torch."),
            "kv_dtype": str(kv_cache.tensor.dtype).removeprefix("torch."),
            "block_size": kv_cache.block_size,
            "tiled": tiled,
            "adapted": table.adapter_slots is not None,
            "invariant": invariant,
            "threads": torch.get_num_threads(),  # the compiled loops are divided among them
        }
        self.files = file_kinds(config, tiled, self.spec["adapted"], invariant)
        self.directory = cache_directory() / "compiled" / _key(config, self.spec)
        self.layers: CompiledLayers | None = None  # None until they are loaded
        self.head: CompiledHead | None = None
        self._process: subprocess.Popen | None = None
        self._niceness = 0  # of the process
        self._log: Path | None = None  # gets what the process prints
        self._given_up = False
        self._damaged: set[str] = set()  # names of parts whose files were damaged
        self._busy_since: float | None = None  # since the last rest
        self._next_look = 0.0
        self.may_compile = may_compile()
        self._load_if_ready()
        if invariant and self.layers is None:
            logger.info("batch_invariant=True: the model's layers are compiled first, which takes half a minute")
            try:
                self.compile()
            except RuntimeError as error:
                raise RuntimeError(f"batch_invariant=True runs no step eagerly, and {error}") from None

    def fits(self, batch: Batch) -> bool:
        if self.layers is None and (now := time.monotonic()) >= self._next_look:
            self._busy_since = self._busy_since or now
            self._load_if_ready()
            if self.layers is not None:
                logger.info("the decoder layers are compiled: from now on steps use them")
            elif now - self._busy_since >= BUSY_SECONDS:
                self.start(beside_steps=True)
            self._next_look = now + LOOK_SECONDS
        return self.layers is not None

    def run(self, batch: Batch) -> Output:
        input_ids, step = prepare(batch, self.table, self.kv_cache)
        if self.config.encoded_positions:
            step.attentions = [attention_to_encoded(attention) for attention in step.attentions]
        if self.head is not None and self.head.of_one is not None and self._is_one_decode(batch):
            return self._decode_one(batch, input_ids, step, self.head)
        return run_model(self._forward, batch, input_ids, step, self.table, self.head or head_of(self.model))

    def _forward(self, input_ids: Tensor, step: StepContext) -> Tensor:
        """As `Decoder.forward`, with the KV cache that the layers were loaded for."""
        assert self.layers is not None
        x = self.model.embed(input_ids, step.positions, step.embeds)
        step.rotations = self.model.rotary(step.positions, x.dtype)
        return self.layers(x, step)

    def _is_one_decode(self, batch: Batch) -> bool:
        """Whether a batch has a single token and samples the next one, without log-probabilities of a prompt."""
        return batch.counts == [1] and batch.sampled_rows == batch.rows and not wants_prompt_logprobs(batch, self.table)

    def _decode_one(self, batch: Batch, input_ids: Tensor, step: StepContext, head: CompiledHead) -> Output:
        """Run a step of a single token. Does little in Python, unlike `run_model`, whose Python takes a tenth of such a
        step for a small model."""
        (row,) = batch.rows
        logits, tokens = head.of_one_row(self._forward(input_ids, step))
        if not self.table.sampling.greedy[row]:
            return Output(logits)
        self.table.record(np.array([row]), np.array([batch.starts[0] + 1]), tokens)
        return Output(logits, tokens=tokens)

    def compile(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Compile and load everything now. An interruption also ends the compiling.

        Args: on_progress: called from time to time with the number of compiled parts and the number of all parts.
        Raises: RuntimeError with the end of the log if compiling fails, or if NANOPAGE_COMPILE forbids it.
        """
        if self.layers is None and not self.may_compile:
            raise RuntimeError("NANOPAGE_COMPILE=never: the decoder layer is not compiled")
        try:
            while self.layers is None and not self._given_up:  # a second time if a file is damaged
                self._start(niceness=0)
                if on_progress is not None:
                    made = [name for name in self.files if find_file(self.directory, name) is not None]
                    on_progress(len(made), len(self.files))
                time.sleep(0.1)
                self._load_if_ready()
        finally:
            self._stop()
        if self.layers is None:
            log = self._log.read_text(errors="replace")[-2000:] if self._log is not None and self._log.exists() else ""
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

    def start(self, beside_steps: bool = False) -> None:
        """Start compiling in the background, if it is needed and allowed, unless another process compiles the same.

        Args: beside_steps: of an engine without a rest. Its process that waits for an idle CPU is killed, because
            nobody may raise its priority. Another one begins once that has ended, and keeps what is compiled.
        """
        was_told = self._niceness > 0
        if not beside_steps:
            self._busy_since, self._next_look = None, 0.0  # the first step after a rest looks at once
        elif self._process is not None and self._niceness == IDLE:
            self._kill()
            self._process = None
        if self._start(BESIDE_STEPS if beside_steps else IDLE) and not was_told:
            told = {"for_user": True}  # chat.py shows it, too
            more = ", once more for steps with adapters" if self.spec["adapted"] else ""
            logger.info(
                f"the first replies are slow: the model's layers are being compiled for this CPU, in the background"
                f"{more}. After that, SmolLM2-135M-Instruct decoded three times as fast (91 instead of 30 tokens/s on "
                "two cores)",
                extra=told,
            )

    def _start(self, niceness: int) -> bool:
        """Start the process that compiles, if need be. Returns whether it has been started."""
        if self.layers is not None or not self.may_compile or self._process is not None or self._given_up:
            return False
        if self.ready():
            return False
        try:
            make_private(self.directory)
            with FileLock(self.directory / LOCK, mode=0o600, blocking=False):
                for old in self.directory.glob("log-*"):  # left by processes that failed
                    if time.time() - old.stat().st_mtime > TIME_LIMIT:
                        old.unlink(missing_ok=True)
            self._process = self._spawn()
        except Timeout:
            return False
        except OSError as error:
            self._give_up(f"the decoder layer cannot be compiled: {error}")
            return False
        self._niceness = niceness
        if niceness:
            os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)
        if niceness == IDLE and hasattr(os, "SCHED_IDLE"):  # Linux: only when the CPU is idle, from the first import on
            with contextlib.suppress(OSError):  # some containers forbid this
                os.sched_setscheduler(self._process.pid, os.SCHED_IDLE, os.sched_param(0))
        atexit.register(_say_that_it_goes_on, self._process)
        return True

    def _spawn(self) -> subprocess.Popen:
        descriptor, log = tempfile.mkstemp(dir=self.directory, prefix="log-")
        self._log = Path(log)
        # -P and `cwd` keep the process from importing files in the user's current directory.
        command = [sys.executable, "-P", "-m", "nanopage.cpu.aot_compile"]
        command += [json.dumps(self.spec), str(self.directory), log]
        inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = [str(Path(nanopage.__file__).parents[1]), *filter(os.path.isabs, inherited)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
        try:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=descriptor, stderr=descriptor, start_new_session=True,
                cwd=self.directory, env=environment,
            )  # fmt: skip
        finally:
            os.close(descriptor)

    def _stop(self) -> None:
        """Kill the process that compiles, if it still runs, and wait for its end."""
        self._kill()
        if self._process is not None:
            self._process.wait()

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # the C++ compilers that it runs, too

    def _load_if_ready(self) -> None:
        if self.layers is not None or not self.ready():
            return
        try:
            check_private(self.directory)
            chain = Chain(find_whole(self.directory, CHAIN))
            libraries = {
                part: Library(find_whole(self.directory, name), self.spec["threads"])
                for name, part in self.files.items()
                if name != CHAIN
            }
            self.layers, self.head = self._make_layers(chain, libraries), self._make_head(chain, libraries)
        except DamagedFile as damaged:
            self._set_aside(damaged.file)
        except (OSError, RuntimeError, AttributeError) as error:  # AttributeError: a library lacks a function
            self._give_up(f"the compiled code in {self.directory} cannot be loaded: {error}")

    def _make_layers(self, chain: Chain, libraries: dict[tuple[str, str], Library]) -> CompiledLayers:
        modules: list[Any] = list(self.model.layers)
        windows, caches = self.config.sliding_windows, list(self.kv_cache.layers)
        mixers = [has_mixer(self.config, index) for index in range(len(modules))]
        caches = [
            state_of(cache, torch.float32) if mixer else cache for cache, mixer in zip(caches, mixers, strict=True)
        ]
        ropes = [0 if mixer else layer.self_attn.rope for layer, mixer in zip(modules, mixers, strict=True)]

        def fixed(tensors_of: Callable[[nn.Module], dict[str, Tensor]]) -> list[FixedInputs]:
            pairs = zip(caches, modules, strict=True)
            return [FixedInputs([cache, *tensors_of(layer).values()]) for cache, layer in pairs]

        inputs = dict.fromkeys(("many",) if self.spec["invariant"] else ("one", "many"), fixed(own_tensors_of))
        if self.spec["adapted"]:
            inputs |= dict.fromkeys(("adapted-one", "adapted-many"), fixed(tensors_of))
        layers = {}
        for kind, of_kind in inputs.items():
            functions = [[libraries[part, kind] for part in parts_of(self.config, i)] for i in range(len(modules))]
            layers[kind] = Layers(functions, of_kind, caches, windows, ropes, self.kv_cache.kinds.of_layers)
        heads = self.config.num_heads, self.config.head_dim
        names = {index: parts_of(self.config, index)[0] for index, mixer in enumerate(mixers) if mixer}
        prompts = {index: libraries[name, "prompts"] for index, name in names.items()}
        return CompiledLayers(chain, layers, prompts, modules, heads, self.spec["threads"])

    def _make_head(self, chain: Chain, libraries: dict[tuple[str, str], Library]) -> CompiledHead | None:
        """The compiled head. None if the head has no tiles, because oneDNN chose another layout for it, if it has a
        bias, or if the model is not the last pipeline stage."""
        head: Any = self.model.lm_head
        if head is None or head.bias is not None or head.weight.tiles is None:
            return None
        tensors = [*tensors_of(self.model.norm).values(), head.weight.tiles]
        if (scales := getattr(head.weight, "scales", None)) is not None:
            tensors.append(scales)
        return CompiledHead(chain, libraries, FixedInputs(tensors), self.model)

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


def _say_that_it_goes_on(process: subprocess.Popen) -> None:
    if process.poll() is None:
        logger.warning(
            "nanopage is still compiling the model's layers, for its next start. This goes on in the background, with "
            f"a low priority, for at most {TIME_LIMIT // 60} minutes. NANOPAGE_COMPILE=never prevents it"
        )


def tensors_of(layer: nn.Module) -> dict[str, Tensor]:
    """The tensors that compiled code of a layer takes in addition to activations, by name."""
    return dict(layer.named_parameters()) | dict(layer.named_buffers())


def own_tensors_of(layer: nn.Module) -> dict[str, Tensor]:
    """The same without the weights of adapters, in the order of a layer that has no slots."""
    adapters = set(map(id, lora_buffers(layer)))
    return {name: tensor for name, tensor in tensors_of(layer).items() if id(tensor) not in adapters}


def attention_to_encoded(attention: Any) -> Any:
    """The attention of layers that see all positions of an encoder, in place of StatePages: one that compiled code
    knows. Other attention is returned as it is."""
    if isinstance(attention, GroupedAttention):
        return attention
    counts, encoded = torch.from_numpy(attention.counts), torch.from_numpy(attention.encoded)
    blocks = attention.targets.repeat_interleave(counts)  # in place of slots: nothing is written
    return GroupedAttention(blocks, attention.targets[:, None], counts, encoded)


def _key(config: ModelConfig, spec: dict[str, Any]) -> str:
    """A digest of what compiled code depends on: our sources, torch, the CPU, the number of threads, the types and the
    model's sizes. The C++ compiler's version is not part of it."""
    here = Path(nanopage.__file__).parent
    family = family_of(config)
    assert family.__file__ is not None
    folders = ("cpu", "experts", "families", "layers", "models", "recurrent")  # families import each other
    sources = [Path(family.__file__), *(file for folder in folders for file in sorted(here.glob(f"{folder}/*.*")))]
    sources += [here / "adapters" / "layers.py", here / "adapters" / "model.py", here / "sampling" / "argmax.py"]
    sources += [here / "state" / "layer_kinds.py", here / "state" / "pages.py"]
    sizes = asdict(config) | {"num_layers": None, "max_position_embeddings": None}
    sizes["sliding_windows"] = sizes["other_rope_layers"] = None  # arguments of the chain
    sizes["eos_token_ids"] = None  # used only by the engine, which adds the tokenizer's
    if config.experts is not None:
        sizes["experts"] = asdict(config.experts) | {"layers": None}  # names of files say it
    parts = [torch.__version__, *processor(), spec["dtype"], spec["kv_dtype"], spec["block_size"]]
    parts += [spec["threads"], spec["tiled"], spec["invariant"]]
    parts.append(sorted((name, repr(value)) for name, value in sizes.items()))
    digest = hashlib.sha256(repr(parts).encode())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]
