"""Calls an ASGI application in this process, as a client that can go away at any moment."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import jsonschema

from nanopage.server.in_process import http_scope


@dataclass
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The objects of an event stream, which must be well-formed and end with [DONE]."""
        *events, done, end = self.body.decode().split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events if not event.startswith(":")]


async def call(
    app,
    method: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    leave_when=None,
    chunks: list[bytes] | None = None,
) -> Reply:
    """One call.

    Args:
        body: an object that is sent as JSON, or bytes.
        leave_when: a function of the reply so far. The client goes away as soon as it returns True.
        chunks: the parts in which the body arrives; None in this list is a client that sends no more.
    """
    content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"host": "localhost:8000", "content-type": "application/json"} | (headers or {})
    scope = http_scope(method, path, [(name.lower().encode(), value.encode()) for name, value in sent.items()])
    scope |= {"client": ("127.0.0.1", 5000), "server": ("127.0.0.1", 8000)}
    reply, arriving = Reply(), list(chunks or [content])

    async def receive() -> dict:
        if arriving:
            part = arriving.pop(0)
            if part is None:
                await asyncio.sleep(3600)
            return {"type": "http.request", "body": part, "more_body": bool(arriving)}
        while leave_when is None or not leave_when(reply):
            await asyncio.sleep(0.001 if leave_when else 3600)
        return {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        if message["type"] == "http.response.start":
            assert not reply.status
            reply.status = message["status"]
            reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            reply.body += message["body"]

    await app(scope, receive, send)
    return reply


def get(app, path: str, **options) -> Reply:
    return asyncio.run(call(app, "GET", path, **options))


def post(app, path: str, body: Any, **options) -> Reply:
    return asyncio.run(call(app, "POST", path, body, **options))


def read_schema(app) -> dict:
    """/openapi.json. Its objects have no other fields than it names."""
    schema = get(app, "/openapi.json").json
    for component in schema["components"]["schemas"].values():
        if "properties" in component:
            component["additionalProperties"] = False
    return schema


def check(schema: dict, path: str, replies: list, status: str = "200", method: str = "post") -> None:
    """Replies are what /openapi.json says."""
    content = schema["paths"][path][method]["responses"][status]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator({**content, "components": schema["components"]})
    for reply in replies:
        validator.validate(reply)
