"""Front: the server's application in front of the replicas of one model on Ray Serve (`nanopage serve --replicas`).

    client -- Front (one process) -- Ray Serve -- Replica (a process, an engine) ... Replica

Like the application of a server with one engine, Front is behind Gate, which checks keys, hosts and bodies. Front hands
each call that needs the model, unchanged, to a replica (replica.py). The replica's reply comes back as a stream. Front
uses `Router` to choose the replica of a call (route.py). Ray Serve starts replicas, checks their health, replaces dead
replicas, and changes their number.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import ray
from fastapi import FastAPI
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from ray import serve
from ray.exceptions import ActorDiedError, ObjectLostError, RayActorError
from ray.serve.config import ProxyLocation
from ray.serve.exceptions import DeploymentUnavailableError, RequestCancelledError
from ray.serve.schema import LoggingConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanopage.distributed import ray_cluster
from nanopage.server.app import create_routes
from nanopage.server.errors import ApiError, internal_error
from nanopage.server.metrics import merge, metrics_reply
from nanopage.server.middleware import AUDIO_PATHS
from nanopage.server.relay import ENGINE_DEAD, ERROR, HEADERS, POSTS, TEXT_PATHS, Call, Calls, Reply
from nanopage.server.replica import CANNOT_START, FrontAlive, Replica, Settings
from nanopage.server.route import ReplicaRouter, Route, num_output_tokens, prompt_parts
from nanopage.server.routing import Router
from nanopage.server.state import ServerState

logger = logging.getLogger("nanopage")

GETS = ("/v1/models", "/tokenizer_info")  # and paths that begin with them
MAX_CALLS = 100_000  # at once in a replica, for Ray Serve: the replica's own limits decide
SECONDS_TO_STOP = 5.0  # for replicas without calls to stop
HEALTH_SECONDS = 2.0  # between Ray Serve's checks of a replica
MAX_ATTEMPTS = 3  # at a call whose replicas die: the call may be what kills them
REPLICA = "Replica"  # the deployment's name
LOGGING = LoggingConfig(log_level="WARNING", enable_access_log=False)


class ReplicaGoneError(Exception):
    """The replica of a call has died, or cannot go on."""


def resources_of_replica(most: int, device: str, num_workers: int) -> dict[str, float]:
    """The CPUs and GPUs of each replica: one GPU for each worker if the cluster has GPUs, else an equal share of a
    node's cores. Ray limits the threads of a replica to its CPUs.

    Args:
        most: the largest number of replicas.
        device: the device of their engines, as in EngineConfig.
        num_workers: the number of workers of each engine.
    """
    if device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0):
        return {"num_cpus": 1, "num_gpus": num_workers}
    cpus = [node["Resources"]["CPU"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")] or [1]
    return {"num_cpus": max(1, min(cpus) // math.ceil(most / len(cpus)))}


@dataclass(eq=False)
class Front:
    """The server's application in front of the replicas. It also starts and stops them."""

    state: ServerState  # of the server, without an engine
    settings: Settings  # for each replica
    num_replicas: int  # with `max_replicas`: the smallest number
    max_replicas: int | None  # start at most this many replicas as they are needed, and stop them when they are idle
    target_ongoing_requests: float  # with `max_replicas`: about how many calls each replica should have
    actor_options: dict[str, Any]  # CPUs and GPUs of a replica
    seconds_to_stop: float  # for the running calls of a replica that is no longer needed

    sockets_per_call: ClassVar[int] = 1

    def __post_init__(self) -> None:
        self.routes: FastAPI = create_routes(self.state)
        self.name = f"nanopage-{self.state.created}-{id(self):x}"
        self.calls = Calls(self.state)
        self.router = Router()
        self.dead: set[str] = set()
        self.num_retried = 0
        self.num_lost = 0
        self._handle: Any = None
        self._request_router: ReplicaRouter | None = None

    # Start and stop

    @property
    def loaded(self) -> bool:
        return self._request_router is not None

    def load(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the replicas, and wait until all can answer. Blocks: call it in a thread.

        Args: loop: the event loop that calls Front.
        Raises: RuntimeError saying why a replica could not start.
        """
        scaling: dict[str, Any] = {"num_replicas": self.num_replicas}
        if self.max_replicas is not None:
            limits = {"min_replicas": self.num_replicas, "max_replicas": self.max_replicas}
            scaling = {"autoscaling_config": limits | {"target_ongoing_requests": self.target_ongoing_requests}}
        deployment = serve.deployment(
            name=REPLICA,
            **scaling,
            ray_actor_options=self.actor_options,
            max_ongoing_requests=MAX_CALLS,
            graceful_shutdown_timeout_s=self.seconds_to_stop,
            graceful_shutdown_wait_loop_s=0.1,
            health_check_period_s=HEALTH_SECONDS,
            max_constructor_retry_count=1,  # until a replica has started; from then on, Ray Serve never gives up
            logging_config=LOGGING,
            request_router_config={"request_router_class": f"{__name__}.{ReplicaRouter.__name__}"},
        )(Replica)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location=ProxyLocation.Disabled, logging_config=LOGGING)
        if not ray_cluster.is_local():
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            self.settings.front = ray.remote(FrontAlive).options(num_cpus=0, scheduling_strategy=here).remote()
        try:
            serve.run(deployment.bind(self.settings), name=self.name, route_prefix=None)
        except RuntimeError as error:
            raise RuntimeError(self._why_not_started() or str(error)) from None
        asyncio.run_coroutine_threadsafe(self._open(), loop).result()

    def _why_not_started(self) -> str:
        """What Ray Serve says of the replicas that did not start, with only the last line of a traceback."""
        application = serve.status().applications.get(self.name)
        if application is None or REPLICA not in application.deployments:
            return ""
        return application.deployments[REPLICA].message.rpartition(CANNOT_START)[2].strip()

    async def _open(self) -> None:
        handle = serve.get_app_handle(self.name)
        handle._init(_run_router_in_separate_loop=False)  # a separate thread for the router would only be in the way
        self._handle = handle
        route = Route(self.router, [], 0, self.dead)
        async for _ in self._send(Call("GET", "/v1/models", [], b"", route=route)):
            pass
        self._request_router = route.request_router
        answers = await handle.broadcast("sees_images").results_async(timeout_s=5, return_exceptions=True)
        self.state.takes_images = True in answers

    def begin_draining(self) -> None:
        """Nothing waits here."""

    async def stop(self) -> None:
        """End the calls that still run with an error, then end the replicas. Ray ends hung replicas."""
        await self.calls.stop()
        with contextlib.suppress(Exception):  # the cluster may be gone
            await asyncio.wait_for(asyncio.to_thread(serve.delete, self.name, _blocking=False), SECONDS_TO_STOP)
            async with asyncio.timeout(SECONDS_TO_STOP):
                while self.name in (await asyncio.to_thread(serve.status)).applications:
                    await asyncio.sleep(0.1)

    def close(self) -> None:
        """Leave the cluster, once the server has stopped. If this process has started the cluster, it ends."""
        ray.shutdown()

    # Calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Raises: ApiError before anything has been sent."""
        method, path = scope["method"], scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        if path in POSTS if method == "POST" else method == "GET" and path.startswith(GETS):
            await self._forward(method, path, scope, receive, send)
        elif path in ("/health", "/ping") and (method == "GET" or (method, path) == ("POST", "/ping")):
            self._check_open()
            await Response()(scope, receive, send)
        elif (method, path) == ("GET", "/metrics"):
            await (await self._metrics())(scope, receive, send)
        else:
            await self.routes(scope, receive, send)

    def _check_open(self) -> None:
        """Raises: ApiError if no call can run."""
        self.state.check_open(self.loaded)
        assert self._request_router is not None
        if not self._running() - self.dead:
            raise ApiError(503, "no replica is running: new ones are starting", code="no_replica", retry_after=10)

    def _running(self) -> set[str]:
        assert self._request_router is not None
        return {replica_id.unique_id for replica_id in self._request_router.curr_replicas}

    async def _forward(self, method: str, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a call on a replica, unless the client goes away."""
        self._check_open()
        body = (await receive())["body"]
        parts: list[bytes] = []
        num_prompt = num_tokens = 0
        if path in TEXT_PATHS:
            with contextlib.suppress(ValueError, RecursionError):  # the replica says what is wrong
                fields = msgspec.json.decode(body)
                if isinstance(fields, dict):
                    parts, num_prompt = prompt_parts(fields, scope["nanopage.key"] if self.state.salt_per_key else "")
                    num_tokens = num_prompt + num_output_tokens(fields)
        route = Route(self.router, parts, num_tokens, self.dead, num_prompt)
        headers = [(name, value) for name, value in scope["headers"] if name in HEADERS]
        call = Call(method, path, headers, body, scope["nanopage.key"], route)
        reply = Reply(path, send, scope["nanopage.send"])
        await self.calls.run(self._relay(call, reply), reply, receive, path in (*TEXT_PATHS, *AUDIO_PATHS.values()))

    async def _relay(self, call: Call, reply: Reply) -> None:
        """Send a replica's reply to the client. If the replica dies before the client has any of the answer, run the
        call on another replica. Raises: ApiError."""
        assert call.route is not None
        num_attempts = 1
        try:
            while True:
                try:
                    await self._attempt(call, reply)
                    return
                except ReplicaGoneError as error:
                    if reply.complete:
                        return
                    lost = None
                    if reply.num_events:
                        lost = ApiError(503, "the replica that ran the request has died", code="replica_died")
                    elif num_attempts == MAX_ATTEMPTS:
                        lost = ApiError(503, f"{num_attempts} replicas that had it have died", code="replica_died")
                    elif not self._running() - self.dead - call.route.exclude:
                        lost = ApiError(503, "no replica is left", code="no_replica", retry_after=10)
                    if lost is not None:
                        self.num_lost += 1
                        logger.warning(f"{call.path}: lost, for {error}")
                        raise lost from None
                    self.num_retried += 1
                    num_attempts += 1
                    logger.warning(f"{call.path}: trying another replica, for {error}")
        finally:
            self.num_retried += max(0, call.route.num_choices - num_attempts)  # attempts by Ray Serve itself
            call.route.end()

    async def _attempt(self, call: Call, reply: Reply) -> None:
        """Run a call on one replica. Raises: ReplicaGoneError, ApiError."""
        assert call.route is not None
        head: tuple[int, list[tuple[bytes, bytes]]] | None = None
        streams, parts = False, []
        async with contextlib.aclosing(self._send(call)) as items:
            async for item in items:
                if head is None:
                    head = item
                    streams = dict(head[1]).get(b"content-type", b"").startswith(b"text/event-stream")
                    if head[0] == 503 and call.route.replica is not None:
                        call.route.exclude.add(call.route.replica)
                        raise ReplicaGoneError(f"{call.route.replica} cannot go on")
                    if reply.begun and not streams:
                        raise ApiError(503, "the replica that ran the request has died", code="replica_died")
                    if streams:
                        await reply.begin(*head)
                elif not streams:
                    parts.append(item)
                elif item.startswith(ERROR) and ENGINE_DEAD in item:
                    assert call.route.replica is not None
                    call.route.exclude.add(call.route.replica)
                    raise ReplicaGoneError(f"the engine of {call.route.replica} has died")
                else:
                    call.route.advance(await reply.send_events(item))
        if head is None or (streams and not reply.complete):
            raise internal_error()
        if not streams:
            await reply.send_whole(*head, b"".join(parts))

    async def _send(self, call: Call) -> AsyncGenerator[Any, None]:
        """What a replica yields. Leaving the iterator cancels the call there. Raises: ReplicaGoneError, ApiError."""
        assert call.route is not None
        response = self._handle.options(stream=True).call.remote(call)
        ended = False
        try:
            async for item in response:
                yield item
            ended = True
        except (RayActorError, ObjectLostError) as error:
            ended, name = True, call.route.replica
            if name is not None:
                (self.dead if isinstance(error, ActorDiedError) else call.route.exclude).add(name)
            raise ReplicaGoneError(f"{name} has died ({type(error).__name__})") from None
        except DeploymentUnavailableError:
            ended = True
            raise ApiError(503, "no replica can be started: the log says why", code="no_replica") from None
        except RequestCancelledError:
            raise asyncio.CancelledError from None
        finally:
            if not ended:
                response.cancel()

    async def _metrics(self) -> Response:
        num_running = len(self._running() - self.dead) if self.loaded else 0
        found: list[Metric] = [
            GaugeMetricFamily("nanopage:replicas_running", "Replicas that take calls.", num_running),
            CounterMetricFamily("nanopage:replica_retries", "Calls run again by another replica.", self.num_retried),
            CounterMetricFamily("nanopage:replica_losses", "Calls lost with a replica.", self.num_lost),
        ]
        pages: list[list[Metric]] = []
        if self.loaded and self._running():
            results = await self._handle.broadcast("metrics").results_async(timeout_s=5, return_exceptions=True)
            pages = [result for result in results if isinstance(result, list)]
        return metrics_reply(self.state, [*found, *merge(pages).values()])
