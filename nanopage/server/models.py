"""Models: the server's application in front of several models (`nanopage serve --model NAME=PATH ...`, `--models-dir`).

    client -- Models (one process, without torch) -- Unix sockets -- a process for each loaded model

Like the application of a server with one engine, Models is behind Gate, which checks keys, hosts and bodies. It reads
which model a call names, waits until Residents has loaded it (residents.py), and hands the call, unchanged, to the
model's process (model_process.py), whose reply it sends on.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import subprocess
import sys
import tempfile
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanopage.server.app import create_routes, model_card
from nanopage.server.audio import read_form
from nanopage.server.errors import ApiError, json_response
from nanopage.server.json_body import read_json
from nanopage.server.metrics import merge, metrics_reply, relabel
from nanopage.server.middleware import AUDIO_PATHS
from nanopage.server.model_process import ModelProcess, environment
from nanopage.server.relay import HEADERS, POSTS, TEXT_PATHS, Call, Calls, Reply
from nanopage.server.residents import GIB, Resident, Residents
from nanopage.server.state import ServerState
from nanopage.server.streaming import KEEP_ALIVE_SECONDS, PING
from nanopage.weights import hub
from nanopage.weights.inventory import bytes_of_weights, find_stored

logger = logging.getLogger("nanopage")

COMMAND = [sys.executable, "-P", "-m", "nanopage.server.one_model"]  # of the process of a model
# Prints the type of the device and the bytes that are free there. In a process of its own, which imports torch.
ASK = """
import sys
from nanopage.device import free_bytes, resolve_device
try:
    device = resolve_device(sys.argv[1])
    print(device.type, free_bytes(device))
except ValueError as error:
    sys.exit(str(error))
"""
KEEP_ALIVE = 300.0  # seconds
PROCESS_BYTES = GIB // 2  # of Python and torch
GPU_BYTES = 2 * GIB  # of CUDA, and for a step
MAX_SOCKET = 100  # bytes of the path of a Unix socket
KEY_HEADERS = (b"authorization", b"x-api-key")
STREAM = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
LOADING = b": loading\n\n"
HEARD = "nanopage:transcribed_seconds"
METRICS: list[tuple[Any, str, str, Callable[[Resident], float]]] = [
    (GaugeMetricFamily, "model_loaded", "1 if the model is loaded.", lambda model: model.is_loaded),
    (GaugeMetricFamily, "model_memory_bytes", "What the model takes.", lambda model: model.num_used),
    (GaugeMetricFamily, "model_requests_waiting", "Requests that wait for it.", lambda model: model.num_waiting),
    (GaugeMetricFamily, "model_load_seconds", "The time of the last load.", lambda model: model.load_seconds),
    (CounterMetricFamily, "model_loads", "How often it was loaded.", lambda model: model.num_loads),
    (CounterMetricFamily, "model_unloads", "How often it was unloaded.", lambda model: model.num_unloads),
    (CounterMetricFamily, "model_load_failures", "Loads that failed.", lambda model: model.num_failures),
]
# Options of the server in front, as the models' processes get them.
IN_FRONT: dict[str, Any] = {
    **dict.fromkeys(("model", "models_dir", "models_memory", "keep_alive")),
    **dict.fromkeys(("ssl_keyfile", "ssl_certfile", "ssl_ca_certs")),
    **dict.fromkeys(("insecure", "public_metrics"), False),
    "allowed_host": [],
    "allowed_origins": [],
    "host": "localhost",
    "root_path": "",
    "ssl_cert_reqs": 0,
    "log_format": "text",  # its lines become messages here
}


class Models:
    """The server's application in front of several models. It also loads and unloads them.

    Args:
        state: the server's state, without an engine. `model_names` are those of all models.
        models: name -> path.
        options: all options of `nanopage serve`, by name.
        keys: the keys of clients.
    """

    sockets_per_call = 2  # the client's, and that of the model's process

    def __init__(self, state: ServerState, models: dict[str, str], options: dict[str, Any], keys: list[str]):
        self.state, self.options, self.key = state, options, keys[0] if keys else ""
        state.takes_images = True  # each model's process has its own limit
        self.models = {name: Resident(name, path) for name, path in models.items()}
        self.routes, self.calls = create_routes(state), Calls(state)
        self.residents: Residents | None = None
        self._on_gpu = False
        self._numbers = itertools.count()  # of processes
        self._directory = tempfile.TemporaryDirectory(prefix="nanopage-")  # for this user alone
        if len(os.fsencode(self._directory.name)) > MAX_SOCKET - 8:
            place = tempfile.gettempdir()
            raise ValueError(f"the directory for temporary files has too long a name ({place}): set TMPDIR")

    # Start and stop

    @property
    def loaded(self) -> bool:
        """Whether models can be loaded."""
        return self.residents is not None

    def load(self, loop: asyncio.AbstractEventLoop) -> None:
        """Find out how much memory there is. Blocks: call it in a thread. Raises: ValueError."""
        device, budget = self.options["device"], self.options["models_memory"]
        if device != "cpu" or budget is None:
            command = [sys.executable, "-P", "-c", ASK, device]
            asked = subprocess.run(command, capture_output=True, text=True, env=environment())
            if asked.returncode:
                raise ValueError(asked.stderr.strip().rpartition("\n")[2])
            device, free = asked.stdout.split()
            budget = budget or int(free)
        self._on_gpu = device == "cuda"
        keep_alive = KEEP_ALIVE if self.options["keep_alive"] is None else self.options["keep_alive"]
        self.residents = Residents([*self.models.values()], self._make_process, budget, keep_alive, not self._on_gpu)
        logger.info(f"{len(self.models)} models may take {budget / GIB:.2f} GiB together")

    def begin_draining(self) -> None:
        """End the requests that wait for a model, and load no more models."""
        if self.residents is not None:
            self.residents.drain()

    async def stop(self) -> None:
        """End the calls that still run with an error, then end the processes."""
        await self.calls.stop()
        if self.residents is not None:
            await self.residents.stop()

    def close(self) -> None:
        """Remove what is left once the server has stopped. The processes end with this one, however it ends."""
        self._directory.cleanup()

    def _make_process(self, model: Resident) -> ModelProcess:
        """The process of a model. Raises: FileNotFoundError."""
        hub.find(model.path)
        socket = f"{self._directory.name}/{next(self._numbers)}"
        names = {"model_tag": model.path, "served_model_name": [model.name], "uds": socket}
        options = self.options | IN_FRONT | names
        needed = self._estimate(model, options) if model.num_bytes is None else model.num_bytes
        return ModelProcess(model.name, [*COMMAND, model.name], options, self.key, needed)

    def _estimate(self, model: Resident, options: dict[str, Any]) -> int:
        """Bytes that a model is assumed to need before it has been loaded."""
        cache, weights = options["kv_cache_gib"], weight_bytes(model.path)
        if not self._on_gpu:  # the KV cache takes memory when it is written
            return weights + PROCESS_BYTES
        if cache is None or options["tensor_parallel_size"] * options["pipeline_parallel_size"] > 1:
            assert self.residents is not None
            return self.residents.budget  # the KV cache takes all that is left
        return weights + GPU_BYTES + int(cache * GIB)

    # Calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Raises: ApiError before anything has been sent."""
        method, path = scope["method"], scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        if path in POSTS if method == "POST" else (method, path) == ("GET", "/tokenizer_info"):
            await self._forward(method, path, scope, receive, send)
        elif path in ("/health", "/ping") and (method == "GET" or (method, path) == ("POST", "/ping")):
            self.state.check_open(self.loaded)
            states = [model.state for model in self.models.values()]
            counts = {state: states.count(state) for state in ("loaded", "loading", "unloaded")}
            await json_response(counts)(scope, receive, send)
        elif (method, path) == ("GET", "/metrics"):
            await (await self._metrics())(scope, receive, send)
        elif method == "GET" and path in ("/v1/models", "/v1/models/"):
            cards = [self._card(name) for name in self.models]
            ends = {"has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
            await json_response({"object": "list", "data": cards} | ends)(scope, receive, send)
        elif method == "GET" and path.startswith("/v1/models/"):
            name = self.state.model_name(path.removeprefix("/v1/models/"))
            await json_response(self._card(name))(scope, receive, send)
        else:
            await self.routes(scope, receive, send)

    async def _forward(self, method: str, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a call in the process of its model, unless the client goes away."""
        self.state.check_open(self.loaded)
        given, origins = Headers(scope=scope), self.options["allowed_origins"]
        if given.get("sec-fetch-site") == "cross-site" and "*" not in origins and given.get("origin") not in origins:
            raise ApiError(403, "a page of another site may not use the models", code="foreign_site")
        body, query = (await receive())["body"], scope["query_string"].decode("latin-1")
        if method == "GET":
            name, streams = urllib.parse.parse_qs(query).get("model", [None])[0], False
        else:
            name, streams = await _read_body(path, scope, body)
        if name is None and len(self.models) > 1:
            where = " as the query ?model=NAME" if method == "GET" else ""
            message = f"model is missing{where}: this server has {', '.join([*self.models][:100])}"
            raise ApiError(400, message, param="model", code="model_missing")
        model = self.models[self.state.model_name(name)]
        headers = [item for item in scope["headers"] if item[0] in (*HEADERS, *KEY_HEADERS)]
        reply = Reply(path, send, scope["nanopage.send"])
        await self.calls.run(self._answer(model, Call(method, path, headers, body), reply, streams), reply, receive)

    def _check_queue(self, model: Resident, num_bytes: int) -> None:
        """Raises: ApiError if too many requests wait until the model is loaded. Afterwards, its process counts."""
        num_tokens = (model.num_waiting_bytes + num_bytes) // 4
        too_many = num_tokens > self.state.max_queue_tokens or model.num_waiting >= self.state.max_queue
        if model.num_waiting and too_many:
            message = f"{model.num_waiting} requests wait for the model {model.name!r} already"
            raise ApiError(429, message, code="queue_full", retry_after=max(1, min(60, round(model.load_seconds))))

    async def _answer(self, model: Resident, call: Call, reply: Reply, streams: bool) -> None:
        """Wait for a model, and send its reply. Raises: ApiError."""
        assert self.residents is not None
        self._check_queue(model, len(call.body))
        comments = asyncio.create_task(_comment(reply) if streams else asyncio.sleep(0))
        try:
            async with self.residents.use(model, len(call.body)) as process:
                comments.cancel()
                await asyncio.wait((comments,))
                await process.forward(call, reply)
        finally:
            comments.cancel()

    def _card(self, name: str) -> dict:
        """A model's entry in /v1/models, with what its process said when it was last loaded."""
        model = self.models[name]
        known = model_card(ServerState([name], created=self.state.created), name)
        known |= {key: model.card[key] for key in ("max_model_len", "default_sampling_params") if key in model.card}
        return known | {"state": model.state, "error": None if model.error is None else str(model.error)}

    async def _metrics(self) -> Response:
        models, found = [*self.models.values()], []
        for kind, name, text, value_of in METRICS:
            family = kind(f"nanopage:{name}", text, labels=["model_name"])
            for model in models:
                family.add_metric([model.name], value_of(model))
            found.append(family)
        budget = 0 if self.residents is None else self.residents.budget
        found.append(GaugeMetricFamily("nanopage:models_memory_bytes", "The most that all models may take.", budget))
        pages = await asyncio.gather(
            *(_engine_metrics(model.name, model.process) for model in models if model.process and model.is_loaded)
        )
        engines = merge(pages)
        if (heard := engines.pop(HEARD, None)) is not None:
            self.state.transcribed_seconds = sum(sample.value for sample in heard.samples)
        return metrics_reply(self.state, [*found, *engines.values()])


def weight_bytes(path: str) -> int:
    """Bytes of a model's files of weights; 0 if they have not been fetched yet."""
    place = Path(os.path.expanduser(path))
    if not place.exists() and (stored := find_stored(path)) is not None:
        place = stored.directory
    return bytes_of_weights(place)


async def _read_body(path: str, scope: Scope, body: bytes) -> tuple[str | None, bool]:
    """The model that a body names, and whether the reply is to stream. Raises: ApiError."""
    if path in AUDIO_PATHS.values():
        try:
            form = await asyncio.to_thread(read_form, Headers(scope=scope), body)
        except ImportError as error:
            raise ApiError(404, f"{path} is not served: {error}", code="not_served") from None
        return form.get("model") or None, form.streams
    try:
        fields = msgspec.json.decode(body, type=_Fields)
    except (ValueError, RecursionError):
        read_json(body)  # raises what is wrong
        raise ApiError(400, "the body must be a JSON object with the content-type application/json") from None
    if not isinstance(fields.model, str | None):
        raise ApiError(400, "model: must be a string", param="model")
    return fields.model, fields.stream is True and path in TEXT_PATHS


class _Fields(msgspec.Struct):
    """What this server reads of a body."""

    model: Any = None
    stream: Any = None


async def _comment(reply: Reply) -> None:
    """Send comments while a model loads, so that proxies do not close the connection."""
    silence = PING if reply.path == "/v1/messages" else LOADING
    with contextlib.suppress(OSError):  # the connection has broken
        while True:
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            await reply.begin(200, STREAM)
            await reply.direct({"type": "http.response.body", "body": silence, "more_body": True})


async def _engine_metrics(name: str, process: ModelProcess) -> list[Metric]:
    """The metrics of a model's engine, under the model's name here."""
    try:
        text = (await process.get("/metrics")).text
    except httpx2.TransportError:  # the process has died
        return []
    found = [family for family in text_string_to_metric_families(text) if family.name.startswith(("vllm:", HEARD))]
    return relabel(found, {"model_name": name})
