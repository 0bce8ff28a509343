"""Calls of the server's application in this process, without a connection."""

import asyncio
import logging

from starlette.types import ASGIApp, Message, Scope

logger = logging.getLogger("nanopage")


def http_scope(method: str, path: str, headers: list[tuple[bytes, bytes]]) -> Scope:
    """The ASGI scope of a call. Gate, or who replaces it, adds `nanopage.key` and `nanopage.send`."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        "state": {},
    }


async def post(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """The status and the body of the reply to a JSON body. If the caller is cancelled, so is the call."""
    status, reply = 0, bytearray()
    request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if request:
            return request.pop()
        return await asyncio.get_running_loop().create_future()  # never: this client does not go away

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        reply.extend(message.get("body", b""))

    try:
        await app(http_scope("POST", path, [(b"content-type", b"application/json")]), receive, send)
    except Exception:  # Starlette raises what it has answered with a 500
        if status != 500:
            raise
        logger.exception(f"a call of {path} failed")
    return status, bytes(reply)
