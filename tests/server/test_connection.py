"""Connection, Gate and Listener: clients that do not read their reply, what clients can make the server keep, and more
clients than file descriptors."""

import asyncio
import contextlib
import gc
import os
import resource
import socket
from collections import Counter

import pytest
import uvicorn
from asgi import call

from nanopage.server import connection, middleware
from nanopage.server.connection import MAX_FRAMING, Connection
from nanopage.server.listener import RESERVE, SECONDS_TO_WAIT, Listener, listen, raise_limit
from nanopage.server.middleware import MAX_BODY, Gate

PIECE = b"x" * (64 << 10)
NUM_PIECES = 200  # 12.5 MiB: more than the sockets' buffers hold


@contextlib.asynccontextmanager
async def serving(app):
    """The port of a server of `app`."""
    config = uvicorn.Config(
        app, port=0, http=Connection, lifespan="off", log_level="error", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


@pytest.mark.parametrize("pause", [0.0, 0.05])
def test_a_client_that_stops_reading_is_cut_off_and_a_slow_one_is_not(monkeypatch, pause):
    """The slow client takes longer than READ_SECONDS in all, but never pauses for that long."""
    monkeypatch.setattr(connection, "READ_SECONDS", 0.5)

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(NUM_PIECES):
            await send({"type": "http.response.body", "body": PIECE, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def talk() -> int:
        """How many bytes the client gets."""
        async with serving(app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            length = 0
            if pause == 0.0:
                await asyncio.sleep(2.0)
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(1 << 20):
                    length += len(data)
                    await asyncio.sleep(pause)
            writer.close()
            return length

    length = asyncio.run(talk())
    if pause == 0.0:
        assert length < NUM_PIECES * len(PIECE)
    else:
        assert length > NUM_PIECES * len(PIECE)


HEAD = b"POST /x HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS = {  # a beginning, and what is sent again and again after it
    "a trailer that does not end": (CHUNKED + b"1\r\na\r\n0\r\nX: y", b"y" * 1000),
    "trailers": (CHUNKED + b"1\r\na\r\n0\r\n", b"X: y\r\n" * 100),
    "trailers after a body": (CHUNKED + b"%x\r\n" % 100_000 + b"a" * 100_000 + b"\r\n0\r\n", b"X: y\r\n" * 100),
    "a chunk's extension": (CHUNKED + b"1;", b"a=b;" * 250),
    "extensions": (CHUNKED, b"1;" + b"a=b;" * 250 + b"\r\na\r\n"),
    "a header that does not end": (HEAD + b"X: y", b"y" * 1000),
    "headers": (HEAD, b"X: y\r\n" * 100),
    "a path": (b"POST /", b"y" * 1000),
}


async def ok(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok", "more_body": False})


def guarded(app, api_keys=()):
    return Gate(app, api_keys, [], Counter(), [])


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("key", [(), ("secret",)], ids=["open", "key"])
async def test_what_is_around_a_body_is_limited(name, key):
    """With a key, the client has none: its reply comes first."""
    begin, more = ENDLESS[name]
    async with serving(guarded(ok, key)) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begin)
        num_sent = 0
        with contextlib.suppress(ConnectionError):
            while not writer.is_closing() and num_sent < 32 << 20:
                writer.write(more)
                num_sent += len(more)
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()
        assert num_sent < 8 << 20  # the sockets' buffers hold more than the server takes


async def test_small_chunks_and_trailers_are_no_attack():
    bodies = []

    async def app(scope, receive, send):
        bodies.append((await receive())["body"])
        assert [name for name, _ in scope["headers"]] == [b"host", b"transfer-encoding", b"connection"]
        await ok(scope, receive, send)

    async with serving(guarded(app)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CHUNKED.removesuffix(b"\r\n") + b"Connection: close\r\n\r\n")
        for _ in range(MAX_FRAMING // 8):
            writer.write(b"1;a\r\nx\r\n")
        writer.write(b"%x\r\n" % 1_000_000 + b"y" * 1_000_000 + b"\r\n0\r\nX-Checksum: 5\r\n\r\n")
        assert (await reader.read()).endswith(b"ok")
    assert bodies == [b"x" * (MAX_FRAMING // 8) + b"y" * 1_000_000]


async def test_large_bodies_follow_each_other_on_a_connection():
    """A read may have a head and the beginning of a large body, and what the previous body had does not count."""
    body = b"Content-Length: 400000\r\n\r\n" + b"a" * 400_000
    async with serving(guarded(ok)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        replies = []
        for _ in range(3):
            writer.write(HEAD + body)
            replies.append(await reader.readuntil(b"ok"))
        writer.close()
        assert all(reply.startswith(b"HTTP/1.1 200") for reply in replies)


@pytest.mark.parametrize(
    "head", [b"Content-Length: 5000\r\n\r\n1", b"Content-Length: 5\r\nExpect: 100-continue\r\n\r\n"]
)
async def test_a_connection_whose_request_was_refused_before_its_end_is_closed(monkeypatch, head):
    monkeypatch.setattr(connection, "LINGER_SECONDS", 0.2)
    async with serving(guarded(ok, ["secret"])) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + head)
        reply = await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b"1")
                await asyncio.sleep(0.01)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(1000), 0.01)
        assert reply.startswith(b"HTTP/1.1 401")  # and no 100 Continue


def test_the_sum_of_bodies_is_limited_and_small_ones_always_pass(monkeypatch):
    monkeypatch.setattr(middleware, "MAX_ARRIVING", 2 * MAX_BODY)
    monkeypatch.setattr(middleware, "MAX_BODIES", 2 * MAX_BODY)
    large, small, holding = b"x" * (MAX_BODY - 1), b"x" * 1000, asyncio.Event()

    async def app(scope, receive, send):
        body = (await receive())["body"]
        if len(body) == len(large):
            await holding.wait()
        await ok(scope, receive, send)

    async def crowd(chunks):
        gate = guarded(app)
        tasks = [asyncio.create_task(call(gate, "POST", "/x", chunks=chunks)) for _ in range(2)]
        while gate.num_arriving + gate.num_held < 2 * len(large):
            await asyncio.sleep(0)
        refused = await call(gate, "POST", "/x", chunks=[large[:100_000], large[100_000:]])
        declared = await call(gate, "POST", "/x", chunks=[b"", None], headers={"content-length": str(len(large))})
        passed = await call(gate, "POST", "/x", small)
        holding.set()
        for task in tasks if None in chunks else ():
            task.cancel()
        await asyncio.wait(tasks)
        again = await call(gate, "POST", "/x", large)
        assert gate.num_arriving == gate.num_held == 0
        return refused, declared, passed, again

    for chunks in ([large, None], [large]):  # that never end, and whose calls run
        monkeypatch.setattr(middleware, "BODY_SECONDS", 60.0 if None in chunks else 0.5)
        holding = asyncio.Event()
        refused, declared, passed, again = asyncio.run(crowd(chunks))
        assert (refused.status, refused.error["code"]) == (503, "too_many_bodies") and "retry-after" in refused.headers
        assert declared.status == (503 if None in chunks else 408)
        assert passed.status == again.status == 200


async def test_a_path_without_a_key_reads_no_body():
    gate = guarded(ok, ["secret"])
    for path in ("/health", "/ping", "/"):
        reply = await call(gate, "POST", path, chunks=[b"x" * MAX_BODY, None])
        assert reply.status == 200 and gate.num_held == 0


def test_connections_wait_while_no_file_descriptor_is_left(caplog):
    served = set()

    class Greet(asyncio.Protocol):
        def connection_made(self, transport):
            served.add(self)
            transport.write(b"hello")

        def connection_lost(self, error):
            served.discard(self)

    async def talk():
        (sock,) = listen("127.0.0.1", 0, None)
        # Many: what other tests have left could free descriptors meanwhile, and so let more in.
        clients = [socket.create_connection(sock.getsockname(), timeout=60) for _ in range(40)]
        gc.collect()
        three = [os.dup(0) for _ in range(3)]
        for descriptor in three:
            os.close(descriptor)
        listener = Listener(sock, Greet, None, limit=max(three) + 1 + RESERVE)
        while len(served) < 3:
            await asyncio.sleep(0.01)
        await asyncio.sleep(3 * SECONDS_TO_WAIT)
        assert len(served) < len(clients)
        for client in clients:
            assert await asyncio.to_thread(client.recv, 10) == b"hello"
            client.close()
        while served:
            await asyncio.sleep(0.01)
        with pytest.raises(ValueError, match="Address already in use"):
            listen(*sock.getsockname(), None)
        listener.close()

    asyncio.run(asyncio.wait_for(talk(), 120))
    assert caplog.text.count("connections wait: Too many open files") == 1


def test_the_limit_of_open_files_is_raised_to_what_is_allowed():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        assert raise_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
