"""Serving over HTTP (milestone 12): a part of OpenAI's API, for this machine only.

python -m mini.server MODEL_DIR    # in docs/build; then POST to http://127.0.0.1:8000/v1/completions
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict
from tokenizers import Tokenizer

from .engine import Engine


class Call(BaseModel):
    """The body of a call. Other fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)
    prompt: str | list[int]
    max_tokens: int = 16
    temperature: float = 0.0
    seed: int = 0
    n: int = 1
    stream: bool = False


class Service:
    """Runs an engine for asyncio. A step runs in a thread; whoever else touches the engine holds `lock`."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer):
        self.engine, self.tokenizer, self.numbers, self.lock = engine, tokenizer, count(), asyncio.Lock()
        self.inboxes: dict[str, asyncio.Queue[tuple[int, list[int]]]] = {}  # new tokens (index, tokens) of requests
        self.gone: list[str] = []  # requests to abort before the next step
        self.task: asyncio.Task | None = None  # of `run`

    async def run(self) -> None:
        """Run steps, and put new tokens into the inboxes of their requests, until no request is left."""
        raise NotImplementedError("milestone 12")

    async def add(self, call: Call) -> str:
        """Add a request between two steps. Returns: its id. Raises: see `Engine.add_request`."""
        raise NotImplementedError("milestone 12")

    async def stream(self, request_id: str, call: Call) -> AsyncIterator[dict]:
        """Yields each new piece of an answer: `index`, `text`, `token_ids`, and `finish_reason`, None until it ends.
        Half a character waits for its other half. A request that nobody reads to its end is aborted."""
        raise NotImplementedError("milestone 12")


def make_app(engine: Engine, tokenizer: Tokenizer) -> FastAPI:
    """The application: POST /v1/completions with a `Call`."""
    raise NotImplementedError("milestone 12")


if __name__ == "__main__":
    path = Path(sys.argv[1])
    engine = Engine(path, num_blocks=512, block_size=16, max_num_seqs=16, max_num_batched_tokens=256)
    uvicorn.run(make_app(engine, Tokenizer.from_file(str(path / "tokenizer.json"))))
