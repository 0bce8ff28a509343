"""Worker: one device with its model, its KV cache and its runner.

Read `__init__` first: it measures the memory, allocates the KV cache and lists the ways to run a step.
startup/worker.py has loaded the model. Features around the core (its wings) attach what they need to `Wings`.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

from nanopage.device import GIB
from nanopage.models.decoder import Decoder
from nanopage.state.kv_cache import KVCache
from nanopage.state.layer_kinds import STATE
from nanopage.step import Batch, Capacity
from nanopage.worker.jit import compile_model
from nanopage.worker.memory import block_bytes, measure_capacity, measure_step
from nanopage.worker.model_runner import Launched, ModelRunner
from nanopage.worker.setup import Setup
from nanopage.worker.ways import Wings, list_ways, make_sampling, why_not_compiled

logger = logging.getLogger("nanopage")


class Worker:
    """Sizes the KV cache for a model that is loaded, and runs batches.

    Args:
        model: on the device, with its weights as the options want them.
        wings: what features around the core have attached.
        agree: called with what this worker can hold; its result is what every worker can hold.

    Raises: MemoryError if the device has too little memory for the KV cache.
    """

    def __init__(
        self, setup: Setup, model: Decoder, wings: Wings, agree: Callable[[Capacity], Capacity] = lambda mine: mine
    ):
        config, device = setup.config, setup.device
        self.setup, self.wings, self.model = setup, wings, model
        sample_all, step_bytes = None, 0
        if setup.on_gpu:
            if why_not_compiled(setup) is None:
                self.model = compile_model(model, setup.model_config, setup.dtype, device)
            sample_all = make_sampling(setup)
            if setup.has_cache:
                step_bytes = measure_step(setup, wings, self.model, sample_all)
        self.capacity = agree(measure_capacity(setup, step_bytes))
        self.kv_cache = KVCache(
            setup.part, self.capacity.num_blocks, config.block_size, setup.kv_dtype, device,
            self.capacity.num_host_blocks, setup.kinds,
        )  # fmt: skip
        table = setup.make_table(self.capacity.max_model_len)
        table.items = wings.items
        if wings.heads is not None:
            table.taps = wings.heads.taps
        made = self.model, self.kv_cache, table
        ways, self.way, self.compiled = list_ways(setup, wings, *made, sample_all)
        self.runner = ModelRunner(*made, ways, sample_all)
        if setup.on_gpu and setup.has_cache:
            self._warm_up()
        self._log_start()

    def launch(self, batch: Batch) -> Launched:
        """Start a step. Does not wait for its result."""
        if self.wings.threads is not None:
            self.wings.threads.set()
        failed = self.wings.load_adapters(batch.loads) if batch.loads else {}
        launched = self.runner.launch(batch)
        launched.partial.failed_loads = failed
        if self.wings.items is not None:
            launched.partial.encoder_cache = replace(self.wings.items.cache)
        return launched

    def rest(self) -> None:
        """Use the time for other work: no request is left."""
        if self.wings.threads is not None:
            self.wings.threads.reset()
        if self.compiled is not None:
            self.compiled.start()

    def compile(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Compile what can be compiled on this device, and wait for it. See `Compiled.compile`."""
        if self.compiled is not None:
            self.compiled.compile(on_progress)

    def _warm_up(self) -> None:
        """Run steps so that Triton compiles their attention kernels now and not while serving: a decode alone, and one
        beside a prompt. Both run with short contexts, which are not split, and with the longest. None of these steps
        has only decodes to be sampled."""
        self.kv_cache.clear([0])
        for context in (1, self.capacity.max_model_len):
            for rows, counts in (([0], [1]), ([0, 1], [1, 2])):  # no sequence has these rows yet: they name block 0
                batch = Batch(rows=rows, starts=[context - 1, max(0, context - 2)][: len(rows)], counts=counts)
                self.runner.launch(batch).result()

    def _log_start(self) -> None:
        setup, config, capacity = self.setup, self.setup.config, self.capacity
        size = block_bytes(setup.part, config.block_size, setup.kv_dtype, setup.kinds.num_rows)
        gib = capacity.num_blocks * size / GIB
        requests = capacity.num_blocks / max(1, setup.needs.of([capacity.max_model_len]))
        tokens = int(requests * capacity.max_model_len)
        kinds = [kind for kind in ("dummy" if config.load_format == "dummy" else None, self.wings.stored_as) if kind]
        weights = f" with {' '.join(kinds)} weights" if kinds else ""
        kv_dtype = "" if setup.kv_dtype == setup.dtype else f" in {str(setup.kv_dtype).removeprefix('torch.')}"
        lengths = f"{tokens:,} tokens = {requests:.1f} requests of {capacity.max_model_len:,} tokens"
        cache = f"KV cache{kv_dtype} {gib:.2f} GiB = {lengths}" if setup.has_cache else "no KV cache"
        logger.info(f"{setup.path.name} in {capacity.dtype}{weights} on {capacity.device}; {cache}")
        if windows := {window for window in capacity.windows if window not in (None, STATE)}:
            sizes = " or ".join(f"{window:,}" for window in sorted(windows))
            logger.info(f"layers with a window of {sizes} tokens keep only the blocks that it reaches")
        rope = setup.model_config.rope
        if rope.rope_type == "longrope":
            original = rope.params["original_max_position_embeddings"]
            kind, than = ("long", "is more") if rope.params["length"] > original else ("short", "is not more")
            logger.info(f"longrope uses its {kind} factors, because max_model_len {than} than {original:,}")
        logger.info(f"steps run {self.way}")
