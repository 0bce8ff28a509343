"""Methods of LLM that vLLM's has, and that only programs for vLLM need."""

from dataclasses import replace
from typing import Any

from nanopage.params import SamplingParams


def get_tokenizer(llm: Any):
    """The model's tokenizer; None if it has none, which only load_format="dummy" allows."""
    return llm.engine.tokenizer


def get_default_sampling_params(llm: Any) -> SamplingParams:
    """The parameters of requests that have none (see `generation_config` in EngineConfig)."""
    return replace(llm.engine.default_sampling_params)


def start_profile(llm: Any, profile_prefix: str | None = None) -> None:
    """Record with torch's profiler what this thread computes, and the GPU if there is one, until `stop_profile`.

    Args:
        profile_prefix: how the file's name begins.

    Raises: as `Profiler.start`.
    """
    llm.profiler.start(profile_prefix)


def stop_profile(llm: Any) -> None:
    """Write the recording to a new file, and log its name. Raises as `Profiler.stop`."""
    llm.profiler.stop()
