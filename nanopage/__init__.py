"""nanopage: a compact, readable LLM inference engine.

    from nanopage import LLM, SamplingParams

Names are imported on first use, so that `import nanopage.engine.scheduler` does not import torch.
"""

import importlib
import logging
import os
import re
import sys

__version__ = "0.2.0"

# How long an OpenMP thread spins at a barrier before it sleeps: on a Zen 5, 0.7 ms instead of 7. If another process
# keeps a core busy, the system may put two threads on one core. Each then waits for the other, and its spinning keeps
# the other from running. libgomp reads this once, when torch is imported.
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "30000"

_HOME = {
    "LLM": "llm",
    "AsyncLLM": "aio.async_llm",
    "LLMEngine": "engine.engine",
    "EngineConfig": "config.options",
    "EngineArgs": "vllm.engine_args",
    "TextPrompt": "inputs",
    "TokensPrompt": "inputs",
    "LoRARequest": "inputs",
    "PromptAdapterRequest": "items.soft_prompts",
    "SamplingParams": "params",
    "BeamSearchParams": "params",
    "PoolingParams": "params",
    "StructuredOutputsParams": "params",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "PoolingRequestOutput": "pooling.outputs",
    "EmbeddingRequestOutput": "pooling.outputs",
    "ClassificationRequestOutput": "pooling.outputs",
    "ScoringRequestOutput": "pooling.outputs",
}
__all__ = [*_HOME]


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(f"nanopage.{_HOME[name]}"), name)
    raise AttributeError(f"module 'nanopage' has no attribute {name!r}")


# Control characters, which a terminal obeys, characters that change the direction of text, and surrogates.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


MAX_MESSAGE = 20_000  # the most characters of a message to print: it may quote a file


def escaped(text: str, most: int | None = None) -> str:
    """`text` for a message or a log, with unprintable characters as escape sequences. Tabs and newlines stay.

    Args: most: how many characters of `text` to keep, half of them from its end.
    """
    if most is not None and len(text) > most:
        text = f"{text[: most // 2]} ... ({len(text) - most:,} characters) ... {text[-most // 2 :]}"
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record), MAX_MESSAGE)


class _Stderr(logging.StreamHandler):
    """Writes to whatever sys.stderr is when a message comes. To silence the engine, use the logger "nanopage"."""

    def emit(self, record):
        self.stream = sys.stderr
        super().emit(record)


logging.getLogger("nanopage").setLevel(logging.INFO)
_handler = _Stderr()
_handler.setFormatter(_Formatter("nanopage: %(message)s"))
logging.getLogger("nanopage").addHandler(_handler)
