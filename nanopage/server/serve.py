"""`nanopage serve`: options, start and end of the server."""

import argparse
import asyncio
import gc
import logging
import math
import os
import ssl
import sys
import threading
import time
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from nanopage.async_llm import AsyncLLM
from nanopage.engine_args import EngineArgs, FlexibleArgumentParser
from nanopage.server.app import ServerState, changed_defaults, create_app
from nanopage.server.connection import Connection
from nanopage.server.middleware import LOCAL_HOSTS

if TYPE_CHECKING:
    from nanopage.server.tracing import Tracer

logger = logging.getLogger("nanopage")

PUBLIC = ("0.0.0.0", "::", "")
SECONDS_TO_CLOSE = 5  # for clients to read what they have been sent, and for a step to end, at shutdown


def main(arguments: list[str]) -> int:
    """Run the server until a signal, or a model that cannot be loaded, ends it. Returns the program's exit code."""
    args = parser().parse_args(arguments)
    args.model = args.model_tag if args.model is None else args.model
    given = args.api_key or os.environ.get("NANOPAGE_API_KEY", "").split(",")
    keys = [key.strip() for key in given]
    if args.api_key and not all(keys):
        raise ValueError("--api-key is empty")
    keys = [key for key in keys if key]
    if bool(args.ssl_keyfile) != bool(args.ssl_certfile):
        raise ValueError("--ssl-keyfile and --ssl-certfile need each other")
    if args.salt_per_key and not keys:
        raise ValueError("--salt-per-key needs --api-key")
    if args.uds is None and args.host not in ("localhost", "127.0.0.1", "::1") and not keys and not args.insecure:
        raise ValueError(
            f"--host {args.host}: anyone who reaches this address could use the server. Give --api-key, or --insecure "
            "if something else protects it"
        )
    engine_args = EngineArgs.from_cli_args(args)
    names = args.served_model_name or [default_name(args.model)]
    limits = args.max_queue, args.max_queue_tokens, args.stall_timeout
    state = ServerState(names, *limits, args.strict_fields, args.salt_per_key, _tracer(args.otlp_traces_endpoint))
    hosts = [] if args.uds or args.insecure else [*LOCAL_HOSTS, *map(str.lower, args.allowed_host)]
    config = uvicorn.Config(
        create_app(state, keys, hosts, args.public_metrics),
        host=args.host,
        port=args.port,
        uds=args.uds,
        root_path=args.root_path,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=args.timeout_keep_alive,
        timeout_graceful_shutdown=SECONDS_TO_CLOSE,
        http=Connection,
        lifespan="off",
    )
    server = Server(config, state, engine_args, args.shutdown_timeout)
    server.run()
    if state.tracer is not None:
        state.tracer.shutdown()
    code = 0 if state.error is None else 1
    if server.is_busy():  # loading, or in a step that hangs: the thread must not run torch while Python ends
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def parser() -> argparse.ArgumentParser:
    """The options: the server's, then the engine's. Names are those of `vllm serve` where it has the option."""
    parser = FlexibleArgumentParser(
        prog="nanopage serve", description="Serve a model to clients of OpenAI's API.", allow_abbrev=False
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument("--port", type=_port, default=8000, help="0 takes a free port (default: %(default)s)")
    group.add_argument("--uds", help="listen on a Unix socket with this path instead")
    group.add_argument(
        "--api-key", action="append", help="key that clients must send; can be repeated (or NANOPAGE_API_KEY)"
    )
    group.add_argument("--served-model-name", nargs="+", help="names of the model for clients")
    group.add_argument("--root-path", default="", help="prefix that a reverse proxy takes off all paths")
    group.add_argument("--allowed-host", action="append", default=[], help="Host header to answer besides localhost")
    group.add_argument("--insecure", action="store_true", help="listen on any address without a key, under any name")
    group.add_argument("--ssl-keyfile")
    group.add_argument("--ssl-certfile")
    group.add_argument("--ssl-ca-certs", help="authorities of clients' certificates")
    group.add_argument("--ssl-cert-reqs", type=int, default=int(ssl.CERT_NONE), choices=(0, 1, 2))
    group.add_argument(
        "--max-queue", type=_positive, default=1024, help="most requests that wait (default: %(default)s)"
    )
    group.add_argument(
        "--max-queue-tokens",
        type=_positive,
        default=1_000_000,
        help="most prompt tokens that wait (default: %(default)s)",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=_seconds,
        default=30,
        help="seconds for running requests to end (default: %(default)s)",
    )
    group.add_argument(
        "--stall-timeout",
        type=_seconds,
        default=120,
        help="/health is 503 when no step has ended for so many seconds (default: %(default)s)",
    )
    group.add_argument("--timeout-keep-alive", type=int, default=5, help="seconds that an idle connection stays open")
    group.add_argument("--strict-fields", action="store_true", help="refuse fields that are not known")
    group.add_argument("--public-metrics", action="store_true", help="/metrics needs no key")
    group.add_argument(
        "--salt-per-key", action="store_true", help="keep the cached prefixes of clients with different keys apart"
    )
    group.add_argument(
        "--otlp-traces-endpoint", metavar="URL", help="send OpenTelemetry traces there, by OTLP over HTTP (extra otel)"
    )
    EngineArgs.add_cli_args(parser.add_argument_group("engine (see EngineConfig)"))
    return parser


def _tracer(url: str | None) -> "Tracer | None":
    if url is None:
        return None
    try:
        from nanopage.server.tracing import Tracer
    except ImportError as error:
        raise ValueError(f"--otlp-traces-endpoint: {error}; pip install 'nanopage[otel]'") from None
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(f"--otlp-traces-endpoint {url}: not a URL such as http://localhost:4318/v1/traces")
    return Tracer.to_endpoint(url)


def _port(text: str) -> int:
    if not 0 <= int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 65535")
    return int(text)


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return int(text)


def _seconds(text: str) -> float:
    if not 0 <= float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return float(text)


def default_name(model: str | None) -> str:
    """What clients call the model: what `--model` says, without directories."""
    if model is None:
        return "SmolLM2-135M-Instruct"
    return Path(model).resolve().name if Path(model).exists() else model


class Server(uvicorn.Server):
    """uvicorn, which loads the model once it listens, and lets running requests end.

    The first SIGTERM or SIGINT makes /health 503 and refuses new requests. When all others have ended, or after
    `shutdown_timeout` seconds, the server stops. A second signal, or the first while the model loads, stops it without
    this wait.
    """

    def __init__(self, config: uvicorn.Config, state: ServerState, engine_args: EngineArgs, shutdown_timeout: float):
        super().__init__(config)
        self.state, self.engine_args, self.shutdown_timeout = state, engine_args, shutdown_timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loader = threading.Thread(target=self._load, name="nanopage-loader", daemon=True)
        self._draining: asyncio.Task | None = None

    async def startup(self, sockets: list | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._loop = asyncio.get_running_loop()
            self._loader.start()

    async def shutdown(self, sockets: list | None = None) -> None:
        if self.state.llm is not None:
            await asyncio.to_thread(self.state.llm.shutdown, SECONDS_TO_CLOSE)
        await super().shutdown(sockets)

    def is_busy(self) -> bool:
        """Whether a thread still loads the model or runs a step."""
        llm = self.state.llm
        return self._loader.is_alive() or (llm is not None and not llm.shutdown(0))

    def _load(self) -> None:
        try:
            self.state.llm = AsyncLLM.from_engine_args(self.engine_args)
            if changed := changed_defaults(self.state.llm):
                logger.info(f"requests without these parameters get those of generation_config.json: {changed}")
            gc.collect()
            gc.freeze()  # so that no later collection visits all that has been imported and loaded
            print(self._ready_line(), flush=True)
        except BaseException as error:  # what tokenizers raises when Rust panics is not an Exception
            self.state.error = str(error) or type(error).__name__
            print(f"nanopage: {self.state.error}", file=sys.stderr)
            self.should_exit = True

    def handle_exit(self, sig: int, frame: object) -> None:
        if self.state.draining or self._loop is None or self.state.llm is None:
            self.force_exit = self.state.draining
            self.should_exit = True
            return
        self.state.draining = True
        self._loop.call_soon_threadsafe(self._begin_draining)

    def _begin_draining(self) -> None:
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        """Wait for the running requests, then stop. `shutdown` ends those that are left with an error."""
        logger.info(f"shutting down: {self.state.num_active} requests have {self.shutdown_timeout:g} s to end")
        deadline = time.monotonic() + self.shutdown_timeout
        while self.state.num_active and not self.should_exit and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self.should_exit = True

    def _ready_line(self) -> str:
        name, uds = self.state.model_names[0], self.config.uds
        scheme = "https" if self.config.ssl_certfile else "http"
        if uds:
            url, curl = "http://localhost", f"curl --unix-socket {uds}"
        else:
            port = next(s.getsockname()[1] for server in self.servers for s in server.sockets)
            host = "127.0.0.1" if self.config.host in PUBLIC else self.config.host
            url, curl = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}", "curl"
        body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
        return (
            f"ready: {url}/v1 serves {name}. Try: {curl} {url}/v1/chat/completions "
            f"-H 'Content-Type: application/json' -d '{body}'"
        )
