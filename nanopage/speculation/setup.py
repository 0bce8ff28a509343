"""Chooses what makes the drafts of an engine, by its options: prompt lookup, a draft model with its own worker, or a
head in the model's worker."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nanopage.checks.speculation import HEADS
from nanopage.config.model import ModelConfig
from nanopage.config.options import EngineConfig
from nanopage.speculation.draft_model import ModelDrafter
from nanopage.speculation.drafts import Drafts
from nanopage.speculation.head_drafter import HeadDrafter
from nanopage.speculation.lookup import NgramDrafter
from nanopage.state.layer_kinds import BlockNeeds, divide_layers
from nanopage.step import Capacity
from nanopage.text.tokenizer import Tokenizer
from nanopage.weights import hub, loader
from nanopage.worker.executor import LocalExecutor


def choose_drafts(
    config: EngineConfig,
    model_config: ModelConfig,
    tokenizer: Tokenizer | None,
    executor: Any,
    build_worker: Callable[..., Any],
) -> Callable[[Capacity], Drafts] | None:
    """Choose what makes the drafts of an engine. None: nothing does.

    Args:
        executor: the model's. A LocalExecutor if the method needs a head.
        build_worker: as startup/worker.py; makes the draft model's worker.

    Raises: ValueError, FileNotFoundError for a draft model that does not exist or does not fit.
    """
    speculation = config.speculation
    if speculation is None:
        return None
    if speculation.method == "ngram":
        return lambda capacity: Drafts(NgramDrafter(speculation))
    if speculation.method in HEADS:
        return lambda capacity: Drafts(HeadDrafter(executor.worker.wings.heads))
    path = hub.resolve(speculation.model)
    checkpoint = loader.open_checkpoint(path)
    draft_config = loader.read_config(checkpoint)
    if draft_config.pooling is not None:
        raise ValueError(f"speculative_config: the draft model {path.name} has no language-model head")
    if tokenizer is not None:
        vocab = Tokenizer(checkpoint, draft_config.vocab_size).backend.get_vocab(with_added_tokens=True)
        if vocab != tokenizer.backend.get_vocab(with_added_tokens=True):
            raise ValueError(f"speculative_config: the draft model {path.name} has another vocabulary than the model")
    elif draft_config.vocab_size != model_config.vocab_size:
        raise ValueError(
            f"speculative_config: the draft model {path.name} has {draft_config.vocab_size} tokens, and the model "
            f"{model_config.vocab_size}"
        )

    if draft_config.state:
        raise ValueError(f"speculative_config: layers of the draft model {path.name} have a state: use another model")

    def make(capacity: Capacity) -> Drafts:
        max_model_len = min(capacity.max_model_len, draft_config.max_position_embeddings)
        num_blocks = _blocks_for_drafts(config, capacity, draft_config, max_model_len)
        options = _options_of_draft_model(config, str(path), num_blocks, max_model_len)
        own = LocalExecutor(lambda: build_worker(options, draft_config, checkpoint))
        held = own.start()
        same_vocab = draft_config.vocab_size == model_config.vocab_size
        return Drafts(ModelDrafter(config, speculation, own, held, model_config.vocab_size, same_vocab))

    return make


def _blocks_for_drafts(config: EngineConfig, capacity: Capacity, draft_config: ModelConfig, max_model_len: int) -> int:
    """The size of a draft model's pool. It holds as many sequences of `max_model_len` tokens as the model's pool."""
    windows = divide_layers(draft_config.sliding_windows, max_model_len, draft_config.kv_sources).windows
    needed = BlockNeeds(windows, config.block_size, max_model_len).of([max_model_len])  # all blocks at once
    by_model = BlockNeeds(capacity.windows, config.block_size, config.token_budget(capacity.device)).of([max_model_len])
    return max(needed, capacity.num_blocks * needed // by_model)


def _options_of_draft_model(config: EngineConfig, model: str, num_blocks: int, max_model_len: int) -> EngineConfig:
    """The engine's options, changed for the draft model's worker."""
    return replace(
        config,
        model=model,
        max_model_len=max_model_len,
        num_gpu_blocks_override=num_blocks,
        kv_cache_gib=None,
        gpu_memory_utilization=None,
        preemption_mode=None,
        swap_space=0,
        quantization=None,
        speculative_config=None,
        enable_lora=False,
        max_loras=1,
        max_lora_rank=16,
        distributed_executor_backend=None,
        batch_invariant=False,  # drafts do not change the output
    )
