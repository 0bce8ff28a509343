"""`nanopage serve`: options, start and end of the server."""

import argparse
import dataclasses
import gc
import logging
import math
import os
import ssl
import sys
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.config import LOGGING_CONFIG

from nanopage.cpu.threads import default_threads
from nanopage.distributed import ray_cluster
from nanopage.files.json_log import log_as_json
from nanopage.files.lossy_output import lose_output
from nanopage.server.app import create_app
from nanopage.server.connection import Connection
from nanopage.server.live_view import LiveView
from nanopage.server.middleware import LOCAL_HOSTS, ORIGIN, share_with
from nanopage.server.one_engine import OneEngine
from nanopage.server.option_sources import read_options, unknown_variables
from nanopage.server.options import SECONDS_TO_CLOSE, Model, add_model_options, add_models, named_models, positive
from nanopage.server.running import Server
from nanopage.server.state import ServerState
from nanopage.vllm.engine_args import EngineArgs, FlexibleArgumentParser
from nanopage.weights import hub

if TYPE_CHECKING:
    from nanopage.server.front import Front
    from nanopage.server.models import Models
    from nanopage.server.tracing import Tracer

logger = logging.getLogger("nanopage")

TARGET_ONGOING_REQUESTS = 64
SEVERAL = "the live view shows one engine, and this server has several models"


def main(arguments: list[str]) -> int:
    """Run the server with these arguments of its command line. Returns the program's exit code."""
    command_line = parser()
    args = read_options(command_line, arguments, os.environ)
    if args.log_format == "json":
        log_as_json()
    for warning in unknown_variables(command_line, os.environ):
        logger.warning(warning)
    return run(args)


def run(args: argparse.Namespace) -> int:
    """Run the server until a signal, or a model that cannot be loaded, ends it. Returns the program's exit code."""
    keys = check_access(args)
    check_replicas(args)
    models = named_models(args)
    args.model = None if models or not args.model else args.model[-1]
    model = Model(args)
    passed = ("max_queue", "max_queue_tokens", "strict_fields", "salt_per_key", "allow_runtime_lora_updating")
    settings = model.settings | {name: getattr(args, name) for name in (*passed, "allow_sleep")}
    settings |= {"stall_seconds": args.stall_timeout} | ({"model_names": [*models]} if models else {})
    tracer = _tracer(args.otlp_traces_endpoint)
    no_view = SEVERAL if models else why_no_view(args, bool(keys))
    state = ServerState(**settings, tracer=tracer, view=None if no_view else LiveView(), no_view=no_view)
    hosts = [] if args.uds or args.insecure else [*LOCAL_HOSTS, *map(str.lower, args.allowed_host)]
    if args.log_format == "text":
        lose_output()
    front: Front | Models | None = None
    if models:
        import nanopage.server.models as several  # not needed in front of a single model

        front = several.Models(state, models, vars(args), keys)
    elif args.replicas is not None:
        front = _front(args, state, settings, model.engine_args)
    routes = None if front is None else front.routes
    app = create_app(state, keys, hosts, args.public_metrics, args.root_path, routes, front)
    of_uvicorn = ("host", "port", "uds", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs")
    config = uvicorn.Config(
        share_with(args.allowed_origins, app),
        **{name: getattr(args, name) for name in (*of_uvicorn, "timeout_keep_alive")},
        access_log=False,
        log_config=None if args.log_format == "json" else LOGGING_CONFIG,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=SECONDS_TO_CLOSE,
        http=Connection,
        lifespan="off",
    )
    server = Server(config, state, front or OneEngine(state, model, bool(keys)), args.shutdown_timeout)
    server.run()
    gc.unfreeze()  # frozen garbage is never collected, and nanobind, which Triton uses, reports it when Python ends
    if tracer is not None:
        tracer.shutdown()
    if front is not None:
        front.close()
    code = 0 if state.error is None else 1
    if server.is_busy():  # loading, or in a step that hangs: the thread must not run torch while Python ends
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def parser() -> argparse.ArgumentParser:
    """The options: the server's, then the engine's. They have the names of `vllm serve` where it has the option."""
    parser = FlexibleArgumentParser(
        prog="nanopage serve",
        usage="%(prog)s [MODEL] [options]",
        description="Serve a model to clients of OpenAI's API.",
        epilog="Each option can also be an environment variable, such as NANOPAGE_MAX_MODEL_LEN for --max-model-len, "
        "or a line of the file of --config. The command line comes first, then the environment, then the file.",
        allow_abbrev=False,
    )
    add_model_options(parser)
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=_port, default=8000, help="0 takes a free port (default: %(default)s)")
    add("--uds", help="listen on a Unix socket with this path instead")
    add(
        "--api-key",
        action="append",
        help="key that clients must send; can be repeated (better in NANOPAGE_API_KEY: other users see command lines)",
    )
    add("--root-path", type=_prefix, default="", help="prefix that paths may have, for a reverse proxy that adds one")
    add("--allowed-host", action="append", default=[], help="Host header to answer besides localhost")
    add(
        "--allowed-origins",
        type=_origin,
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="web pages that may call the server from a browser, such as https://app.example.com, or * for all (CORS; "
        "default: none but its own)",
    )
    add("--insecure", action="store_true", help="listen on any address without a key, under any name")
    add("--ssl-keyfile", help="key of the certificate, for HTTPS")
    add("--ssl-certfile", help="the server's certificate")
    add("--ssl-ca-certs", help="authorities of clients' certificates")
    text = "whether clients need a certificate: 0 no, 1 only a valid one if any, 2 yes (default: %(default)s)"
    add("--ssl-cert-reqs", type=int, default=int(ssl.CERT_NONE), choices=(0, 1, 2), help=text)
    add("--max-queue", type=positive, default=1024, help="most requests that wait (default: %(default)s)")
    text = "most prompt tokens that wait (default: %(default)s)"
    add("--max-queue-tokens", type=positive, default=1_000_000, help=text)
    text = "seconds for running requests to end (default: %(default)s)"
    add("--shutdown-timeout", type=_seconds, default=30, help=text)
    text = "/health is 503 when no step has ended for so many seconds (default: %(default)s)"
    add("--stall-timeout", type=_seconds, default=120, help=text)
    add("--timeout-keep-alive", type=int, default=5, help="seconds that an idle connection stays open")
    text = "json: each line of the log is a JSON object, and each reply has a line (default: %(default)s)"
    add("--log-format", choices=("text", "json"), default="text", help=text)
    add("--strict-fields", action="store_true", help="refuse fields that are not known")
    text = "serve the live view, /view, also where clients need a key (default: only without --api-key, --insecure)"
    add("--view", action="store_true", help=text)
    add("--public-metrics", action="store_true", help="/metrics needs no key")
    add("--salt-per-key", action="store_true", help="keep the cached prefixes of clients with different keys apart")
    add("--otlp-traces-endpoint", metavar="URL", help="send OpenTelemetry traces there, by OTLP over HTTP (extra otel)")
    add("--allow-runtime-lora-updating", action="store_true", help="clients may load adapters from any directory")
    add("--allow-sleep", action="store_true", help="clients may put the engine to sleep, and wake it")
    add = parser.add_argument_group("replicas (extra replicas; see docs/deploy.md)").add_argument
    add("--replicas", type=positive, metavar="N", help="run so many engines, on Ray Serve")
    add("--max-replicas", type=positive, metavar="M", help="start up to so many when there is much to do")
    text = f"requests that each of them should have then (default: {TARGET_ONGOING_REQUESTS})"
    add("--target-ongoing-requests", type=positive, metavar="T", help=text)
    engine = EngineArgs.add_cli_args(parser.add_argument_group("engine", conflict_handler="resolve"))
    text = (
        "a Hugging Face directory, a .gguf file or a hub id (default: SmolLM2-135M-Instruct); NAME=PATH, which can be "
        "repeated, for several models"
    )
    engine.add_argument("--model", action="append", help=text)
    add_models(parser)
    return parser


def check_access(args: argparse.Namespace) -> list[str]:
    """The keys of clients. Raises: ValueError for options that would let anybody in, or that need other options."""
    keys = [key.strip() for key in args.api_key or ()]
    if not all(keys):
        raise ValueError("--api-key is empty")
    check_tls(args)
    if args.salt_per_key and not keys:
        raise ValueError("--salt-per-key needs --api-key")
    if args.allowed_host:
        for name, given in (("--api-key", keys), ("--insecure", args.insecure), ("--uds", args.uds)):
            if given:
                raise ValueError(f"--allowed-host has no effect with {name}: the server then answers any Host header")
    is_open = args.uds is None and not keys and not args.insecure
    if is_open and args.host not in ("localhost", "127.0.0.1", "::1"):
        raise ValueError(
            f"--host {args.host}: anyone who reaches this address could use the server. Give --api-key, or --insecure "
            "if something else protects it"
        )
    if is_open and "*" in args.allowed_origins:
        raise ValueError(
            "--allowed-origins *: any web page that is open on this machine could use the server. Name the origins, or "
            "give --api-key, or --insecure"
        )
    return keys


def check_tls(args: argparse.Namespace) -> None:
    """Raises: ValueError for options of TLS that need others, and for files that cannot be read."""
    if bool(args.ssl_keyfile) != bool(args.ssl_certfile):
        raise ValueError("--ssl-keyfile and --ssl-certfile need each other")
    if not args.ssl_certfile and (args.ssl_ca_certs or args.ssl_cert_reqs):
        name = "--ssl-ca-certs" if args.ssl_ca_certs else f"--ssl-cert-reqs {args.ssl_cert_reqs}"
        raise ValueError(f"{name} needs --ssl-certfile and --ssl-keyfile: without them the server speaks plain HTTP")
    if args.ssl_cert_reqs and not args.ssl_ca_certs:
        raise ValueError(f"--ssl-cert-reqs {args.ssl_cert_reqs} needs --ssl-ca-certs")
    if args.ssl_ca_certs and not args.ssl_cert_reqs:
        raise ValueError("--ssl-ca-certs has no effect without --ssl-cert-reqs 1 or 2")
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        if file := getattr(args, name):
            try:
                Path(file).read_bytes()
            except OSError as error:
                raise ValueError(f"--{name.replace('_', '-')} {file}: {error.strerror}") from None
    if args.ssl_ca_certs:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(args.ssl_ca_certs)
        except ssl.SSLError as error:
            raise ValueError(f"--ssl-ca-certs {args.ssl_ca_certs}: {error}") from None


def check_replicas(args: argparse.Namespace) -> None:
    """Raises: ValueError for options of replicas that need others."""
    for name in ("max_replicas", "target_ongoing_requests"):
        needed = "replicas" if name == "max_replicas" else "max_replicas"
        if getattr(args, name) is not None and getattr(args, needed) is None:
            raise ValueError(f"--{name.replace('_', '-')} needs --{needed.replace('_', '-')}")
    if args.max_replicas is not None and args.max_replicas < args.replicas:
        raise ValueError(f"--max-replicas {args.max_replicas} is less than --replicas {args.replicas}")
    if args.replicas is not None:
        ray_cluster.check_address()
        if args.distributed_executor_backend == "ray":
            raise ValueError("--distributed-executor-backend ray does not work with --replicas: use mp")
        for option in ("enable_lora", "enable_prompt_adapter", "allow_sleep"):
            if getattr(args, option):
                raise ValueError(f"--{option.replace('_', '-')} does not work with --replicas")


def why_no_view(args: argparse.Namespace, has_keys: bool) -> str:
    """Why the live view is not served; empty if it is. Whoever may open the view can pause the engine. So without
    --view, it is served only if there is no key and nobody but this machine's users can reach the server.

    Raises: ValueError for --view with --replicas.
    """
    if args.replicas is not None:
        if args.view:
            raise ValueError("--view does not work with --replicas: it shows one engine")
        return "the live view shows one engine, and this server has several (--replicas)"
    if args.view:
        return ""
    if has_keys:
        return "the server has a key: start it with --view, and the live view needs the key, too"
    return "the server was started with --insecure: start it with --view as well" if args.insecure else ""


def _front(args: argparse.Namespace, state: ServerState, settings: dict, engine_args: EngineArgs) -> "Front":
    """Front for these options, connected to a Ray cluster. Raises: ValueError, ConnectionError."""
    engine = dataclasses.asdict(engine_args)
    if args.model is not None and os.path.exists(path := os.path.expanduser(args.model)):
        engine["model"] = os.path.realpath(path)  # replicas have other working directories
    most = args.max_replicas or args.replicas
    num_workers = engine_args.tensor_parallel_size * engine_args.pipeline_parallel_size
    if ray_cluster.is_local():
        hub.resolve(args.model)  # one download, not one for each replica
    try:
        ray_cluster.connect(max(default_threads(), most))
        from nanopage.server.front import Front, resources_of_replica
        from nanopage.server.replica import Settings
    except ImportError as error:
        raise ValueError(f"--replicas: {error}; pip install 'nanopage[replicas]'") from None
    return Front(
        state,
        Settings(settings | {"created": state.created}, engine, args.otlp_traces_endpoint),
        args.replicas,
        args.max_replicas,
        args.target_ongoing_requests or TARGET_ONGOING_REQUESTS,
        resources_of_replica(most, engine_args.device, num_workers),
        args.shutdown_timeout,
    )


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


def _prefix(text: str) -> str:
    if text and not text.startswith("/"):
        raise argparse.ArgumentTypeError(f"{text!r} does not begin with /")
    return text.rstrip("/")


def _origin(text: str) -> str:
    if not ORIGIN.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither an origin, such as https://app.example.com, nor *")
    return text


def _seconds(text: str) -> float:
    if not 0 <= float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return float(text)
