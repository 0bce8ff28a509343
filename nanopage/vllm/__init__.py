"""vLLM's names for options and metrics."""
