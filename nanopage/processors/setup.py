"""What an engine needs for logits processors."""

from functools import partial

from nanopage.audio import WHISPER
from nanopage.engine.engine import LLMEngine
from nanopage.processors.masks import add_processors
from nanopage.processors.sampler import ProcessedSampler
from nanopage.step import Executor
from nanopage.worker.executor import LocalExecutor


def attach_processors(engine: LLMEngine, executor: Executor) -> None:
    """Let requests have processors, if the engine's worker is in this process. Otherwise they are refused."""
    refused = None if isinstance(executor, LocalExecutor) else "workers in other processes"
    if engine.model_config.architecture == WHISPER:
        refused = f"{WHISPER}, whose rules change logits"
    if isinstance(executor, LocalExecutor) and refused is None:
        runner = executor.worker.runner
        runner.sampler = ProcessedSampler(runner.table, runner.sampler.sample_all)
    engine.input_processor.add_processors = partial(add_processors, refused, engine.model_config.vocab_size)
