"""A server of OpenAI's API under requests that arrive in real time: what `bench.py serve --base-url` measures.

Any server with /v1/models and a streaming /v1/completions that takes token ids and `ignore_eos` can be measured:
nanopage's, vLLM's, llama.cpp's. Each request has a thread and a connection of its own. Threads take less CPU time,
which the server may need, than an event loop with a client library.
"""

import http.client
import os
import socket
import ssl
import threading
import time
import urllib.parse
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec

from benchmarks.machine import cpu_name
from benchmarks.metrics import Run, Served
from benchmarks.peers.protocol import Work
from nanopage.config.model import ModelConfig

SECONDS_OF_SILENCE = 600.0  # after which a request counts as failed
MAX_THREADS = 4096  # requests at once
MAX_MESSAGE = 300  # characters of a server's error


class Server:
    """A server at `base_url`, such as http://127.0.0.1:8000. A key for it is read from OPENAI_API_KEY.

    Args: config: the config of the model that it serves. Random prompts are drawn from its vocabulary.
    Raises: OSError if the server does not answer, ValueError if it answers as no such server does.
    """

    def __init__(self, base_url: str, config: ModelConfig):
        self.url = urllib.parse.urlsplit(base_url.rstrip("/").removesuffix("/v1"))
        self.model_config = config
        self.headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            self.headers["Authorization"] = f"Bearer {key}"
        status, models = self._get("/v1/models")
        data = models.get("data") if isinstance(models, dict) else None
        if status != 200 or not isinstance(data, list) or not data or not isinstance(data[0].get("id"), str):
            raise ValueError(f"{base_url}/v1/models answers {status}: {_shown(models)}")
        self.model: str = data[0]["id"]
        self.max_model_len = data[0].get("max_model_len") or config.max_position_embeddings
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()

    def describe(self, what: str) -> dict[str, str]:
        """What a reader must know to judge or repeat the figures."""
        status, version = self._get("/version")
        known = status == 200 and isinstance(version, dict)
        return {
            "bench": what,
            "model": self.model,
            "device": f"the server at {self.url.geturl()}; this client runs on {cpu_name()}",
            "switches": "those of the server",
            "versions": f"server {version['version']}" if known and "version" in version else "not told by the server",
        }

    def drive(self, run: Run, work: list[Work], max_concurrency: int | None = None) -> None:
        """Send each request when it has arrived, and wait until all are done. Fills `run` as it goes, so that an
        exception leaves what was measured.

        Args: max_concurrency: most unanswered requests; further requests wait.
        Raises: ValueError for more requests at once than this client has threads.
        """
        limit = min(max_concurrency or len(work), len(work))
        if limit > MAX_THREADS:
            raise ValueError(f"{limit:,} requests at once are more than {MAX_THREADS:,}: give --max-concurrency")
        start = time.perf_counter()
        pool = ThreadPoolExecutor(max(1, limit))
        futures: list[Future] = []
        try:
            for served, item in zip(run.requests, work, strict=True):
                time.sleep(max(0.0, start + served.arrival - time.perf_counter()))
                futures.append(pool.submit(self._request, served, item, start, run))
            for future in futures:
                future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            with self._lock:
                for connection in self._open:  # after an exception: the server drops requests whose clients have gone
                    if connection.sock is not None:
                        connection.sock.shutdown(socket.SHUT_RDWR)
            run.duration = time.perf_counter() - start

    def _request(self, served: Served, work: Work, start: float, run: Run) -> None:
        """Send one request and record when its tokens come, or why it failed."""
        body = {
            "model": self.model,
            "prompt": work.prompt,
            "max_tokens": work.output_len,
            "temperature": 0,
            "repetition_penalty": 1.0,  # the model's generation_config.json may set one
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = self._connection()
        with self._lock:
            self._open.add(connection)
            run.max_in_engine = max(run.max_in_engine, len(self._open))
        try:
            connection.request("POST", f"{self.url.path}/v1/completions", msgspec.json.encode(body), self.headers)
            response = connection.getresponse()
            if response.status != 200:
                served.error = f"status {response.status}: {_shown(response.read(100_000))}"
                return
            times, count = read_events(response, start)
            if count != served.output_len:
                served.error = f"{count} of {served.output_len} tokens"
            served.token_times = times
        except (OSError, http.client.HTTPException, ValueError) as error:
            served.error = f"{type(error).__name__}: {error}"
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _get(self, path: str) -> tuple[int, Any]:
        """(status, body) of a path; the body is bytes if it is not JSON."""
        connection = self._connection()
        try:
            connection.request("GET", self.url.path + path, headers=self.headers)
            response = connection.getresponse()
            data = response.read(1_000_000)
        except http.client.HTTPException as error:
            raise ValueError(f"{self.url.geturl()} does not speak HTTP: {type(error).__name__}") from None
        finally:
            connection.close()
        try:
            return response.status, msgspec.json.decode(data)
        except ValueError:
            return response.status, data

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self.url.hostname or "", self.url.port
        if self.url.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(host, port, timeout=SECONDS_OF_SILENCE, context=context)
        return http.client.HTTPConnection(host, port, timeout=SECONDS_OF_SILENCE)


def read_events(response: Any, start: float) -> tuple[list[float], int | None]:
    """(times of the chunks with tokens, output tokens as the server counts them) of a stream of completions.

    Chunks that only end a choice have no token. Times are seconds after `start`.

    Raises: ValueError for an event that is an error, or a stream that ends too early.
    """
    times: list[float] = []
    count = None
    for line in response:
        now = time.perf_counter() - start
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return times, count
        event = msgspec.json.decode(data)
        if "error" in event:
            raise ValueError(_shown(event["error"]))
        for choice in event.get("choices") or ():
            if choice.get("text") or choice.get("finish_reason") is None:
                times.append(now)
        if usage := event.get("usage"):
            count = usage.get("completion_tokens")
    raise ValueError("the stream ended without [DONE]")


def _shown(value: Any) -> str:
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "..."
