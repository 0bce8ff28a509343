"""Workers as actors of a Ray cluster, on any of its nodes. ProcessExecutor does everything except starting them.

Ray places the actors and reports how they end. Messages go over connections that the actors open to the engine. Tensors
go through torch.distributed, whose workers meet at the first worker.
"""

import contextlib
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

import psutil
import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import nanopage
from nanopage.config.options import EngineConfig
from nanopage.cpu.threads import default_threads
from nanopage.distributed.process_executor import Link
from nanopage.step import WorkerDiedError

PLACE_SECONDS = 60.0  # time for the cluster to find room
CONNECT_SECONDS = 120.0  # time for an actor's process to start and connect
Serve = Callable[[Connection], None]  # runs a worker until it is told to stop: `worker_process.serve`


class RayWorker:
    """The process of a worker."""

    def place(self) -> tuple[str, str]:
        """The address of the node, and the version of nanopage there."""
        return get_node_ip_address(), nanopage.__version__

    def meeting_place(self) -> str:
        """An address on this node at which the workers can meet, as torch.distributed's `init_method`."""
        ip = get_node_ip_address()
        with Listener((ip, 0)) as free:
            return f"tcp://{ip}:{free.address[1]}"

    def work(self, serve: Serve, address: tuple[str, int], key: bytes, rank: int, num_on_node: int) -> None:
        """Connect to the engine, and work for it until it ends.

        Args: num_on_node: how many workers share this node's CPUs.
        """
        ip = get_node_ip_address()
        for interface, addresses in psutil.net_if_addrs().items():
            if any(known.address == ip for known in addresses):
                os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
        if os.environ.get("OMP_NUM_THREADS") == "1":  # Ray sets it to the actor's CPUs
            torch.set_num_threads(max(1, default_threads() // num_on_node))
        connection = Client(address, authkey=key)
        connection.send_bytes(str(rank).encode())
        serve(connection)


class RayLink:
    """A worker that is an actor. See `process_executor.Link`."""

    local_rank = 0  # Ray shows an actor only its own GPUs

    def __init__(self, connection: Connection, actor: Any, serving: ray.ObjectRef, node: str, group: PlacementGroup):
        self.connection, self.actor, self.serving, self.node, self.group = connection, actor, serving, node, group

    def ended(self) -> str | None:
        ready, _ = ray.wait([self.serving], timeout=0)
        if not ready:
            return None
        return f"its actor on {self.node} has ended{_why(self.serving)}"

    def kill(self) -> None:
        ray.kill(self.actor)
        remove_placement_group(self.group)  # one call ends all workers; further calls do nothing


def start_actors(serve: Serve, config: EngineConfig, scratch: str) -> tuple[list[Link], str]:
    """Start the workers of an engine as actors. Other arguments and results: as `process_executor.start_processes`.

    Raises: ValueError if the cluster has too few CPUs or GPUs, or a node has another version of nanopage;
        WorkerDiedError if an actor does not start.
    """
    resources = ray.cluster_resources()
    on_gpus = config.device == "cuda" or (config.device == "auto" and resources.get("GPU", 0) > 0)
    count, kinds = config.num_ranks, ["CPU", "GPU"] if on_gpus else ["CPU"]
    for kind in kinds:
        if resources.get(kind, 0) < count:
            raise ValueError(
                f"the Ray cluster has {resources.get(kind, 0):g} {kind}s, and tensor_parallel_size="
                f"{config.tensor_parallel_size} times pipeline_parallel_size={config.pipeline_parallel_size} workers "
                f"need {count}"
            )
    group = placement_group([dict.fromkeys(kinds, 1)] * count, strategy="PACK")
    try:
        if not group.wait(PLACE_SECONDS):
            wanted = " and ".join(f"{count} {kind}s" for kind in kinds)
            raise ValueError(f"the Ray cluster did not have {wanted} free within {PLACE_SECONDS:.0f} s")
        return _connect(serve, group, count, on_gpus)
    except BaseException:
        remove_placement_group(group)  # ends the actors as well
        raise


def _connect(serve: Serve, group: PlacementGroup, count: int, on_gpus: bool) -> tuple[list[Link], str]:
    actor_class: Any = ray.remote(RayWorker)
    actors = [
        actor_class.options(
            num_cpus=1,
            num_gpus=int(on_gpus),
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        ).remote()
        for rank in range(count)
    ]
    try:
        places = ray.get([actor.place.remote() for actor in actors], timeout=CONNECT_SECONDS)
        meeting = ray.get(actors[0].meeting_place.remote(), timeout=CONNECT_SECONDS)
    except (RayActorError, GetTimeoutError) as error:
        raise WorkerDiedError(f"a worker has not started: {error}") from None
    for rank, (node, version) in enumerate(places):
        if version != nanopage.__version__:
            raise ValueError(f"rank {rank} has nanopage {version} on {node}, and the engine {nanopage.__version__}")
    key, connections = secrets.token_bytes(32), dict[int, Connection]()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(Listener((get_node_ip_address(), 0), backlog=count))
        arrived: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        closed = threading.Event()
        stack.callback(closed.set)  # before the listener is closed
        threading.Thread(target=_accept, args=(listener, key, closed, arrived), daemon=True).start()
        nodes = [node for node, _ in places]
        serving = [
            actor.work.remote(serve, listener.address, key, rank, nodes.count(nodes[rank]))
            for rank, actor in enumerate(actors)
        ]
        deadline = time.monotonic() + CONNECT_SECONDS
        while len(connections) < count:
            try:
                connection = arrived.get(timeout=0.2)
                connections[int(connection.recv_bytes())] = connection
            except queue.Empty:
                ended, _ = ray.wait(serving, num_returns=count, timeout=0)
                missing = [rank for rank in range(count) if rank not in connections]
                if ended or time.monotonic() > deadline:
                    why = _why(ended[0]) if ended else ""
                    raise WorkerDiedError(f"rank {missing[0]} has not connected to the engine{why}") from None
    links: list[Link] = [
        RayLink(connections[rank], actors[rank], serving[rank], places[rank][0], group) for rank in range(count)
    ]
    return links, meeting


def _accept(listener: Listener, key: bytes, closed: threading.Event, arrived: "queue.SimpleQueue[Connection]") -> None:
    while not closed.is_set():
        with contextlib.suppress(OSError, EOFError):  # the listener is closed, or a client hung up
            threading.Thread(target=_check_key, args=(listener.accept(), key, arrived), daemon=True).start()


def _check_key(connection: Connection, key: bytes, arrived: "queue.SimpleQueue[Connection]") -> None:
    """Runs in a thread, because a client without the key may send nothing."""
    try:
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
    except (OSError, EOFError, AuthenticationError):
        connection.close()
    else:
        arrived.put(connection)


def _why(serving: ray.ObjectRef) -> str:
    """How an actor has ended, as the end of a sentence."""
    try:
        ray.get(serving)
    except RayActorError as error:
        text = " ".join(str(error).split())
        return ", killed by SIGKILL" if "SIGKILL" in text else f": {text[:300]}"
    except Exception as error:
        return f": {type(error).__name__}: {error}"
    return ""
