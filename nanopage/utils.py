"""What vLLM's scripts import from its utils."""

from nanopage.engine_args import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
