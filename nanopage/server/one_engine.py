"""The engine of a server that runs it in its own process, and the socket by which `nanopage chat` finds the server."""

import asyncio
import dataclasses
import logging
import os
import time
from collections.abc import Callable

import nanopage
from nanopage.audio import WHISPER
from nanopage.files.local_servers import LocalServer, check_peer, fingerprint, new_file, publish, socket_of, withdraw
from nanopage.server.listener import Listener, listen_at_path
from nanopage.server.options import SECONDS_TO_CLOSE, Model
from nanopage.server.state import ServerState
from nanopage.weights.inventory import identity

logger = logging.getLogger("nanopage")


class OneEngine:
    """How the engine starts and stops.

    Args:
        state: gets the engine.
        model: what to load.
        needs_key: whether requests need an API key.
    """

    sockets_per_call = 1

    def __init__(self, state: ServerState, model: Model, needs_key: bool):
        self.state, self.model, self.needs_key = state, model, needs_key
        self._local: LocalSocket | None = None
        self._stopped = False

    @property
    def loaded(self) -> bool:
        return self.state.llm is not None

    def load(self, loop: asyncio.AbstractEventLoop) -> None:
        """Load the model. Blocks: call it in a thread. Raises: as `nanopage.build.build_engine`."""
        self.model.load(self.state)

    def listen(self, make_protocol: Callable[[], asyncio.Protocol], limit: int) -> None:
        """Listen for programs of this user, too, if the model makes text. Call it on the event loop, with the arguments
        of Listener."""
        try:
            if not self._stopped and (server := self._describe()) is not None:
                self._local = LocalSocket(server, make_protocol, limit)
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
            logger.info(f"nanopage chat cannot use this server: {error}")

    def begin_draining(self) -> None:
        """Let paused requests end."""
        if self.state.view is not None and self.state.llm is not None:
            self.state.llm.engine_thread.resume()

    async def stop(self) -> None:
        """End the requests that still run with an error."""
        self._stopped = True
        if self._local is not None:
            self._local.close()
        if self.state.llm is not None:
            await asyncio.to_thread(self.state.llm.shutdown, SECONDS_TO_CLOSE)

    def _describe(self) -> LocalServer | None:
        """What programs of this user can read about the server; None if it makes no text."""
        assert self.state.llm is not None
        engine = self.state.llm.engine
        config, tokenizer = engine.model_config, engine.tokenizer
        if config.pooling is not None or config.architecture == WHISPER or tokenizer is None:
            return None
        options = dataclasses.asdict(self.model.engine_args)
        return LocalServer(
            host=os.uname().nodename,
            pid=os.getpid(),
            version=nanopage.__version__,
            started=time.time(),
            model=identity(options.pop("model")),
            name=self.state.model_names[0],
            path=str(engine.model_path.resolve()),
            files=fingerprint(engine.model_path),
            options=options,
            needs_key=self.needs_key,
            has_template=tokenizer.chat_template is not None,
            sees_images="image" in config.encoders,
        )


class LocalSocket:
    """A Unix socket with a file that describes the server (see files/local_servers.py), until `close`.

    Args: make_protocol, limit: as in Listener.
    Raises: OSError if there can be none.
    """

    def __init__(self, server: LocalServer, make_protocol: Callable[[], asyncio.Protocol], limit: int):
        self._file = new_file()
        try:
            sock = listen_at_path(str(socket_of(self._file)), 0o600)
            publish(self._file, server)
            self._listener = Listener(sock, make_protocol, None, limit, check_peer)
        except BaseException:
            withdraw(self._file)
            raise

    def close(self) -> None:
        """Accept no more connections, and remove the files."""
        withdraw(self._file)
        self._listener.close()
