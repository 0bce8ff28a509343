"""Replica: an engine in a process of its own on Ray Serve, behind the routes of a server (`nanopage serve --replicas`).

It runs the routes of app.py, as a server with one engine does. front.py hands it calls.
"""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import ray
from prometheus_client.core import Metric
from ray import serve
from ray.exceptions import RayError
from starlette.types import Message

import nanopage
from nanopage.server.app import create_routes
from nanopage.server.errors import ApiError
from nanopage.server.in_process import http_scope
from nanopage.server.metrics import relabel
from nanopage.server.options import load_engine
from nanopage.server.relay import Call
from nanopage.server.state import ServerState
from nanopage.vllm.engine_args import EngineArgs

logger = logging.getLogger("nanopage")

CANNOT_START = "the replica cannot start: "


@dataclass
class Settings:
    """What a replica needs to start: plain data, which Ray stores."""

    state: dict[str, Any]  # arguments of ServerState
    engine: dict[str, Any]  # options of EngineArgs
    tracing: str | None = None  # where spans are sent
    front: Any = None  # the FrontAlive of the front process, if the cluster outlives that process
    version: str = nanopage.__version__  # in the front process


class FrontAlive:
    """A Ray actor that ends with the front process, even if that process is killed. Replicas wait for it to end,
    because Ray Serve would run them for ever."""

    async def wait(self) -> None:
        await asyncio.Event().wait()


def _end_with(front: Any, application: str) -> None:
    """Wait until the front process has ended, then end all replicas. Runs in a thread of a replica."""
    try:
        ray.get(front.wait.remote())
    except RayError:
        logger.warning("the server that started this replica has ended: the replicas end as well")
        serve.delete(application, _blocking=False)


class Replica:
    """One engine behind the routes of a server, in a process of its own. Ray Serve makes it from Settings."""

    def __init__(self, settings: Settings):
        self.rank = serve.get_replica_context().rank.rank
        self.state = ServerState(**settings.state)
        self.routes = create_routes(self.state)
        try:
            self._load(settings)
        except BaseException as error:  # when Rust panics, tokenizers raises something that is not an Exception
            raise RuntimeError(f"{CANNOT_START}{str(error) or type(error).__name__}") from None

    def _load(self, settings: Settings) -> None:
        if settings.version != nanopage.__version__:
            raise RuntimeError(f"nanopage is {nanopage.__version__} here, but {settings.version} where it was started")
        if settings.tracing is not None:
            from nanopage.server.tracing import Tracer

            self.state.tracer = Tracer.to_endpoint(settings.tracing)
        # Requests without a seed must not get the same noise in every replica.
        engine = settings.engine | {"seed": settings.engine["seed"] + self.rank}
        num_workers = engine["tensor_parallel_size"] * engine["pipeline_parallel_size"]
        if num_workers > 1 and (threads := os.environ.get("OMP_NUM_THREADS")):  # Ray sets it to the replica's CPUs
            os.environ["OMP_NUM_THREADS"] = str(max(1, int(threads) // num_workers))
        self.state.llm = load_engine(EngineArgs(**engine))
        if settings.front is not None:
            application = serve.get_replica_context().app_name
            threading.Thread(target=_end_with, args=(settings.front, application), daemon=True).start()

    async def call(self, call: Call) -> AsyncIterator[tuple[int, list[tuple[bytes, bytes]]] | bytes]:
        """Run a call. Yields the status and the headers of the reply, then parts of its body. If the call is cancelled,
        the routes see that the client has gone."""
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()
        request: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]

        async def receive() -> Message:
            if request:
                return request.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.put_nowait(message)

        scope = http_scope(call.method, call.path, call.headers)
        scope.update({"nanopage.key": call.key, "nanopage.send": send})
        work = asyncio.create_task(self.routes(scope, receive, send))
        work.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], message["headers"]
                    continue
                parts = [message["body"]]
                while not sent.empty() and (message := sent.get_nowait()) is not None:
                    parts.append(message["body"])
                yield b"".join(parts)
                if message is None:
                    break
        finally:
            gone.set()
            await asyncio.wait([work])

    async def metrics(self) -> list[Metric]:
        """The engine's metrics. The replica's number serves as the engine's number."""
        return relabel(self.state.metrics(), {"engine": str(self.rank)})

    async def sees_images(self) -> bool:
        return self.state.sees_images()

    async def check_health(self) -> None:
        """Ray Serve replaces the replica if this raises a few times in a row."""
        try:
            self.state.check_health()
        except ApiError as error:
            raise RuntimeError(str(error)) from None

    def __del__(self) -> None:  # Ray Serve calls it when it stops the replica
        if self.state.llm is not None:
            self.state.llm.shutdown()
        if self.state.tracer is not None:
            self.state.tracer.shutdown()
