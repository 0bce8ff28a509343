"""Builds an engine and the executor behind it from one set of options."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nanopage.adapters.requests import Adapters
from nanopage.adapters.slots import AdapterSlots
from nanopage.audio import WHISPER
from nanopage.audio.rules import RulesOrGrammars
from nanopage.beams import requests as beams
from nanopage.beams.offline import beam_search
from nanopage.config.model import ModelConfig
from nanopage.config.options import EngineConfig
from nanopage.cpu.threads import default_threads
from nanopage.device import resolve_device, resolve_dtype, resolve_kv_dtype
from nanopage.distributed import ray_cluster
from nanopage.distributed.process_executor import Link, ProcessExecutor, start_processes
from nanopage.engine.engine import LLMEngine
from nanopage.engine.token_budget import Use, choose_budget
from nanopage.files.model_files import exists
from nanopage.grammar.replies import read_replies
from nanopage.grammar.structured import Grammars
from nanopage.items.audio import read_audio
from nanopage.items.embeds import read_embeds
from nanopage.items.soft_prompts import SoftPrompts, with_prompt_adapters
from nanopage.items.text import make_text_reader
from nanopage.pooling.files import check_pooling, choose_pooling
from nanopage.pooling.offline import classify, embed, encode, score
from nanopage.pooling.requests import ByLength, PoolingRequests
from nanopage.processors.setup import attach_processors
from nanopage.reading.config import has_family
from nanopage.recurrent.states import fit_block_size
from nanopage.speculation.setup import choose_drafts
from nanopage.standby.offline import is_sleeping, sleep, update_weights, wake_up
from nanopage.startup import worker_process
from nanopage.startup.worker import build_worker
from nanopage.step import Executor
from nanopage.text.prompts import PromptReader
from nanopage.text.tokenizer import Tokenizer
from nanopage.vision.setup import make_image_reader
from nanopage.weights import hub, loader
from nanopage.worker.executor import LocalExecutor

# build_engine, the methods that wings add to LLM, and what these methods call.
__all__ = ["beam_search", "build_engine", "classify", "embed", "encode", "read_replies", "score"]
__all__ += ["is_sleeping", "sleep", "update_weights", "wake_up", "with_prompt_adapters"]

logger = logging.getLogger("nanopage")


def build_engine(
    config: EngineConfig, on_progress: Callable[[int, int], None] | None = None, use: Use = "steps"
) -> LLMEngine:
    """Find the model, read its configuration and tokenizer, and start an engine for it.

    Args:
        on_progress: called while weights load, with the number of weights read so far and the total.
        use: who steps the engine; it decides how many tokens a step has (see `choose_budget`).

    Raises:
        FileNotFoundError, ValueError: a model that is not there, is broken or is not supported.
        MemoryError: too little memory for its weights or its KV cache.
    """
    path = hub.resolve(None if config.model is None else str(config.model))
    checkpoint = loader.open_checkpoint(path)
    config, model_config, tokenizer = _read_model(config, _read_config(config, checkpoint), checkpoint, path)
    read_images = make_image_reader(config, model_config, path, tokenizer)
    read_text = make_text_reader(model_config, path)
    executor: Executor
    if config.is_distributed:
        start_links = _start_actors if config.distributed_executor_backend == "ray" else start_processes
        executor = ProcessExecutor(config, model_config, path, on_progress, start_links)
    else:
        executor = LocalExecutor(partial(build_worker, config, model_config, checkpoint, on_progress))
    del checkpoint
    build_draft_model = partial(build_worker, on_progress=on_progress)
    make_drafts = choose_drafts(config, model_config, tokenizer, executor, build_draft_model)
    adapter_slots = AdapterSlots(config.max_loras) if config.enable_lora else None
    engine = LLMEngine(config, model_config, path, tokenizer, executor, make_drafts, adapter_slots)
    engine.scheduler.token_budget = budget = choose_budget(config, engine.capacity.device, use)
    if budget.seconds is not None:
        engine.listeners.append(budget.observe)
    if model_config.is_encoder:
        engine.scheduler.arrange = ByLength(budget).arrange
    processor = engine.input_processor
    processor.make_search = beams.make_request
    if tokenizer is not None:
        processor.grammars = Grammars(tokenizer, model_config.vocab_size, model_config.eos_token_ids)
        if model_config.architecture == WHISPER:
            processor.grammars = RulesOrGrammars(processor.grammars)
    attach_processors(engine, executor)
    _read_items(processor.prompts, config, model_config, engine.capacity.dtype, read_images)
    if read_text is not None:
        processor.prompts = read_text(processor.prompts)
    if config.enable_lora:
        processor.adapters = Adapters(config, model_config)
    if model_config.pooling is not None:
        processor.pooling = PoolingRequests(processor, model_config.pooling)
    return engine


def _read_items(
    prompts: PromptReader, config: EngineConfig, model_config: ModelConfig, dtype: str, read_images: Any
) -> None:
    """Attach what reads the items of prompts. Args: dtype: of activations. read_images: None: the model sees none."""
    readers, rows = prompts.item_readers, (model_config.hidden_size, getattr(torch, dtype))
    if config.enable_prompt_embeds:
        readers["prompt_embeds"] = partial(read_embeds, *rows)
    if config.enable_prompt_adapter:
        readers["prompt_adapter_request"] = SoftPrompts(config, model_config, rows[1]).read
    if model_config.architecture == WHISPER:
        prompts.needed = "multi_modal_data"
        readers["multi_modal_data"] = partial(read_audio, model_config)
    if read_images is not None:
        readers["multi_modal_data"] = read_images


def _read_config(config: EngineConfig, checkpoint: loader.Checkpoint) -> ModelConfig:
    """Read the configuration for a family here, or else for transformers' own module. Raises: as `build_engine`."""
    fits = config.model_impl == "auto" and (not isinstance(checkpoint, Path) or has_family(checkpoint))
    if fits or config.model_impl == "nanopage":
        return loader.read_config(checkpoint, config.hf_overrides)
    from nanopage.transformers_impl.config import read_config  # imports transformers

    return read_config(config, checkpoint)


def _read_model(
    config: EngineConfig, model_config: ModelConfig, checkpoint: loader.Checkpoint, path: Path
) -> tuple[EngineConfig, ModelConfig, Tokenizer | None]:
    """Read a model's tokenizer, and complete its options and configuration by what its other files say.

    Raises: as `build_engine`.
    """
    _check_length(config, model_config.max_position_embeddings)
    if model_config.state:
        config = _fit_blocks(config, model_config)
    tokenizer = None
    if config.load_format != "dummy" or path.suffix == ".gguf" or exists(path / "tokenizer.json"):
        tokenizer = Tokenizer(checkpoint, model_config.vocab_size)
    token_to_id = (lambda token: None) if tokenizer is None else tokenizer.backend.token_to_id
    pooling = choose_pooling(path, model_config.pooling, model_config.hidden_size, config, token_to_id)
    if pooling is not None:
        config = check_pooling(config, model_config, pooling)
    model_config = replace(model_config, pooling=pooling)
    if tokenizer is not None:
        model_config = replace(model_config, eos_token_ids=model_config.eos_token_ids | tokenizer.end_ids())
    if tokenizer is not None and pooling is None:
        ends = ", ".join(f"{tokenizer.backend.id_to_token(i)!r} ({i})" for i in sorted(model_config.eos_token_ids))
        logger.info(f"a reply ends with one of these tokens: {ends:.500}" if ends else "no token ends a reply")
    return config, model_config, tokenizer


def _fit_blocks(config: EngineConfig, model_config: ModelConfig) -> EngineConfig:
    """Make blocks large enough for the states of layers."""
    device = resolve_device(config.device)
    dtype, _ = resolve_dtype(config.dtype, model_config.dtype, device)
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, config.dtype, model_config.dtype, dtype, device)
    on_gpu = device.type == "cuda"
    block_size = fit_block_size(model_config, config.block_size, dtype, kv_dtype, on_gpu)
    if block_size == config.block_size:
        return config
    logger.info(f"block_size is {block_size}, not {config.block_size}: a block has room for the state of a layer")
    return replace(config, block_size=block_size)


def _check_length(config: EngineConfig, limit: int) -> None:
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(f"max_model_len={config.max_model_len} is more than the model's {limit} positions")


def _start_actors(config: EngineConfig, scratch: str) -> tuple[list[Link], str]:
    ray_cluster.connect(max(default_threads(), config.num_ranks))
    from nanopage.distributed.ray_link import start_actors  # imports Ray, which reads its settings when it is imported

    return start_actors(worker_process.serve, config, scratch)
