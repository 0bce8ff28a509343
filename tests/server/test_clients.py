"""Clients against a real server: OpenAI's SDK, raw sockets, signals."""

import asyncio
import contextlib
import json
import re
import signal
import socket
import time
import urllib.parse
from typing import Literal

import openai
import psutil
import pydantic
import pytest
from programs import ROOT
from server_process import serving

from nanopage import LLM, SamplingParams
from nanopage.server import serve

BAD_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strin"}}}
HELLO = [{"role": "user", "content": "Hello there"}]
TLS = ["--ssl-certfile", "/no/certificate", "--ssl-keyfile", "/no/key"]
READABLE = ["--ssl-certfile", __file__, "--ssl-keyfile", __file__]
GREEDY = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url, api_key="secret", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(model):
    """The answer of the offline engine."""
    llm = LLM(str(model), dtype="float32", device="cpu", max_model_len=128, enforce_eager=True)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return llm.chat(HELLO, params, use_tqdm=False)[0].outputs[0].text


def test_create_stream_and_the_stream_helper_give_the_same_answer(client, expected):
    reply = client.chat.completions.create(model="tiny", messages=HELLO, **GREEDY)
    assert reply.choices[0].message.content == expected and reply.usage.completion_tokens == 8
    chunks = client.chat.completions.create(model="tiny", messages=HELLO, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    stop = expected[-1]  # the helper takes an end by length for an error
    with client.chat.completions.stream(model="tiny", messages=HELLO, n=2, stop=stop, **GREEDY) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == [expected.split(stop)[0]] * 2
    assert kinds.count("content.done") == 2
    text = client.completions.create(model="alias", prompt=["a", "b"], logprobs=1, echo=True, max_tokens=2)
    assert [choice.index for choice in text.choices] == [0, 1]
    assert text.choices[0].logprobs.token_logprobs[0] is None


def test_vllms_fields_through_the_sdk(client):
    def ask(**fields):
        extra = {"return_token_ids": True, "truncate_prompt_tokens": 5} | fields
        return client.chat.completions.create(model="tiny", messages=HELLO, **GREEDY | {"extra_body": extra, "n": 2})

    reply = ask(prompt_logprobs=1, ignore_eos=True)
    assert len(reply.prompt_token_ids) == reply.usage.prompt_tokens == len(reply.prompt_logprobs) == 5
    assert len(reply.choices[1].token_ids) == 8 and str(reply.prompt_token_ids[1]) in reply.prompt_logprobs[1]
    beams = ask(use_beam_search=True)
    assert beams.choices[0].token_ids != beams.choices[1].token_ids


def test_responses_through_the_sdk(client):
    options = {"model": "tiny", "input": "Hello there", "temperature": 0, "max_output_tokens": 8}
    whole = client.responses.create(**options)
    with client.responses.stream(**options) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == whole.output_text != ""
    assert whole.usage.output_tokens == 8


def test_the_client_of_the_documentation(server, capsys):
    text = (ROOT / "docs" / "server.md").read_text()
    (program,) = re.findall(r"^```python\n(from openai.*?)^```", text, re.MULTILINE | re.DOTALL)
    program = program.replace("http://127.0.0.1:8000/v1", server.url).replace("SmolLM2-135M-Instruct", "tiny")
    exec(program.replace('"any"', '"secret"'), {})
    assert len(capsys.readouterr().out) > 1


def test_what_the_sdk_reads_beside_the_text(client):
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    assert client.models.retrieve("tiny").owned_by == "nanopage"
    reply = client.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, top_logprobs=2, max_tokens=3)
    assert len(reply.choices[0].logprobs.content[0].top_logprobs) == 2
    options = {"include_usage": True}
    *_, last = client.chat.completions.create(model="tiny", messages=HELLO, stream=True, stream_options=options)
    assert last.choices == [] and last.usage.total_tokens > 0


class Person(pydantic.BaseModel):
    name: Literal["Ann", "Bob"]
    married: bool


def test_parse_returns_an_object_of_the_class(client):
    fewer_spaces = {"logit_bias": {"200": -40, "201": -40, "204": -40, "223": -40}, "seed": 0, "max_tokens": 100}
    reply = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Person, **fewer_spaces)
    assert isinstance(reply.choices[0].message.parsed, Person)
    with client.chat.completions.stream(model="tiny", messages=HELLO, response_format=Person, **fewer_spaces) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == reply.choices[0].message.parsed
    reply = client.responses.parse(
        model="tiny", input="Hello", text_format=Person, max_output_tokens=600, temperature=0
    )
    assert isinstance(reply.output_parsed, Person) and reply.text.format.type == "json_schema"


@pytest.mark.parametrize(
    ("error", "fields"),
    [
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"tools": []}),
        (openai.BadRequestError, {"response_format": BAD_FORMAT}),
        (openai.NotFoundError, {"model": "gpt-4"}),
    ],
)
def test_errors_are_the_sdks_own(client, error, fields):
    with pytest.raises(error) as raised:
        client.chat.completions.create(**{"model": "tiny", "messages": HELLO} | fields)
    assert raised.value.param in fields


def test_a_wrong_key_and_what_is_not_served(server, client):
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server.url, api_key="wrong", max_retries=0).models.list()
    with pytest.raises(openai.NotFoundError, match="makes no embeddings"):
        client.embeddings.create(model="tiny", input="a")


def test_async_requests_and_their_cancellation(server):
    async def crowd():
        async with openai.AsyncOpenAI(base_url=server.url, api_key="secret", max_retries=0) as client:
            create = client.chat.completions.create
            long = {"model": "tiny", "messages": HELLO, "max_tokens": 100, "extra_body": {"ignore_eos": True}}
            tasks = [asyncio.create_task(create(**long)) for _ in range(3)]
            stream = await create(stream=True, **long)
            await anext(aiter(stream))
            await stream.close()
            tasks[0].cancel()
            replies = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(replies[0], asyncio.CancelledError)
            assert all(reply.choices[0].finish_reason == "length" for reply in replies[1:])

    asyncio.run(crowd())
    wait_until_idle(server)


def wait_until_idle(server):
    deadline = time.monotonic() + 60
    while b"num_requests_running" in (text := server.request("GET", "/metrics").body):
        lines = [
            line for line in text.splitlines() if line.startswith((b"vllm:num_requests_r", b"vllm:num_requests_w"))
        ]
        if all(line.endswith(b" 0.0") for line in lines):
            return
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_clients_that_stop_reading_or_never_finish_do_not_disturb_others(server, client, expected):
    address = urllib.parse.urlsplit(server.url)
    body = json.dumps({"messages": HELLO, "stream": True, "max_tokens": 100, "ignore_eos": True})
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    sockets = []
    for i in range(30):
        sock = socket.create_connection((address.hostname, address.port))
        sockets.append(sock)
        parts = ((head + body).encode(), (head + body[:10]).encode(), head[:40].encode())
        sock.sendall(parts[i % 3])  # never reads; half a body; half a head
    reply = client.chat.completions.create(model="tiny", messages=HELLO, **GREEDY)
    assert reply.choices[0].message.content == expected
    for sock in sockets:
        sock.close()
    wait_until_idle(server)
    assert server.request("GET", "/health", key=None).status == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\xff\x00\xff\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nX: " + b"a" * 20_000_000,
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nzz",
        b"GET /health HTTP/1.1\r\n" + b"X: " + b"a" * 200_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"".join(b"X-%d: a\r\n" % i for i in range(20_000)) + b"\r\n",
        b"GET /health?" + b"a" * 50_000 + b" HTTP/1.1\r\nX: " + b"a" * 50_000 + b"\r\n\r\n",
    ],
    ids=lambda data: repr(data[:14]),
)
def test_bytes_that_are_no_request(server, data):
    address = urllib.parse.urlsplit(server.url)
    received = b""
    with socket.create_connection((address.hostname, address.port), timeout=60) as sock, contextlib.suppress(OSError):
        sock.sendall(data)
        while part := sock.recv(65536):  # until the server closes the connection
            received += part
    assert b" 200 " not in received
    assert server.request("GET", "/health", key=None).status == 200


def test_a_head_below_the_limit_may_come_in_pieces(server):
    address = urllib.parse.urlsplit(server.url)
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 40_000 + b"\r\n\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=60) as sock:
        for start in range(0, len(head), 1000):
            sock.sendall(head[start : start + 1000])
            time.sleep(0.001)
        assert sock.recv(100).startswith(b"HTTP/1.1 200 ")


def test_pipelined_requests_are_refused(server):
    address = urllib.parse.urlsplit(server.url)
    body = json.dumps({"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True})
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=60) as sock, contextlib.suppress(OSError):
        sock.sendall((head + body + "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").encode())
        while sock.recv(65536):
            pass
    wait_until_idle(server)
    deadline = time.monotonic() + 60
    while server.request("GET", "/load").json != {"server_load": 0}:  # the reply ends after the request
        assert time.monotonic() < deadline


def test_an_idle_server_takes_no_cpu_time_and_listens_only_where_it_should(server):
    wait_until_idle(server)
    process = psutil.Process(server.process.pid)
    address = urllib.parse.urlsplit(server.url)
    listening = [c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert listening == [("127.0.0.1", address.port)]
    used = [sum(process.cpu_times()[:2])]
    while len(used) < 2 or used[-1] - used[-2] >= 0.1:  # the first second may have the end of what it did before
        assert len(used) < 20, used
        time.sleep(1)
        used.append(sum(process.cpu_times()[:2]))


def test_what_cannot_work_is_a_message_and_an_exit_code(tmp_path):
    with serving("/no/such/model", log=tmp_path / "log") as server:
        assert server.process.wait(60) == 1
    text = server.log.read_text()
    assert "Traceback" not in text and "/no/such/model" in text


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--no-such-option"], "no-such"),
        (["--host", "0.0.0.0"], "--api-key"),
        (["--host", "0.0.0.0", "--api-key", ""], "--api-key is empty"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--port", "99999"], "99999"),
        (["--root-path", "llm"], "--root-path"),
        (["--shutdown-timeout", "nan"], "nan"),
        (["--ssl-keyfile", "x"], "--ssl-certfile"),
        (["--ssl-ca-certs", "x"], "--ssl-ca-certs needs --ssl-certfile"),
        (["--ssl-cert-reqs", "2", "--ssl-ca-certs", "x"], "--ssl-ca-certs needs --ssl-certfile"),
        (["--ssl-cert-reqs", "1"], "--ssl-cert-reqs 1 needs --ssl-certfile"),
        ([*TLS, "--ssl-cert-reqs", "2"], "--ssl-cert-reqs 2 needs --ssl-ca-certs"),
        ([*TLS, "--ssl-ca-certs", "x"], "--ssl-ca-certs has no effect without --ssl-cert-reqs"),
        (TLS, "--ssl-keyfile /no/key: No such file"),
        ([*READABLE, "--ssl-cert-reqs", "2", "--ssl-ca-certs", __file__], f"--ssl-ca-certs {__file__}: "),
        (["--salt-per-key"], "--api-key"),
        (["--allowed-host", "a", "--api-key", "b"], "--allowed-host has no effect with --api-key"),
        (["--allowed-host", "a", "--insecure"], "--allowed-host has no effect with --insecure"),
        (["a", "--model", "b"], "the model is given twice: a, and --model b"),
        (["--allowed-host", "a", "--uds", "b"], "--allowed-host has no effect with --uds"),
        (["--allowed-origins", "*"], "--allowed-origins *"),
        (["--allowed-origins", "https://a.example", "https://a.example/"], "'https://a.example/' is neither an origin"),
        (["--allowed-origins", "https://a.example:443"], "'https://a.example:443' is neither"),
        (["--allowed-origins", '["https://a.example"]'], "is neither an origin"),
        (["--otlp-traces-endpoint", "localhost:4318"], "--otlp-traces-endpoint"),
    ],
)
def test_other_options_that_cannot_work_are_named_in_the_same_way(options, name, capsys):
    """In this process: `nanopage` makes a message of a ValueError, and argparse prints one itself."""
    with pytest.raises((ValueError, SystemExit)) as raised:
        serve.main(options)
    assert raised.type is ValueError or raised.value.code == 2
    assert name in str(raised.value) + capsys.readouterr().err


def test_sigterm_lets_running_requests_end_and_refuses_new_ones(model, tmp_path):
    with serving(model, "--shutdown-timeout", "30", log=tmp_path / "log") as server:
        server.url = server.wait_until_ready()
        client = openai.OpenAI(base_url=server.url, api_key="any", max_retries=0)
        create = client.chat.completions.create
        streams = [create(model=None, messages=HELLO, stream=True, max_tokens=60, seed=i) for i in range(10)]
        for stream in streams:
            next(stream)
        server.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(OSError):  # when all streams have ended, nothing listens
            while (reply := server.request("GET", "/health", key=None)).status == 200:
                pass
            assert (reply.status, reply.error["code"]) == (503, "shutting_down")
        for stream in streams:
            *_, last = stream
            assert last.choices[0].finish_reason in ("length", "stop")
        assert server.process.wait(60) == 0


def test_requests_that_outlast_the_shutdown_end_with_an_error(model, tmp_path):
    with serving(model, "--shutdown-timeout", "0.2", "--max-num-batched-tokens", 1, log=tmp_path / "log") as server:
        server.url = server.wait_until_ready()
        client = openai.OpenAI(base_url=server.url, api_key="any", max_retries=0)
        body = {"max_tokens": 100, "extra_body": {"ignore_eos": True, "n": 100}, "seed": 1}
        stream = client.chat.completions.create(model=None, messages=HELLO, stream=True, **body)
        next(stream)
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert children  # the one that renders templates
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shut down"):
            for _ in stream:
                pass
        assert server.process.wait(60) == 0
        assert not psutil.wait_procs(children, timeout=60)[1]


def test_a_client_that_does_not_read_does_not_keep_the_server_from_ending(model, tmp_path):
    with serving(model, "--shutdown-timeout", "0.2", log=tmp_path / "log") as server:
        server.url = server.wait_until_ready()
        address = urllib.parse.urlsplit(server.url)
        body = json.dumps({"prompt": "a", "n": 100, "max_tokens": 100, "ignore_eos": True, "stream": True})
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection((address.hostname, address.port)) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            while b'"server_load":1' not in server.request("GET", "/load").body:
                time.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(60) == 0


def test_a_unix_socket(model, tmp_path):
    with serving(model, "--uds", tmp_path / "socket", log=tmp_path / "log") as server:
        server.wait_until_ready()
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(tmp_path / "socket"))
            sock.sendall(b"GET /version HTTP/1.1\r\nHost: anything\r\nConnection: close\r\n\r\n")
            assert b"200 OK" in sock.recv(4096)
