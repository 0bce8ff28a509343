"""Builds an engine and the executor behind it from one set of options."""

from collections.abc import Callable

from nanopage.config import EngineConfig
from nanopage.engine.engine import LLMEngine
from nanopage.model_files import exists
from nanopage.step import Executor
from nanopage.text.tokenizer import Tokenizer
from nanopage.weights import hub, loader
from nanopage.worker.executor import LocalExecutor
from nanopage.worker.process_executor import ProcessExecutor


def build_engine(config: EngineConfig, on_progress: Callable[[int, int], None] | None = None) -> LLMEngine:
    """Find the model, read its configuration and tokenizer, and start an engine for it.

    Args:
        on_progress: called while weights load, with the number of weights read so far and the total.

    Raises:
        FileNotFoundError, ValueError: a model that is not there, is broken or is not supported.
        MemoryError: too little memory for its weights or its KV cache.
    """
    path = hub.resolve(None if config.model is None else str(config.model))
    checkpoint = loader.open_checkpoint(path)
    model_config = loader.read_config(checkpoint)
    limit = model_config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(f"max_model_len={config.max_model_len} is more than the model's {limit} positions")
    tokenizer = None
    if config.load_format != "dummy" or path.suffix == ".gguf" or exists(path / "tokenizer.json"):
        tokenizer = Tokenizer(checkpoint, model_config.vocab_size)
    executor: Executor
    if config.is_distributed:
        executor = ProcessExecutor(config, model_config, path, on_progress)
    else:
        executor = LocalExecutor(config, model_config, checkpoint, on_progress)
    del checkpoint
    return LLMEngine(config, model_config, path, tokenizer, executor)
