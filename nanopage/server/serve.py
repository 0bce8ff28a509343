"""`nanopage serve`: options, start and end of the server."""

import argparse
import asyncio
import contextlib
import logging
import os
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from nanopage.async_llm import AsyncLLM
from nanopage.engine_args import EngineArgs, FlexibleArgumentParser
from nanopage.server.app import ServerState, create_app
from nanopage.server.middleware import LOCAL_HOSTS

logger = logging.getLogger("nanopage")

PUBLIC = ("0.0.0.0", "::", "")


def main(arguments: list[str]) -> int:
    """Run the server until a signal ends it. Returns the program's exit code."""
    args = parser().parse_args(arguments)
    args.model = args.model_tag if args.model is None else args.model
    keys = args.api_key or [key for key in os.environ.get("NANOPAGE_API_KEY", "").split(",") if key]
    if args.uds is None and args.host not in ("localhost", "127.0.0.1", "::1") and not keys and not args.insecure:
        raise ValueError(
            f"--host {args.host}: anyone who reaches this address could use the server. Give --api-key, or --insecure "
            "if something else protects it"
        )
    engine_args = EngineArgs.from_cli_args(args)
    names = args.served_model_name or [default_name(args.model)]
    state = ServerState(names, args.max_queue, args.max_queue_tokens, args.stall_timeout, args.strict_fields)
    hosts = [] if args.uds else [*LOCAL_HOSTS, *args.allowed_host]
    server: Server

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.create_task(server.load(engine_args))
        yield
        loading.cancel()
        if state.llm is not None:
            await asyncio.to_thread(state.llm.shutdown)

    app = create_app(state, keys, [] if args.insecure else hosts, args.root_path, lifespan)
    config = uvicorn.Config(
        app,
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
        h11_max_incomplete_event_size=64 << 10,
    )
    server = Server(config, state, args.shutdown_timeout)
    server.run()
    return 1 if state.error else 0


def parser() -> argparse.ArgumentParser:
    """The options: the server's, then the engine's. Names are those of `vllm serve`."""
    parser = FlexibleArgumentParser(
        prog="nanopage serve", description="Serve a model to clients of OpenAI's API.", allow_abbrev=False
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="0 takes a free port (default: %(default)s)")
    group.add_argument("--uds", help="listen on a Unix socket with this path instead")
    group.add_argument(
        "--api-key", action="append", help="key that clients must send; can be repeated (or NANOPAGE_API_KEY)"
    )
    group.add_argument("--served-model-name", nargs="+", help="names of the model for clients")
    group.add_argument("--root-path", default="", help="prefix of all paths behind a reverse proxy")
    group.add_argument("--allowed-host", action="append", default=[], help="Host header to answer besides localhost")
    group.add_argument("--insecure", action="store_true", help="listen on a public address without a key")
    group.add_argument("--ssl-keyfile")
    group.add_argument("--ssl-certfile")
    group.add_argument("--ssl-ca-certs", help="certificates that clients must have one of, with --ssl-cert-reqs 2")
    group.add_argument("--ssl-cert-reqs", type=int, default=int(ssl.CERT_NONE), choices=(0, 1, 2))
    group.add_argument("--max-queue", type=int, default=1024, help="most requests that wait (default: %(default)s)")
    group.add_argument(
        "--max-queue-tokens", type=int, default=1_000_000, help="most prompt tokens that wait (default: %(default)s)"
    )
    group.add_argument(
        "--shutdown-timeout", type=float, default=30, help="seconds for running requests to end (default: %(default)s)"
    )
    group.add_argument(
        "--stall-timeout", type=float, default=120, help="/health is 503 after a step of so many seconds"
    )
    group.add_argument("--timeout-keep-alive", type=int, default=5, help="seconds that an idle connection stays open")
    group.add_argument("--strict-fields", action="store_true", help="refuse fields that are not known")
    EngineArgs.add_cli_args(parser.add_argument_group("engine (see EngineConfig)"))
    return parser


def default_name(model: str | None) -> str:
    """What clients call the model: what `--model` says, without directories."""
    if model is None:
        return "SmolLM2-135M-Instruct"
    return Path(model).name if Path(model).exists() else model


class Server(uvicorn.Server):
    """uvicorn, with an end that lets running requests finish.

    The first SIGTERM or SIGINT makes /health 503 and refuses new requests. When all others have ended, or after
    `shutdown_timeout` seconds, the server stops. A second signal stops it now.
    """

    def __init__(self, config: uvicorn.Config, state: ServerState, shutdown_timeout: float):
        super().__init__(config)
        self.state, self.shutdown_timeout = state, shutdown_timeout
        self._loop: asyncio.AbstractEventLoop | None = None

    async def load(self, engine_args: EngineArgs) -> None:
        """Load the model while the server already answers, and say when it is ready."""
        self._loop = asyncio.get_running_loop()
        try:
            self.state.llm = await asyncio.to_thread(AsyncLLM.from_engine_args, engine_args)
        except Exception as error:
            self.state.error = str(error)
            print(f"nanopage: {error}", file=sys.stderr)
            self.should_exit = True
            return
        print(self._ready_line(), flush=True)

    def handle_exit(self, sig: int, frame: object) -> None:
        if self.state.draining or self._loop is None or self.state.llm is None:
            self.force_exit = self.state.draining
            self.should_exit = True
            return
        self.state.draining = True
        self._loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._drain()))

    async def _drain(self) -> None:
        """Wait for the running requests, then stop. Those that are left end with an error event."""
        logger.info(f"shutting down: {self.state.num_active} requests have {self.shutdown_timeout:g} s to end")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.shutdown_timeout):
                while self.state.num_active and not self.should_exit:
                    await asyncio.sleep(0.05)
        if self.state.llm is not None:
            await asyncio.to_thread(self.state.llm.shutdown)
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
