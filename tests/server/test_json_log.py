"""--log-format json: each line is an object."""

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request

from programs import ROOT
from server_process import serving

LOUD = """
import logging, sys, threading, warnings
from nanopage.files.json_log import REQUEST_ID, log_as_json
log_as_json()
print("printed", "twice\\n\\nonce", end="\\n")
sys.stderr.write("0 %\\r50 %\\r100 %\\n  half a")
print(" line", file=sys.stderr)
warnings.warn("careful")
logging.getLogger("nanopage").info("a\\x1b[2J\\u202e%s", "\\ud800")
logging.getLogger("nanopage").info("x" * 30_000)
logging.getLogger("other").info("not shown")
logging.getLogger("other").warning("of a library")
REQUEST_ID.set("id")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("nanopage").exception("failed")
for work in (lambda: [][1], sys.exit):
    thread = threading.Thread(target=work, name="worker")
    thread.start()
    thread.join()
import os
assert os.isatty(sys.stderr.fileno()) is False and sys.stderr.encoding == "utf-8"
raise ValueError("the end")
"""


def read(text):
    """The objects of a log."""
    return [json.loads(line) for line in text.splitlines()]


def test_what_is_logged_printed_and_raised_is_json():
    done = subprocess.run([sys.executable, "-c", LOUD], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.isascii()
    lines = read(done.stderr)
    said = [(line["level"], line["logger"], line["message"][:24]) for line in lines]
    assert said[:5] == [
        ("info", "stdout", "printed twice"),
        ("info", "stdout", "once"),
        ("warning", "stderr", "100 %"),
        ("warning", "stderr", "  half a line"),
        ("warning", "py.warnings", "<string>:8: UserWarning:"),
    ]
    assert lines[5]["message"] == "a\\x1b[2J\\u202e\\ud800"
    assert "(10,000 characters)" in lines[6]["message"] and len(lines[6]["message"]) < 21_000
    assert said[7] == ("warning", "other", "of a library")
    failed, thread, end = lines[8:]
    assert failed["message"] == "failed" and failed["request_id"] == "id"
    assert failed["exception"].endswith("ZeroDivisionError: division by zero")
    assert (thread["level"], thread["message"]) == ("critical", "uncaught exception in worker")
    assert "IndexError" in thread["exception"] and "ValueError: the end" in end["exception"]


def test_a_server_logs_each_reply(model, tmp_path):
    with serving(model, "--log-format", "json", log=tmp_path / "log") as server:
        url = server.wait_until_ready().removesuffix("/v1")

        def call(path, body=None, **headers):
            data = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(url + path, data, {"content-type": "application/json"} | headers)
            try:
                return urllib.request.urlopen(request, timeout=60).read()
            except urllib.error.HTTPError as error:
                return error.read()

        call("/health")
        reply = json.loads(call("/v1/completions", {"prompt": "the cat", "max_tokens": 3}, **{"x-request-id": "mine"}))
        call("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "stream": True})
        call("/v1/completions", {"prompt": 5})
        call("/no/" + "x" * 300)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    lines = read((tmp_path / "log").read_text())
    messages = [line["message"] for line in lines]
    assert any(message.startswith("ready: ") for message in messages) and messages[-1] == "shutting down"
    replies = [line for line in lines if line["logger"] == "nanopage.access"]
    replies.sort(key=lambda line: (line["status"], line["request_id"] != "mine"))  # a stream's may come late
    shown = [(line["method"], line["path"][:20], line["status"], line.get("end")) for line in replies]
    assert shown == [
        ("POST", "/v1/completions", 200, "complete"),
        ("POST", "/v1/completions", 200, "complete"),
        ("POST", "/v1/completions", 400, None),
        ("GET", "/no/" + "x" * 16, 404, None),
    ]
    first, second, *_ = replies
    assert (first["request_id"], first["id"], first["completion_tokens"]) == ("mine", reply["id"], 3)
    assert first["prompt_tokens"] == reply["usage"]["prompt_tokens"] and 0 < first["duration"] < 60
    assert second["completion_tokens"] == 4 and len(second["request_id"]) == 32
    assert len(replies[3]["path"]) == 200
    assert not [message for message in messages if "complete after" in message], "once is enough"
