"""The one place that attaches wings to a worker: it loads the model and attaches what the options ask for. build.py
calls it for a worker in this process, startup/worker_process.py for a worker in another process."""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from nanopage.adapters.layers import Add
from nanopage.adapters.model import check_layers
from nanopage.adapters.worker import attach_adapters
from nanopage.audio import WHISPER
from nanopage.audio.mel import NUM_TIMESTAMPS
from nanopage.audio.sampler import TranscriptSampler
from nanopage.config.model import ModelConfig
from nanopage.config.options import EngineConfig
from nanopage.cpu.aot import Compiled
from nanopage.cpu.aot_products import CompiledProduct, adapter_product
from nanopage.cpu.lora import add_adapters
from nanopage.cpu.option_speed import warn_of_slow_options
from nanopage.cpu.threads import ThreadCount, limit_threads
from nanopage.device import resolve_device, resolve_dtype, resolve_kv_dtype, set_cuda_precision
from nanopage.distributed.division import layers_of_stage
from nanopage.distributed.parallel import PartialWay, Ranks
from nanopage.distributed.part import WHOLE, Part
from nanopage.items.axes import Axes
from nanopage.items.encoded import WriteEncoded
from nanopage.items.prefixes import WriteGiven
from nanopage.items.rows import ItemRows
from nanopage.layers.linear import Linear
from nanopage.models.decoder import Decoder
from nanopage.models.meta import meta_model
from nanopage.pooling.encode import Encode
from nanopage.speculation.head_files import load_head
from nanopage.speculation.head_worker import HeadWorker, Watched
from nanopage.standby.worker import WorkerStandby
from nanopage.startup.invariant import why_not_invariant
from nanopage.startup.options import refused
from nanopage.state.layer_kinds import LayerKinds, divide_layers
from nanopage.step import Capacity
from nanopage.vision.whole import WholeWay
from nanopage.weights import loader
from nanopage.weights.storage import BLOCKS, choose_storage, store, why_eager
from nanopage.worker.setup import Setup
from nanopage.worker.ways import Wings
from nanopage.worker.worker import Worker

logger = logging.getLogger("nanopage")


def set_up(config: EngineConfig, model_config: ModelConfig, part: Part, path: Path, device: torch.device) -> Setup:
    """What a worker computes. Raises: ValueError for an option that does not fit the model or the device."""
    longest = config.max_model_len or model_config.max_position_embeddings
    if model_config.is_encoder:
        kinds = LayerKinds((), (0,) * model_config.num_layers)  # layers keep nothing
    else:
        kinds = divide_layers(model_config.sliding_windows, longest, model_config.kv_sources)
    kinds = kinds.stage(layers_of_stage(model_config, part.pp_rank, part.pp_size))
    dtype, why = resolve_dtype(config.dtype, model_config.dtype, device)
    for message in refused(config, model_config, device, dtype, path):
        raise ValueError(message)
    if why:
        logger.info(why)
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, config.dtype, model_config.dtype, dtype, device)
    setup = Setup(config, model_config, part.config(model_config), kinds, longest, path, device, dtype, kv_dtype)
    if config.batch_invariant and (why := why_not_invariant(setup)):
        raise ValueError(f"batch_invariant=True does not work with {path}: {why}")
    return setup


def build_worker(
    config: EngineConfig,
    model_config: ModelConfig,
    checkpoint: loader.Checkpoint,
    on_progress: Callable[[int, int], None] | None = None,
    ranks: Ranks | None = None,
    agree: Callable[[Capacity], Capacity] = lambda mine: mine,
) -> Worker:
    """Load the model and start a worker for it.

    Args:
        checkpoint: the weights of the model that `model_config` describes.
        on_progress: called while weights load, with the number of weights read so far and the total.
        ranks: connects this worker with others, if each has a part of the model. None: it has the whole model.
        agree: as in Worker.

    Raises:
        ValueError: the model or the device does not allow an option, or a weight is broken. The message names it.
        MemoryError: the device has too little memory for the weights or the KV cache.
    """
    model_config, path = model_config.for_length(config.max_model_len), loader.path_of(checkpoint)
    part, device = (WHOLE, resolve_device(config.device)) if ranks is None else (ranks.part, ranks.device)
    setup, wings = set_up(config, model_config, part, path, device), Wings()
    if config.enable_lora:
        check_layers(meta_model(model_config), model_config)
    if setup.on_gpu:
        set_cuda_precision()
    else:
        limit_threads()
        wings.threads = ThreadCount(torch.get_num_threads(), None if ranks is None else os.getppid())
    if model_config.model_impl == "transformers":
        from nanopage.transformers_impl.load import load_decoder  # imports transformers

        setup, decoder = load_decoder(setup, on_progress)
        wings.standby = WorkerStandby(decoder, load=None)
        return Worker(setup, decoder, wings, agree)
    head = load_head(setup, checkpoint)
    model, wings.stored_as, product = _load(setup, checkpoint, part, on_progress)
    wings.standby = WorkerStandby(model, partial(_load_others, setup, part))
    if (quantized := model_config.quantization) is not None and wings.stored_as != BLOCKS:
        becomes = wings.stored_as or str(setup.dtype).removeprefix("torch.")
        logger.info(f"the weights of {path.name} ({quantized.method}: {quantized.layout}) become {becomes}")
    takes_embeds = config.enable_prompt_embeds or config.enable_prompt_adapter
    image = model_config.encoders.get("image")
    unit = getattr(image, "unit", None)  # of positions in images, which later stages need, too
    if (part.is_first or unit) and not model_config.is_encoder and (takes_embeds or model.encoders):
        wings.items = ItemRows(model_config, model.encoders, setup.dtype, device)
        wings.items.embeds = part.is_first
        wings.items.axes = None if unit is None else Axes(unit, config.max_num_seqs + 1, device)
        if getattr(image, "whole", False):
            wings.wrap = partial(WholeWay, items=wings.items)
    if config.enable_lora:
        model = attach_adapters(setup, model, wings, _choose_add(setup))
    if ranks is not None:
        ranks.connect(model, model_config, setup.dtype)
        wings.wrap = partial(PartialWay, ranks=ranks)
    if model_config.is_encoder:
        wings.wrap = Encode
    if wings.items is not None and model_config.encoded_positions:
        wings.wrap = partial(WriteEncoded, wings.items)
    if config.enable_prompt_adapter and ranks is None:
        wings.wrap = partial(WriteGiven, model.layers, wings.wrap)
    if not setup.on_gpu:
        if part.samples:
            warn_of_slow_options(config, model_config, model.layers[0], setup.dtype, product)
        tiled = wings.stored_as is not None
        compiled = partial(
            Compiled, model, config=setup.part, dtype=setup.dtype, tiled=tiled, invariant=config.batch_invariant
        )
        why = why_eager(setup, model)
        if config.batch_invariant and why:
            raise ValueError(f"batch_invariant=True does not work with {path}: steps would run {why}")
        wings.compiled = why or compiled
    if head is not None:
        wings.heads = HeadWorker(setup, head, model)
        wings.wrap = partial(Watched, wings.heads, wings.wrap)
    worker = Worker(setup, model, wings, agree)
    if wings.heads is not None:
        wings.heads.start(worker)
    if model_config.architecture == WHISPER and model_config.vocab_size > NUM_TIMESTAMPS:
        worker.runner.sampler = TranscriptSampler(worker.runner.table, worker.runner.sampler.sample_all)
    return worker


def _load(
    setup: Setup,
    checkpoint: loader.Checkpoint,
    part: Part,
    on_progress: Callable[[int, int], None] | None = None,
    on_host: bool = False,
) -> tuple[Decoder, str | None, CompiledProduct | None]:
    """Load a part of a model, with its weights as the options want them. Returns: the model, and how its weights are
    stored (see weights/storage.py).

    Args: on_host: of a GPU's model, leave in host memory what need not be on the GPU.
    """
    config, (kind, product) = setup.config, choose_storage(setup, checkpoint)
    integers = None if kind != BLOCKS else "packed" if setup.on_gpu else "tiles"
    # A GPU that has no room for the weights may have room for the quantized ones.
    on_host = on_host or (setup.on_gpu and config.quantize_to is not None)
    how = loader.Loading(config.load_format, integers, on_host, part, group=setup.on_gpu)
    model = loader.load_model(checkpoint, setup.model_config, setup.dtype, setup.device, how, on_progress)
    if (pooling := setup.model_config.pooling) is not None and pooling.answers is not None:
        _answer_with(model, *pooling.answers)
    return model, *store(setup, model, kind, product)


def _load_others(setup: Setup, part: Part, path: Path) -> Decoder:
    """Load other weights of the same model, beside those that it has."""
    config = replace(setup.config, load_format="auto")  # also in place of random weights
    return _load(replace(setup, config=config, path=path), path, part, on_host=True)[0]


def _answer_with(model: Decoder, no: int, yes: int) -> None:
    """Replace `lm_head` by `score`: the logit of token `yes` minus that of token `no`. The sigmoid of it is the
    probability of `yes`, if only these two tokens may follow."""
    matrix = model.lm_head.weight.matrix.data
    model.score = Linear(matrix.shape[1], 1)
    model.score.weight.matrix = torch.nn.Parameter((matrix[yes] - matrix[no])[None], requires_grad=False)
    model.lm_head = None  # type: ignore[assignment]


def _choose_add(setup: Setup) -> Add:
    """What adds the products of adapters. On a CPU, it is compiled on first use."""
    if setup.on_gpu:
        from nanopage.adapters import kernels  # imports Triton

        return kernels.add_adapters
    compiles = not setup.config.enforce_eager and setup.dtype in (torch.float32, torch.bfloat16)
    return (adapter_product(setup.dtype) if compiles else None) or add_adapters
