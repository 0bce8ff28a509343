"""What vLLM's scripts import from its utils."""

from nanopage.vllm.engine_args import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
