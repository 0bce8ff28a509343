"""bench.py serve --base-url: against a real server, and against servers that answer wrongly."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from helpers import run_bench
from server_process import serving
from test_serve import SCHEMA, check

LENGTHS = ("--num-prompts", 6, "--input-len", "4-12", "--output-len", "2-5", "--num-warmups", 1)


@pytest.fixture(scope="module")
def url(model, tmp_path_factory):
    """Of a server with the key "secret"."""
    log = tmp_path_factory.mktemp("server") / "log"
    options = ("--dtype", "float32", "--api-key", "secret", "--served-model-name", "tiny")
    with serving(model, *options, log=log) as server:
        yield server.wait_until_ready()


def run_serve(model, tmp_path, url, *arguments):
    """The exit code, what was printed, and the JSON."""
    file = tmp_path / "result.json"
    done = run_bench("serve", "--model", model, "--base-url", url, *LENGTHS, "--json", file, *arguments)
    return done.exit_code, " ".join(done.output.split()), json.loads(file.read_text()) if file.exists() else None


def test_a_server_is_measured_like_an_engine(model, tmp_path, url, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    options = ("--request-rate", "50,inf", "--goodput", "ttft:60000", "--max-concurrency", 3, "--save-detailed")
    code, printed, result = run_serve(model, tmp_path, url, *options)
    assert code == 0, printed
    check(result, SCHEMA)
    assert result["header"]["model"] == "tiny" and result["header"]["versions"].startswith("server 0.")
    assert printed.count("Serving Benchmark Result") == 2
    assert "Little's Law" not in printed and "Preemptions" not in printed
    for run in result["runs"]:
        assert run["completed"] == 6 and run["failed"] == 0 and run["preemptions"] is None
        assert 1 <= run["max_concurrent_requests"] <= 3
        assert run["total_output_tokens"] == sum(request["output_len"] for request in run["requests"])
        for request in run["requests"]:
            times = request["token_times"]
            # A chunk may have the text of several tokens: of a character that is spread over them.
            assert 1 <= len(times) <= request["output_len"] and times == sorted(times)
            assert request["arrival"] < times[0] < run["duration"]


def test_what_the_server_refuses_is_a_failed_request(model, tmp_path, url, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    code, printed, result = run_serve(model, tmp_path, url)
    assert code == 1 and "/v1/models answers 401" in printed and result is None
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    code, printed, _ = run_serve(model, tmp_path, url, "--input-len", 200)
    assert code == 1 and "more than the server takes, 128" in printed


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--dtype", "float32"], "--dtype"),
        (["--eager"], "--eager"),
        (["--quantization", "int8"], "--quantization"),
        (["--plot", "x.png"], "--plot"),
        (["--base-url", "localhost:8000"], "--base-url"),
        (["--base-url", "http://localhost:many"], "--base-url"),
        (["--base-url", "http://me:secret@localhost"], "--base-url"),
    ],
)
def test_options_that_a_server_cannot_follow_are_refused_by_name(model, tmp_path, options, named):
    code, printed, _ = run_serve(model, tmp_path, "http://127.0.0.1:9", *options)
    assert code == 2 and named in printed


def test_a_server_that_is_not_there_is_an_error(model, tmp_path):
    code, printed, _ = run_serve(model, tmp_path, "http://127.0.0.1:9")
    assert code == 1 and "refused" in printed


MODELS = json.dumps({"data": [{"id": "fake"}]})
CHUNK = 'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'


def usage(count):
    return 'data: {"choices": [], "usage": {"completion_tokens": %d}}\n\ndata: [DONE]\n\n' % count  # noqa: UP031


@contextlib.contextmanager
def fake_server(models, status, reply):
    """A server with fixed answers. Connections end with them."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(200 if self.path == "/v1/models" else 404, models)

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert asked["ignore_eos"] and asked["stream"] and len(asked["prompt"]) >= 4
            self.answer(status, reply)

        def answer(self, status, body):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "reply", "error"),
    [
        (200, CHUNK + CHUNK + usage(2), None),
        (200, CHUNK + usage(1), "1 of 2 tokens"),
        (200, CHUNK + CHUNK, "ended without [DONE]"),
        (200, CHUNK + 'data: {"error": {"message": "no more memory"}}\n\ndata: [DONE]\n\n', "no more memory"),
        (200, "data: {not json}\n\n", "malformed"),
        (429, '{"error": {"message": "queue is full"}}', "status 429"),
    ],
)
def test_wrong_answers_fail_their_requests_and_no_others(model, tmp_path, status, reply, error):
    with fake_server(MODELS, status, reply) as url:
        code, _, result = run_serve(model, tmp_path, url, "--output-len", 2, "--num-warmups", 0)
    (run,) = result["runs"]
    assert result["header"]["versions"] == "not told by the server"
    if error is None:
        assert code == 0 and run["completed"] == 6 and run["mean_itl_ms"] is not None
    else:
        assert code == 1 and run["failed"] == 6 and all(error in each for each in run["errors"]), run["errors"]


@pytest.mark.parametrize("models", ["{}", '{"data": []}', "hello", '{"data": [{"id": 1}]}'])
def test_a_server_without_models_is_an_error(model, tmp_path, models):
    with fake_server(models, 200, "") as url:
        code, printed, _ = run_serve(model, tmp_path, url)
    assert code == 1 and "/v1/models answers 200" in printed
