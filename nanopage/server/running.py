"""The server from its start to its end: it listens, loads the model, and lets running requests end."""

import asyncio
import functools
import gc
import logging
import threading
import time
from typing import TYPE_CHECKING

import uvicorn

from nanopage.audio import WHISPER
from nanopage.server.connection import Connection
from nanopage.server.listener import Listener, listen, raise_limit
from nanopage.server.middleware import AUDIO_PATHS
from nanopage.server.one_engine import OneEngine
from nanopage.server.state import ServerState

if TYPE_CHECKING:
    from nanopage.server.front import Front
    from nanopage.server.models import Models

logger = logging.getLogger("nanopage")

PUBLIC = ("0.0.0.0", "::", "")


class Server(uvicorn.Server):
    """uvicorn that loads the model once it listens, and lets running requests end.

    After the first SIGTERM or SIGINT, /health returns 503 and new requests are refused. When all other requests have
    ended, or after `shutdown_timeout` seconds, the server stops. A second signal, or the first one while the model
    loads, stops it without this wait.

    Args: engine: what is started and stopped.
    """

    def __init__(
        self, config: uvicorn.Config, state: ServerState, engine: "OneEngine | Front | Models", shutdown_timeout: float
    ):
        super().__init__(config)
        self.state, self.engine, self.shutdown_timeout = state, engine, shutdown_timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loader = threading.Thread(target=self._load, name="nanopage-loader", daemon=True)
        self._draining: asyncio.Task | None = None

    async def startup(self, sockets: list | None = None) -> None:
        """Listen and load the model. Raises: ValueError for an address that cannot be used."""
        make_protocol = functools.partial(Connection, config=self.config, server_state=self.server_state, app_state={})
        listening = listen(self.config.host, self.config.port, self.config.uds)
        limit = raise_limit() // self.engine.sockets_per_call
        self.servers = [Listener(sock, make_protocol, self.config.ssl, limit) for sock in listening]  # type: ignore[misc]
        self._of_listeners = make_protocol, limit
        self.started = True
        if not self.should_exit:
            self._loop = asyncio.get_running_loop()
            self._loader.start()

    async def shutdown(self, sockets: list | None = None) -> None:
        await self.engine.stop()
        await super().shutdown(sockets)

    def is_busy(self) -> bool:
        """Whether a thread of this process still loads the model or runs a step."""
        return self._loader.is_alive() or (self.state.llm is not None and not self.state.llm.shutdown(0))

    def _load(self) -> None:
        assert self._loop is not None
        try:
            self.engine.load(self._loop)
            gc.collect()
            gc.freeze()  # so that later collections skip everything imported and loaded so far
            if isinstance(self.engine, OneEngine) and not self.config.uds:
                self._loop.call_soon_threadsafe(self.engine.listen, *self._of_listeners)
            print(self._ready_line(), flush=True)
        except BaseException as error:  # when Rust panics, tokenizers raises something that is not an Exception
            self.state.error = str(error) or type(error).__name__
            logger.error(self.state.error)
            self.should_exit = True

    def handle_exit(self, sig: int, frame: object) -> None:
        if self.state.draining or self._loop is None or not self.engine.loaded:
            self.force_exit = self.state.draining
            self.should_exit = True
            return
        self.state.draining = True
        self._loop.call_soon_threadsafe(self._begin_draining)

    def _begin_draining(self) -> None:
        self.engine.begin_draining()
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        """Wait for the running requests, then stop. `shutdown` ends the remaining requests with an error."""
        count = self.state.num_active
        waits = f": {count} request(s) have {self.shutdown_timeout:g} s to end" if count else ""
        logger.info(f"shutting down{waits}")
        deadline = time.monotonic() + self.shutdown_timeout
        while self.state.num_active and not self.should_exit and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self.should_exit = True

    def _ready_line(self) -> str:
        names, uds = self.state.model_names, self.config.uds
        name = names[0]
        scheme = "https" if self.config.ssl_certfile else "http"
        if uds:
            url, curl = "http://localhost", f"curl --unix-socket {uds}"
        else:
            port = next(s.getsockname()[1] for server in self.servers for s in server.sockets)
            host = "127.0.0.1" if self.config.host in PUBLIC else self.config.host
            url, curl = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}", "curl"
        config = None if self.state.llm is None else self.state.llm.engine.model_config
        path, fields = "chat/completions", '"messages": [{"role": "user", "content": "Hello!"}]'
        if config is not None and config.pooling is not None:
            embeds = config.pooling.task == "embed"
            path, fields = ("embeddings", '"input": "a"') if embeds else ("score", '"text_1": "a", "text_2": "b"')
        call = f"/v1/{path} -H 'Content-Type: application/json' -d '{{\"model\": \"{name}\", {fields}}}'"
        if config is not None and config.architecture == WHISPER:
            call = f"{AUDIO_PATHS['transcribe']} -F file=@talk.wav"
        chats = config is None or (config.architecture != WHISPER and config.pooling is None)
        pages = [f"{url}/ is a page to chat"] if chats else []
        pages += [f"{url}/view shows the engine at work"] if self.state.view is not None else []
        pages = [] if uds else pages  # no browser opens a Unix socket
        seen = f" {', '.join(pages)}." if pages else ""
        return f"ready: {url}/v1 serves {', '.join(names)}.{seen} Try: {curl} {url}{call}"
