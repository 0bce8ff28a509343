"""The Ray cluster of the replicas: the one that RAY_ADDRESS names, or one on this machine that ends with the server.

Whoever can reach Ray's ports can run code in the cluster. A cluster that is started here listens on 127.0.0.1 where Ray
lets it, and takes only what comes with a token that this process has drawn. Ray reads these settings from the
environment, once, when it is imported or first used, so nothing may import Ray before `connect`.
"""

import logging
import math
import os
import secrets

from nanopage.worker.threads import default_threads

LOCAL = "local"


def is_local() -> bool:
    """Whether `connect` will start a cluster on this machine."""
    return os.environ.get("RAY_ADDRESS", LOCAL) in ("", LOCAL)


def check_address() -> None:
    """Raises: ValueError if RAY_ADDRESS is one that replicas cannot be reached through."""
    if (address := os.environ.get("RAY_ADDRESS", "")).startswith("ray://"):
        raise ValueError(
            f"RAY_ADDRESS={address}: Ray Client does not stream. Run nanopage serve on a node of the cluster"
        )


def connect(most: int, device: str) -> dict[str, float]:
    """Connect this process to the cluster. Returns the CPUs and GPUs of each replica: a GPU if there are any, else an
    equal share of the cores of a node. Ray limits the threads of a replica to its CPUs.

    Ray ends what it starts for a local cluster when the thread that has started it ends, even if it is killed. So call
    this from the main thread, and before uvicorn installs its signal handlers, because Ray installs one for SIGTERM.

    Args:
        most: the largest number of replicas.
        device: of their engines, as in EngineConfig.

    Raises:
        ConnectionError: there is no cluster at RAY_ADDRESS.
        ImportError: Ray is not installed.
    """
    os.environ["RAY_DEDUP_LOGS"] = "0"  # the log has a line for each call
    if is_local():
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_SERVE_LOG_TO_STDERR"] = "0"  # Ray's logs are in files; the server says what matters
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # the node's address is then 127.0.0.1, on Linux as well
    import ray

    logging.getLogger("ray").setLevel(logging.WARNING)
    if is_local():
        ray.init(LOCAL, num_cpus=max(default_threads(), most), include_dashboard=False, configure_logging=False)
    else:
        ray.init(configure_logging=False)
    if device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0):
        return {"num_cpus": 1, "num_gpus": 1}
    cpus = [node["Resources"]["CPU"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")] or [1]
    return {"num_cpus": max(1, min(cpus) // math.ceil(most / len(cpus)))}
