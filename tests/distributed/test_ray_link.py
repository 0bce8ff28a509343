"""Workers as Ray actors: a model divided over two nodes, which share this machine. Takes seconds to start."""

import os
import queue
import signal
import socket
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener

import psutil
import pytest
from helpers import finish, random_tokens, tiny_model

import nanopage
from nanopage import EngineConfig, SamplingParams
from nanopage.build import build_engine

PARAMS = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture(scope="module")
def cluster():
    """Two nodes with a place for one actor each."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, configure_logging=False)
    yield ray
    ray.shutdown()
    cluster.shutdown()


def config(model, **options) -> EngineConfig:
    defaults = {"dtype": "float64", "device": "cpu", "max_model_len": 64, "num_gpu_blocks_override": 32}
    return EngineConfig(**defaults | {"model": str(model), "enforce_eager": True} | options)


def divided(model, **options):
    return build_engine(config(model, distributed_executor_backend="ray", **options))


def run(engine):
    for i, prompt in enumerate(random_tokens((5, 17))):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, PARAMS)
    return finish(engine)


def tokens(outputs):
    return [outputs[key].outputs[0].token_ids for key in "01"]


def process_of(ray, link) -> int:
    """The process of a worker's actor."""
    actor = link.actor._actor_id.hex()
    return next(state["Pid"] for state in ray._private.state.actors().values() if state["ActorID"] == actor)


def test_a_model_is_divided_over_two_nodes_and_a_killed_actor_ends_every_request(model, cluster):
    """Its place is free again."""
    expected = run(build_engine(config(model)))
    engine = divided(model, tensor_parallel_size=2)
    actors = {link.actor._actor_id.hex() for link in engine.executor.links}
    nodes = {
        actor["Address"]["NodeID"] for actor in cluster._private.state.actors().values() if actor["ActorID"] in actors
    }
    assert len(nodes) == 2
    assert tokens(run(engine)) == tokens(expected)
    victim = process_of(cluster, engine.executor.links[1])
    step, steps = engine.step, 0

    def killing_step():
        nonlocal steps
        steps += 1
        if steps == 4:
            os.kill(victim, signal.SIGKILL)
        return step()

    engine.step = killing_step
    outputs = run(engine)
    assert all("rank 1 of 2: its actor on " in output.error for output in outputs.values())
    again = divided(model, pipeline_parallel_size=2)  # needs both places
    assert tokens(run(again)) == tokens(expected)
    processes = [process_of(cluster, link) for link in again.executor.links]
    again.shutdown()
    psutil.wait_procs([psutil.Process(pid) for pid in processes if psutil.pid_exists(pid)], timeout=60)
    assert not any(psutil.pid_exists(pid) for pid in processes)


def test_too_small_a_cluster_is_refused_by_numbers(model, cluster):
    with pytest.raises(ValueError, match=r"has 2 CPUs, and tensor_parallel_size=2 times pipeline_parallel_size=2"):
        divided(model, tensor_parallel_size=2, pipeline_parallel_size=2)


def test_another_version_of_nanopage_is_refused(model, cluster, monkeypatch):
    theirs = nanopage.__version__
    monkeypatch.setattr(nanopage, "__version__", "0.0.1")
    with pytest.raises(ValueError, match=rf"rank 0 has nanopage {theirs} on .*, and the engine 0\.0\.1"):
        divided(model)


def test_an_error_at_start_names_the_rank(model, cluster):
    with pytest.raises(MemoryError, match="rank 0: kv_cache_gib"):
        divided(model, num_gpu_blocks_override=None, kv_cache_gib=1e6)


def test_strangers_do_not_keep_the_workers_from_connecting():
    """One hangs up, one keeps silent, one has another key."""
    from nanopage.distributed import ray_link  # imports Ray, which programs.py does not want before it is needed

    arrived, closed = queue.SimpleQueue(), threading.Event()
    with Listener(("127.0.0.1", 0)) as listener:
        threading.Thread(target=ray_link._accept, args=(listener, b"key", closed, arrived), daemon=True).start()
        socket.create_connection(listener.address).close()
        silent = socket.create_connection(listener.address)
        with pytest.raises(AuthenticationError):
            Client(listener.address, authkey=b"another")
        Client(listener.address, authkey=b"key").send_bytes(b"1")
        assert arrived.get(timeout=60).recv_bytes() == b"1" and arrived.empty()
        closed.set()
        silent.close()
