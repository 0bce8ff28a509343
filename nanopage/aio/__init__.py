"""The engine for asyncio: a thread that steps it, and AsyncLLM."""
