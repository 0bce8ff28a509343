"""The program that tries out the regular expressions of a tokenizer.json, in a process of its own (see
limited_process.py).

A request has "text". An answer has "error" if the steps before the model fail on it.
"""

from collections.abc import Callable
from functools import lru_cache

from tokenizers import Tokenizer


def make_answer(setup: str) -> Callable[[dict], dict]:
    """Args: setup: a tokenizer.json with an empty model."""
    load = lru_cache(maxsize=1)(lambda: Tokenizer.from_str(setup))  # for the first text, within the limits

    def answer(request: dict) -> dict:
        try:
            load().encode(request["text"])
        except MemoryError:
            raise
        except BaseException as error:  # what tokenizers raises when Rust panics is not an Exception
            return {"error": str(error)[:300]}
        return {}

    return answer
