"""What stdout and stderr do not take never stops a server."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from programs import ROOT

LOUD = """
import logging, os, subprocess, sys
from nanopage.files.lossy_output import lose_output
lose_output()
for _ in range(100):
    print("x" * 10_000)
    print("y" * 10_000, file=sys.stderr, flush=True)
    logging.getLogger("nanopage").warning("z" * 10_000)
subprocess.run(["sh", "-c", "head -c 100000 /dev/zero; head -c 100000 /dev/zero >&2"])
"""
SERVE = "import sys, triton; from nanopage.__main__ import main; sys.exit(main())"  # Triton: as some kernels do


@contextlib.contextmanager
def sink(kind: str):
    """A descriptor that takes nothing, and what keeps it so."""
    kept = []
    if kind == "full socket":
        ours, other = socket.socketpair()
        kept, descriptor = [other], ours.detach()
    elif kind == "/dev/full":
        descriptor = os.open(kind, os.O_WRONLY)
    else:
        reading, descriptor = os.pipe()
        if kind == "no reader":
            os.close(reading)
        else:
            kept = [os.fdopen(reading, "rb")]
    if kept:
        os.set_blocking(descriptor, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(descriptor, b"x" * 4096)
        os.set_blocking(descriptor, True)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
        for file in kept:
            file.close()


@pytest.mark.parametrize("kind", ["full pipe", "full socket", "/dev/full", "no reader"])
def test_output_that_nobody_takes_stops_nothing(kind):
    with sink(kind) as descriptor:
        code = LOUD.replace("subprocess.run", "# subprocess.run") if kind == "full socket" else LOUD
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=descriptor, stderr=descriptor, timeout=60)
    assert done.returncode == 0


def test_output_that_is_taken_is_whole():
    code = "from nanopage.files.lossy_output import lose_output; import sys; lose_output(); print('a\\u00e9', end=''); "
    code += "print('b' * 20000, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60)
    assert (done.stdout.decode(), done.stderr.decode()) == ("a\u00e9", "b" * 20000 + "\n")


@pytest.mark.parametrize("kind", ["full pipe", "closed"])
def test_a_server_answers_and_ends_whatever_becomes_of_its_output(model, tmp_path, kind):
    with socket.socket() as free, open(tmp_path / "log", "wb") as log, sink("full pipe") as pipe:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [sys.executable, "-c", SERVE, "serve", "--model", model, "--port", port, "--enforce-eager"]
        process = subprocess.Popen(
            [str(part) for part in (*command, "--max-model-len", 128)],
            cwd=ROOT, stdout=pipe, stderr=log, preexec_fn=(lambda: os.close(1)) if kind == "closed" else None,
        )  # fmt: skip
        try:
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
            while process.poll() is None and time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{url}/health", timeout=60)
                    break
                time.sleep(0.1)
            body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
            request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
            assert urllib.request.urlopen(request, timeout=30).status == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
    said = (tmp_path / "log").read_text()
    assert "nanopage: shutting down\n" in said  # no request had to end
    assert "nanobind" not in said  # its objects were freed
