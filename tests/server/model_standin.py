"""Stands in for the process of a model in tests of a server with several: it starts at once and needs no torch.

The directory of its model says what it does. It fails to start while it has a file `broken`, whose text it says. It
does not listen while it has a file `slow`, and is not healthy while it has a file `sick`. Its replies have what it was
sent. A body with `hold` gets a stream whose last event comes once the file `hold` is gone.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

OPTIONS = json.loads(sys.stdin.readline())
MODEL, (NAME,) = Path(OPTIONS["model_tag"]), OPTIONS["served_model_name"]
METRICS = '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name="directory",engine="0"} 1\n'


async def until_gone(name):
    while (MODEL / name).exists():
        await asyncio.sleep(0.01)


async def answer(reader, writer):
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    (method, target, _), *lines = (line.split(" ", 2) for line in head.splitlines()[:-1])
    headers = {name.rstrip(":").lower(): " ".join(rest) for name, *rest in lines}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    fields = json.loads(body) if headers.get("content-type") == "application/json" else {}
    echo = {"model": NAME, "pid": os.getpid(), "method": method, "target": target, "headers": headers, "fields": fields}
    streams = bool(fields.get("stream"))
    status, kind = "200 OK", "text/event-stream" if streams else "application/json"
    if target == "/v1/models":
        echo = {"data": [{"id": NAME, "max_model_len": 77, "root": NAME}]}
    if fields.get("wrong"):
        status, kind, streams = "400 Bad Request", "application/json", False
        echo = {"error": {"message": "wrong: no", "type": "invalid_request_error", "param": "wrong", "code": None}}
    if fields.get("dead"):
        status, echo = "503 Service Unavailable", {"error": {"message": "it has died", "code": "engine_dead"}}
    if target == "/health" and (MODEL / "sick").exists():
        status = "503 Service Unavailable"
    text = METRICS if target == "/metrics" else json.dumps(echo, separators=(",", ":"))
    size = "transfer-encoding: chunked" if streams else f"content-length: {len(text)}"
    writer.write(f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\nx-ignored-fields: zzz\r\n{size}\r\n\r\n".encode())
    if not streams:
        writer.write(text.encode())
    else:
        send(writer, f"data: {text}\n\ndata: {{")  # half an event, too
        await writer.drain()
        if fields.get("hold"):
            await until_gone("hold")
        send(writer, "}\n\ndata: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
    await writer.drain()
    writer.close()


def send(writer, text):
    writer.write(b"%x\r\n%s\r\n" % (len(text), text.encode()))


async def main():
    if (MODEL / "broken").exists():
        sys.exit((MODEL / "broken").read_text())
    asyncio.get_running_loop().add_reader(0, lambda: os._exit(0))  # the server has ended
    await until_gone("slow")
    print(f"nanopage: {NAME} is there\nready: at a secret place", flush=True)
    await (await asyncio.start_unix_server(answer, OPTIONS["uds"])).serve_forever()


asyncio.run(main())
