"""Serving over HTTP (milestone 12): a part of OpenAI's API, for this machine only.

python -m mini_ref.server MODEL_DIR    # in docs/build; then POST to http://127.0.0.1:8000/v1/completions
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
        while self.engine.has_unfinished():
            async with self.lock:
                while self.gone:
                    self.engine.abort(self.gone.pop())
                new = await asyncio.to_thread(self.engine.step)
            for (request_id, index), tokens in new.items():
                if request_id in self.inboxes:
                    self.inboxes[request_id].put_nowait((index, tokens))

    async def add(self, call: Call) -> str:
        """Add a request between two steps. Returns: its id. Raises: see `Engine.add_request`."""
        request_id, options = str(next(self.numbers)), call.model_dump(exclude={"prompt", "stream"})
        prompt_ids = self.tokenizer.encode(call.prompt).ids if isinstance(call.prompt, str) else call.prompt
        async with self.lock:
            self.engine.add_request(request_id, prompt_ids, stop_ids=self.engine.model.end_ids, **options)
        self.inboxes[request_id] = asyncio.Queue()
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self.run())
        return request_id

    async def stream(self, request_id: str, call: Call) -> AsyncIterator[dict]:
        """Yields each new piece of an answer: `index`, `text`, `token_ids`, and `finish_reason`, None until it ends.
        Half a character waits for its other half. A request that nobody reads to its end is aborted."""
        outputs: list[list[int]] = [[] for _ in range(call.n)]
        sent, left = [0] * call.n, call.n
        try:
            while left:
                index, tokens = await self.inboxes[request_id].get()
                outputs[index] += tokens
                stops, text = tokens[-1] in self.engine.model.end_ids, self.tokenizer.decode(outputs[index])
                reason = "stop" if stops else "length" if len(outputs[index]) == call.max_tokens else None
                text = text[sent[index] :] if reason or not text.endswith("\N{REPLACEMENT CHARACTER}") else ""
                sent[index] += len(text)
                left -= reason is not None
                yield {"index": index, "text": text, "token_ids": tokens, "finish_reason": reason}
        finally:
            del self.inboxes[request_id]
            self.gone.append(request_id)


def make_app(engine: Engine, tokenizer: Tokenizer) -> FastAPI:
    """The application: POST /v1/completions with a `Call`."""
    app, service = FastAPI(), Service(engine, tokenizer)

    @app.post("/v1/completions")
    async def completions(call: Call):
        try:
            pieces = service.stream(await service.add(call), call)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        if call.stream:
            lines = (f"data: {json.dumps({'choices': [piece]})}\n\n" async for piece in pieces)
            return StreamingResponse(lines, media_type="text/event-stream")
        choices: list[dict] = [{"text": "", "token_ids": []} for _ in range(call.n)]
        async for piece in pieces:
            choice = choices[piece["index"]]
            choice |= piece | {name: choice[name] + piece[name] for name in ("text", "token_ids")}
        return {"choices": choices}

    return app


if __name__ == "__main__":
    path = Path(sys.argv[1])
    engine = Engine(path, num_blocks=512, block_size=16, max_num_seqs=16, max_num_batched_tokens=256)
    uvicorn.run(make_app(engine, Tokenizer.from_file(str(path / "tokenizer.json"))))
