"""Connection: clients that do not read their reply."""

import asyncio
import contextlib

import pytest
import uvicorn

from nanopage.server import connection
from nanopage.server.connection import Connection

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
