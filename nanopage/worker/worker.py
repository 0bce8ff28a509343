"""Worker: one device with its model, its KV cache and its runner.

Read `__init__` first: it loads the weights, measures the memory, allocates the KV cache and lists the ways to run a
step.
"""

import logging
import os
import time
from collections.abc import Callable

import torch
from torch import Tensor

from nanopage.adapters.weights import AdapterLoader
from nanopage.adapters.worker import choose_ways, eager_on_cpu, make_slots
from nanopage.config.model import ModelConfig
from nanopage.config.options import EngineConfig
from nanopage.cpu.aot import Compiled
from nanopage.cpu.aot_products import CompiledProduct, tile_product
from nanopage.cpu.gguf_tiles import is_quantized
from nanopage.cpu.option_speed import warn_of_slow_options
from nanopage.cpu.packed import pack
from nanopage.cpu.packed_linear import can_pack
from nanopage.cpu.threads import ThreadCount, limit_threads
from nanopage.cpu.tiled import TiledLinear, has_only_float16, tile
from nanopage.cpu.tiled_experts import TiledExperts, can_join, join_experts
from nanopage.device import GIB, resolve_device, resolve_dtype, resolve_kv_dtype, set_cuda_precision
from nanopage.distributed.parallel import PartialWay, Ranks
from nanopage.distributed.part import WHOLE
from nanopage.quantization.gguf_checkpoint import GGUFCheckpoint
from nanopage.quantization.quantized import quantize
from nanopage.quantization.quantized_checkpoint import fits_tiles
from nanopage.sampling.table import SamplingTable
from nanopage.state.kv_cache import KVCache
from nanopage.state.layer_kinds import BlockNeeds, divide_layers
from nanopage.state.sequence_table import SequenceTable
from nanopage.step import Batch, Capacity
from nanopage.weights import loader
from nanopage.worker.cuda_graphs import CUDAGraphs, make_sample_all, no_wrap
from nanopage.worker.eager import Eager, Pages
from nanopage.worker.jit import CompiledDecoder, compile_afresh, compile_model, warm_up_sampling
from nanopage.worker.memory import block_bytes, fit_length, measure_step, num_blocks_that_fit, num_host_blocks
from nanopage.worker.model_runner import Launched, ModelRunner, Way
from nanopage.worker.options import check_options
from nanopage.worker.piecewise_graphs import PiecewiseGraphs

logger = logging.getLogger("nanopage")

BLOCKS = "block-quantized"  # weights of a .gguf, AWQ or GPTQ checkpoint in its own integers


class Worker:
    """Loads the model, sizes the KV cache, and runs batches.

    Args:
        checkpoint: the weights of the model that `model_config` describes.
        on_progress: called while weights load, with the number of weights read so far and the total.
        ranks: connects this worker with others, if each has a part of the model. None: it has the whole model.
        agree: called with what this worker can hold. Returns what every worker can hold.

    Raises:
        ValueError: the device does not allow an option, or a weight is broken. The message names it.
        MemoryError: the device has too little memory for the weights or the KV cache.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        checkpoint: loader.Checkpoint,
        on_progress: Callable[[int, int], None] | None = None,
        ranks: Ranks | None = None,
        agree: Callable[[Capacity], Capacity] = lambda capacity: capacity,
    ):
        model_config = model_config.for_length(config.max_model_len)
        self.config, self.model_config, self.ranks = config, model_config, ranks
        self.part = WHOLE if ranks is None else ranks.part
        self.part_config = self.part.config(model_config)
        longest = config.max_model_len or model_config.max_position_embeddings
        kinds = divide_layers(model_config.sliding_windows, longest)
        self.kinds = kinds.stage(model_config.stage(self.part.pp_rank, self.part.pp_size))
        self.path = loader.path_of(checkpoint)
        self.device = resolve_device(config.device) if ranks is None else ranks.device
        self.uses_triton = self.device.type == "cuda"
        self.dtype, why = resolve_dtype(config.dtype, model_config.dtype, self.device)
        check_options(config, model_config, self.device, self.dtype, self.path)
        if why:
            logger.info(why)
        self.kv_dtype = resolve_kv_dtype(
            config.kv_cache_dtype, config.dtype, model_config.dtype, self.dtype, self.device
        )
        self.threads: ThreadCount | None = None  # on a CPU
        if self.device.type == "cpu":
            limit_threads()
            self.threads = ThreadCount(torch.get_num_threads(), None if ranks is None else os.getppid())
        else:
            set_cuda_precision()
        self.product: CompiledProduct | None = None  # multiplies by weights in tiles; all experts are, if there is one
        self.tiles = self._choose_tiles(checkpoint)
        integers = None if self.tiles != BLOCKS else "packed" if self.device.type == "cuda" else "tiles"
        # A GPU that has no room for the weights may have room for the quantized ones.
        on_host = self.device.type == "cuda" and config.quantize_to is not None
        how = loader.Loading(config.load_format, integers, on_host, self.part, group=self.device.type == "cuda")
        self.model = loader.load_model(checkpoint, model_config, self.dtype, self.device, how, on_progress)
        if (pooling := model_config.pooling) is not None and pooling.answers is not None:
            self.model.answer_with(*pooling.answers)
        self.adapters: AdapterLoader | None = None
        if config.enable_lora:
            self.model, self.adapters = make_slots(self.model, config, model_config, self.dtype, self.device)
        self._replace_modules()
        if ranks is not None:
            ranks.connect(self.model, model_config, self.dtype)
        if self.device.type == "cpu" and self.part.samples:
            warn_of_slow_options(config, model_config, self.model.layers[0], self.dtype, self.product)
        self.sample_all: Callable[..., Tensor] | None = None  # on a CPU
        step_bytes = 0
        if self.device.type == "cuda":
            self.sample_all = self._make_sample_all()
            step_bytes = measure_step(
                config,
                self.part_config,
                self.model,
                longest,
                self.kv_dtype,
                self.device,
                self._make_attention,
                self.sample_all,
                model_config.vocab_size,
                self._partial,
                self._captures_only(),
                self.kinds,
            )
        size = block_bytes(self.part_config, config.block_size, self.kv_dtype, self.kinds.num_rows)
        self.needs = BlockNeeds(kinds.windows, config.block_size, config.token_budget(self.device.type))
        num_blocks = num_blocks_that_fit(config, size, self.needs, longest, self.device, step_bytes)
        max_model_len = fit_length(config, longest, self.needs.longest(num_blocks, longest))
        host_blocks = num_host_blocks(config, num_blocks, size)
        name = str(self.dtype).removeprefix("torch.")
        self.capacity = agree(Capacity(self.device.type, name, num_blocks, host_blocks, max_model_len, kinds.windows))
        num_blocks, max_model_len = self.capacity.num_blocks, self.capacity.max_model_len
        self.kv_cache = KVCache(
            self.part_config,
            num_blocks,
            config.block_size,
            self.kv_dtype,
            self.device,
            self.capacity.num_host_blocks,
            self.kinds,
        )
        table = SequenceTable(
            config.max_num_seqs + 1,
            max_model_len,
            config.block_size,
            model_config.vocab_size,
            self.device,
            config.enable_lora,
            kinds.windows,
        )
        self.compiled: Compiled | None = None
        ways = self._partial(self._choose_ways(table, max_model_len))
        self.runner = ModelRunner(self.model, self.kv_cache, table, ways, self.sample_all)
        if self.uses_triton:
            self._warm_up()
        self._log_start()

    def launch(self, batch: Batch) -> Launched:
        """Start a step. Does not wait for its result."""
        if self.threads is not None:
            self.threads.set()
        failed: dict[int, str] = {}
        if batch.loads and self.adapters is not None:
            failed = self.adapters.load(batch.loads)
        launched = self.runner.launch(batch)
        launched.partial.failed_loads = failed
        return launched

    def rest(self) -> None:
        """No request is left."""
        if self.threads is not None:
            self.threads.reset()
        if self.compiled is not None:
            self.compiled.start()

    def compile(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Compile what can be compiled on this device, and wait for it. See `Compiled.compile`."""
        if self.compiled is not None:
            self.compiled.compile(on_progress)

    # How steps run

    def _choose_ways(self, table: SequenceTable, max_model_len: int) -> list[Way]:
        """The ways to run a step, in the order in which they are tried. Sets `self.way`, which describes them, and
        `self.compiled`."""
        eager: Way
        if self.config.enable_lora and self.uses_triton:
            made = self.model, self.kv_cache, table, self.config, max_model_len, self._make_attention, self.sample_all
            ways, self.way = choose_ways(*made)
            return ways
        if self.config.enable_lora:
            eager = eager_on_cpu(self.model, self.kv_cache, table, self.dtype, self.config.enforce_eager)
        else:
            eager = Eager(self.model, self.kv_cache, table, self._make_attention if self.uses_triton else None)
        if self.config.enforce_eager:
            self.way = "eagerly"
            return [eager]
        if self._captures_only():
            assert self.sample_all is not None
            graphs = CUDAGraphs(
                self.model, self.kv_cache, table, max_model_len, self.uses_triton, self.sample_all, no_wrap
            )
            graphs.capture(graphs.sizes)
            self.way = "decodes as CUDA graphs, others eagerly: a divided model is not compiled"
            return [graphs, eager]
        if not self._compiles():
            self.way = "eagerly: a divided model is not compiled"
            return [eager]
        if self.device.type == "cuda":
            graphs, pieces = self._capture_graphs(table, max_model_len)
            most = pieces.sizes[-1]
            self.way = f"decodes as CUDA graphs, others of up to {most} tokens as graphs of pieces, or compiled"
            return [graphs, pieces, eager]
        if not can_pack(self.dtype):
            self.way = f"eagerly: {self.capacity.dtype} is not compiled on this CPU"
            return [eager]
        if (experts := self.model_config.experts) is not None:
            if not any(isinstance(module, TiledExperts) for module in self.model.modules()):
                self.way = "eagerly: the experts of this model are not compiled"
                return [eager]
            if not all(experts.layers):
                self.way = "eagerly, but for the products of experts: layers of two kinds are not compiled"
                return [eager]
        tiled = self.tiles is not None
        self.compiled = Compiled(self.model, self.kv_cache, table, self.path, self.part_config, self.dtype, tiled)
        if self.compiled.layers is not None:
            self.way = "with compiled layers"
        elif self.compiled.may_compile:
            self.way = "eagerly until the layers are compiled"
        else:
            self.way = "eagerly: NANOPAGE_COMPILE=never"
        return [self.compiled, eager]

    def _compiles(self) -> bool:
        """Whether anything may be compiled or captured. Exchanges between the workers of a stage happen inside layers;
        on a GPU, they have never been captured."""
        return (
            not self.config.enforce_eager
            and self.part.tp_size == 1
            and (self.device.type == "cpu" or self.part == WHOLE)
        )

    def _captures_only(self) -> bool:
        """Whether decodes are captured with the exchanges in their layers, but not compiled: on a GPU, where workers
        share each layer. Stages wait for hidden states of other stages, which a graph cannot do."""
        divided = self.part.tp_size > 1 and self.part.pp_size == 1
        return self.device.type == "cuda" and divided and not self.config.enforce_eager

    def _partial(self, ways: list[Way]) -> list[Way]:
        """Ways to run steps on this worker's part of the model, from ways to run it."""
        return ways if self.ranks is None else [PartialWay(way, self.ranks) for way in ways]

    def _make_sample_all(self) -> Callable[..., Tensor]:
        """The function by which a GPU samples all rows of a batch, compiled and warmed up for tables of this size."""
        sample_all = make_sample_all(True, compile_afresh if self._compiles() else no_wrap)
        sampling = SamplingTable(self.config.max_num_seqs + 1, self.model_config.vocab_size, self.device)
        warm_up_sampling(sample_all, sampling, self.dtype, self.device)
        return sample_all

    def _choose_tiles(self, checkpoint: loader.Checkpoint) -> str | None:
        """Choose how weights are stored: a kind that tiled.py (on a GPU: quantized.py) knows, or BLOCKS;
        None for floats. Sets `self.product`."""
        compiles = can_pack(self.dtype) and not self.config.enforce_eager
        divided = self.part.tp_size > 1
        on_gpu = self.device.type == "cuda"
        if (stored := self.model_config.quantization) is not None:
            quantized = on_gpu or fits_tiles(self.model_config)
        else:
            quantized = isinstance(checkpoint, GGUFCheckpoint) and is_quantized(checkpoint)
        if divided and quantized:
            logger.info(f"tensor_parallel_size={self.part.tp_size}: the integers of {self.path.name} become floats")
        if on_gpu and quantized and self.model_config.experts is not None:
            logger.info(f"on a GPU, the integers of the experts of {self.path.name} become floats")
        blocks = quantized and not divided and not self.config.quantize_to and self.config.load_format != "dummy"
        if on_gpu:
            return BLOCKS if blocks and self.dtype != torch.float64 else self.config.quantize_to
        # In float32, reading the weights takes most of the time of a decode. The checkpoint's 16 bits lose nothing.
        halves = self.dtype == torch.float32 and self.model_config.dtype in ("bfloat16", "float16") and stored is None
        if compiles and (blocks or halves or self.config.quantize_to or self._joins_experts()):
            self.product = tile_product(self.dtype)
        if blocks and self.product is not None:
            return BLOCKS
        # Without a compiled product, every step would widen the 16 bits anew, which takes longer than reading 32.
        return self.config.quantize_to or (self.model_config.dtype if halves and self.product is not None else None)

    def _replace_modules(self) -> None:
        """Replace the model's modules by packed, quantized or compiled ones."""
        if self.tiles == "float16" and self.config.load_format != "dummy" and not has_only_float16(self.model):
            self.tiles = None  # config.json says float16, but the file has other numbers
            self.product = self.product if self._joins_experts() else None
        if self.device.type == "cuda":
            if (kind := self.config.quantize_to) is not None:
                quantize(self.model, kind, self.device)
                self.model.to(self.device)
            torch.cuda.empty_cache()  # of what rounding took
            if self._compiles() and not self.config.enable_lora:
                self.model = compile_model(self.model, self.model_config, self.dtype, self.device, self.uses_triton)
        elif self.tiles is not None:
            kind = self.tiles
            if kind == BLOCKS:  # the head of an AWQ or GPTQ checkpoint is not quantized
                kind = "float16" if has_only_float16(self.model) else "bfloat16"
            tile(self.model, kind)
        if self.device.type == "cpu":
            if self.product is not None and self._joins_experts() and can_join(self.model):
                join_experts(self.model, self.dtype)
            if self.tiles is None and can_pack(self.dtype):
                pack(self.model)
        if (product := self.product) is None:
            return
        for module in self.model.modules():
            if isinstance(module, TiledLinear):
                module.product = product
            elif isinstance(module, TiledExperts):
                module.product = product.experts

    def _joins_experts(self) -> bool:
        """Whether one operator may compute all experts of a layer (cpu/tiled_experts.py)."""
        return self.device.type == "cpu" and self.model_config.experts is not None and self.part.tp_size == 1

    def _make_attention(self, pages: Pages):
        from nanopage.kernels import paged_attention  # imports Triton, which would double the time to start on a CPU

        config = self.part_config
        return paged_attention.make_attention(
            pages.slot_mapping,
            pages.block_tables,
            pages.query_lens,
            pages.seq_lens,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            self.dtype,
            self.device,
        )

    def _capture_graphs(self, table: SequenceTable, max_model_len: int) -> tuple[CUDAGraphs, PiecewiseGraphs]:
        started, free = time.perf_counter(), torch.cuda.mem_get_info(self.device)[0]
        assert self.sample_all is not None
        made = self.model, self.kv_cache, table, max_model_len, self.uses_triton, self.sample_all
        graphs = CUDAGraphs(*made, compile_afresh)
        graphs.capture(graphs.sizes)
        assert isinstance(self.model, CompiledDecoder)
        budget = self.config.token_budget(self.device.type)
        pieces = PiecewiseGraphs(self.model, self.kv_cache, table, self._make_attention, budget)
        pieces.capture(pieces.sizes, graphs.pool)
        used = (free - torch.cuda.mem_get_info(self.device)[0]) / GIB
        seconds, num_pieces = time.perf_counter() - started, sum(map(len, pieces.graphs.values()))
        logger.info(
            f"captured {len(graphs.graphs)} CUDA graphs of decode steps and {num_pieces} of pieces of other steps in "
            f"{seconds:.1f} s, {used:.2f} GiB"
        )
        return graphs, pieces

    def _warm_up(self) -> None:
        """Run steps that are not only decodes to be sampled, so that Triton compiles the kernels of their attention now
        and not while serving: a decode alone and beside a prompt, both of short contexts, which are not split, and of
        the longest."""
        self.kv_cache.clear([0])
        for context in (1, self.capacity.max_model_len):
            for rows, counts in (([0], [1]), ([0, 1], [1, 2])):  # no sequence has these rows yet: they name block 0
                batch = Batch(rows=rows, starts=[context - 1, max(0, context - 2)][: len(rows)], counts=counts)
                self.runner.launch(batch).result()

    def _log_start(self) -> None:
        config, capacity = self.config, self.capacity
        size = block_bytes(self.part_config, config.block_size, self.kv_dtype, self.kinds.num_rows)
        gib = capacity.num_blocks * size / GIB
        requests = capacity.num_blocks / self.needs.of([capacity.max_model_len])
        tokens = int(requests * capacity.max_model_len)
        kinds = [kind for kind in ("dummy" if config.load_format == "dummy" else None, self.tiles) if kind]
        weights = f" with {' '.join(kinds)} weights" if kinds else ""
        kv_dtype = "" if self.kv_dtype == self.dtype else f" in {str(self.kv_dtype).removeprefix('torch.')}"
        logger.info(
            f"{self.path.name} in {capacity.dtype}{weights} on {capacity.device}; KV cache{kv_dtype} {gib:.2f} GiB = "
            f"{tokens:,} tokens = {requests:.1f} requests of {capacity.max_model_len:,} tokens"
        )
        if windows := {window for window in capacity.windows if window is not None}:
            sizes = " or ".join(f"{window:,}" for window in sorted(windows))
            logger.info(f"layers with a window of {sizes} tokens keep only the blocks that it reaches")
        rope = self.model_config.rope
        if rope.rope_type == "longrope":
            original = rope.params["original_max_position_embeddings"]
            kind, than = ("long", "is more") if rope.params["length"] > original else ("short", "is not more")
            logger.info(f"longrope uses its {kind} factors, because max_model_len {than} than {original:,}")
        logger.info(f"steps run {self.way}")
