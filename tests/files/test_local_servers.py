"""nanopage/files/local_servers.py: servers of this user are found by their sockets, and nobody else's."""

import os
import socket
import stat
import tempfile
from pathlib import Path

import msgspec
import pytest

from nanopage.files import local_servers
from nanopage.files.local_servers import LocalServer, connect, fingerprint, new_file, publish, socket_of

ENTRY = LocalServer(
    host=socket.gethostname(),
    pid=1,
    version="0",
    started=1.0,
    model="tiny",
    name="tiny",
    path="/tiny",
    files={"model.safetensors": (3, 4)},
    options={"dtype": "auto", "max_model_len": None},
    needs_key=False,
    has_template=True,
    sees_images=False,
)


@pytest.fixture
def place(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="nanopage-") as directory:  # a path that is short enough for sockets
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        yield Path(directory) / "nanopage"


@pytest.fixture
def serve():
    """Publishes a server that listens. Returns its file."""
    sockets = []

    def serve(**changes):
        file = new_file()
        sockets.append(socket.socket(socket.AF_UNIX))
        sockets[-1].bind(str(socket_of(file)))
        sockets[-1].listen()
        publish(file, msgspec.structs.replace(ENTRY, **changes))
        return file

    serve.sockets = sockets
    yield serve
    for each in sockets:
        each.close()


def test_servers_are_found_the_latest_first_and_those_that_were_killed_are_forgotten(place, serve):
    assert local_servers.local_servers() == [] and not place.exists()
    old, new, killed = serve(started=1.0), serve(started=2.0), serve(started=3.0)
    elsewhere = serve(host="another-machine", started=4.0)  # which shares the home directory
    serve.sockets[2].close()
    serve.sockets[3].close()
    assert [file for file, _ in local_servers.local_servers()] == [new, old]
    assert local_servers.local_servers()[1][1] == ENTRY
    assert sorted(place.glob("*.json")) == sorted([old, new, elsewhere]) and not socket_of(killed).exists()
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert stat.S_IMODE(old.stat().st_mode) == 0o600


def test_what_is_damaged_or_of_another_version_is_passed_over(place, serve):
    good = serve()
    (place / "1.json").write_text("{")
    (place / "2.json").write_text('{"pid": 3}')
    (place / "3.json").write_bytes(b"\xff")
    for number in (1, 2, 3):
        (place / f"{number}.json").chmod(0o600)
    assert [file for file, _ in local_servers.local_servers()] == [good]


def test_what_another_user_could_have_written_is_refused(place, serve, monkeypatch):
    file = serve()
    file.chmod(0o666)
    with pytest.raises(PermissionError, match=file.name):
        local_servers.local_servers()
    file.chmod(0o600)
    place.chmod(0o777)
    for ask in (local_servers.local_servers, new_file):
        with pytest.raises(PermissionError, match="other users may write to it"):
            ask()
    place.chmod(0o700)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    for ask in (local_servers.local_servers, new_file):
        with pytest.raises(PermissionError, match=f"belongs to user {user}, not to you"):
            ask()
    if hasattr(socket, "SO_PEERCRED"):
        with pytest.raises(PermissionError, match=f"the other end of the socket belongs to user {user}"):
            connect(socket_of(file), 1.0)


def test_a_link_in_place_of_the_file_is_refused_if_it_leads_to_what_others_can_write(place, serve, tmp_path):
    file = serve()
    (tmp_path / "shared.json").write_bytes(file.read_bytes())
    (tmp_path / "shared.json").chmod(0o666)
    file.unlink()
    file.symlink_to(tmp_path / "shared.json")
    with pytest.raises(PermissionError):
        local_servers.local_servers()


def test_without_a_runtime_directory_the_cache_has_the_sockets(tmp_path, monkeypatch):
    for value in (None, "relative"):
        if value is None:
            monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        else:
            monkeypatch.setenv("XDG_RUNTIME_DIR", value)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert new_file().parent == tmp_path / "nanopage" / "run"


def test_a_model_that_was_written_again_has_another_fingerprint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("")
    before = fingerprint(tmp_path)
    assert list(before) == ["config.json"] and fingerprint(tmp_path) == before
    os.utime(tmp_path / "config.json", ns=(0, 0))
    assert fingerprint(tmp_path) != before
    assert fingerprint(tmp_path / "config.json") == {"config.json": (2, 0)}
