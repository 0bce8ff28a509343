"""`nanopage serve` in a process of its own, for tests."""

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import time
import urllib.parse
from pathlib import Path

from asgi import Reply
from programs import ROOT, forked

# Of engines in the process of a test.
OPTIONS = {"dtype": "float64", "device": "cpu", "max_model_len": 128, "num_gpu_blocks_override": 64, "block_size": 8}
OPTIONS["max_num_batched_tokens"] = 32


class ServerProcess:
    """`nanopage serve` in a process of its own, on a free port of 127.0.0.1. Ray, for replicas, is never in a fork."""

    def __init__(self, *arguments: object, log: Path):
        options = ["--port", 0, "--enforce-eager", "--max-model-len", 128, *arguments]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        program = None if "--replicas" in options else forked("nanopage", "serve", *options, env=env)
        command = [sys.executable, "-m", "nanopage", "serve", *map(str, options)]
        self.log = log
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                command, preexec_fn=program, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=env
            )

    def wait_until_ready(self) -> str:
        """The URL of the API."""
        deadline = time.monotonic() + 120
        while (ready := re.search(r"ready: (\S+) serves", self.log.read_text())) is None:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        self.url = ready[1]
        return self.url

    def request(self, method: str, path: str, body: object = None, key: str | None = "secret", **headers: str) -> Reply:
        """A reply over HTTP. Args: body: bytes, or an object that is sent as JSON."""
        headers |= {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        connection = http.client.HTTPConnection(urllib.parse.urlsplit(self.url).netloc, timeout=60)
        content = body if body is None or isinstance(body, bytes) else json.dumps(body)
        connection.request(method, path, content, headers)
        reply = connection.getresponse()
        return Reply(reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read())


@contextlib.contextmanager
def serving(*arguments, log):
    server = ServerProcess(*arguments, log=log)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()
