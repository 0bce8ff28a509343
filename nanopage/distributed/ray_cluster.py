"""The Ray cluster of this process: the one that RAY_ADDRESS names, or one on this machine that ends with the process.

Whoever can reach Ray's ports can run code in the cluster. A cluster that is started here listens on 127.0.0.1 where Ray
permits, and accepts only calls with a random token of this process. Ray reads these settings from the environment
once, when it is imported or first used, so nothing may import Ray before `connect`.
"""

import logging
import os
import secrets
import threading
from typing import Any

LOCAL = "local"


def is_local() -> bool:
    """Whether `connect` starts a cluster on this machine."""
    return os.environ.get("RAY_ADDRESS", LOCAL) in ("", LOCAL)


def check_address() -> None:
    """Raises: ValueError if RAY_ADDRESS is an address of Ray Client, which carries neither streams nor the connections
    of workers."""
    if (address := os.environ.get("RAY_ADDRESS", "")).startswith("ray://"):
        raise ValueError(f"RAY_ADDRESS={address}: Ray Client is not supported. Run nanopage on a node of the cluster")


def connect(num_cpus: int) -> None:
    """Connect this process to the cluster, unless it is connected.

    Call this before uvicorn installs its signal handlers, because Ray installs one for SIGTERM.

    Args: num_cpus: the number of CPUs of a cluster that is started here. Ray's CPUs are places for actors, not cores.
    Raises: ConnectionError if there is no cluster at RAY_ADDRESS; ImportError if Ray is not installed; ValueError as
        `check_address`.
    """
    check_address()
    os.environ["RAY_DEDUP_LOGS"] = "0"  # the log has a line for each call
    if is_local():
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_SERVE_LOG_TO_STDERR"] = "0"  # Ray's logs are in files; nanopage says what matters
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # the node's address is then 127.0.0.1, on Linux as well
    import ray

    if ray.is_initialized():
        return
    logging.getLogger("ray").setLevel(logging.WARNING)
    if not is_local():
        ray.init(configure_logging=False)
        return
    options: dict[str, Any] = {"num_cpus": num_cpus, "include_dashboard": False, "configure_logging": False}
    # The processes that Ray starts end with the thread that has started them, even if this process is killed. So that
    # thread must live on.
    if threading.current_thread() is threading.main_thread():
        ray.init(LOCAL, **options)
        return
    problem: Exception | None = None
    started = threading.Event()

    def start() -> None:
        nonlocal problem
        try:
            logging.getLogger("ray").setLevel(logging.ERROR)  # it warns that it handles no signals here
            ray.init(LOCAL, **options)
        except Exception as error:
            problem = error
        started.set()
        threading.Event().wait()

    threading.Thread(target=start, daemon=True, name="nanopage-ray").start()
    started.wait()
    if problem is not None:
        raise problem
