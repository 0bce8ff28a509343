"""nanopage/server/one_engine.py: the socket for programs of the same user, and a server that can have none."""

import asyncio
import logging
import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from nanopage.files.local_servers import LocalServer, connect, socket_of
from nanopage.server.one_engine import LocalSocket, OneEngine
from nanopage.server.state import ServerState

SERVER = LocalServer(socket.gethostname(), os.getpid(), "0", 1.0, "m", "m", "/m", {}, {}, False, True, False)


class Greet(asyncio.Protocol):
    def connection_made(self, transport):
        transport.write(b"hello")


@pytest.fixture
def place(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="nanopage-") as directory:  # a path that is short enough for sockets
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        yield Path(directory) / "nanopage"


async def test_the_socket_answers_this_user_alone_and_leaves_nothing_behind(place, monkeypatch):
    def ask(file) -> bytes:
        with connect(socket_of(file), 10.0) as client:
            return client.recv(10)

    local = LocalSocket(SERVER, Greet, 1000)
    (file,) = place.glob("*.json")
    assert stat.S_IMODE(socket_of(file).stat().st_mode) == 0o600
    assert await asyncio.to_thread(ask, file) == b"hello"
    user = os.geteuid()
    monkeypatch.setattr("nanopage.files.local_servers.os.geteuid", lambda: user + 1)  # of the server
    monkeypatch.setattr("nanopage.files.local_servers.check_peer", lambda sock: None)  # of the client
    if hasattr(socket, "SO_PEERCRED"):
        assert await asyncio.to_thread(ask, file) == b""
    local.close()
    assert not [*place.iterdir()]


def test_a_server_that_can_have_no_socket_goes_on_without(place, monkeypatch, caplog, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / ("long" * 40)).mkdir()
    engine = OneEngine(ServerState(["m"]), None, False)
    monkeypatch.setattr(engine, "_describe", lambda: SERVER)
    caplog.set_level(logging.INFO)
    for directory, why in ((tmp_path / "file", "Not a directory"), (tmp_path / ("long" * 40), "path too long")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
        caplog.clear()
        engine.listen(Greet, 1000)
        assert "nanopage chat cannot use this server" in caplog.text and why in caplog.text
    assert not [*(tmp_path / ("long" * 40) / "nanopage").iterdir()]
    with monkeypatch.context() as patch:
        patch.delenv("XDG_RUNTIME_DIR")
        patch.delenv("XDG_CACHE_HOME", raising=False)
        patch.setattr(Path, "home", lambda: Path("~nobody-of-this-name").expanduser())
        caplog.clear()
        engine.listen(Greet, 1000)
        assert "Could not determine home directory" in caplog.text
    place.mkdir(mode=0o700)
    place.chmod(0o770)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place.parent))
    engine.listen(Greet, 1000)
    assert "other users may write to it" in caplog.text and not [*place.iterdir()]


def test_a_server_that_has_stopped_opens_no_socket(place, monkeypatch):
    """It may stop while the model loads."""
    engine = OneEngine(ServerState(["m"]), None, False)
    monkeypatch.setattr(engine, "_describe", lambda: SERVER)
    asyncio.run(engine.stop())
    engine.listen(Greet, 1000)
    assert not place.exists()
