"""`nanopage run-batch`: replies are those of the server, and a run that was stopped goes on."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from asgi import call
from encoders import tiny_encoder
from programs import ROOT, forked
from server_process import OPTIONS

from nanopage.server import batch, batch_files
from nanopage.server.app import create_app
from nanopage.server.batch_files import OutputFile
from nanopage.server.state import ServerState

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO = {"messages": [{"role": "user", "content": "Hello there"}]}
OPTION_LINE = [part for name, value in OPTIONS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
OPTION_LINE += ["--enforce-eager"]


def line(custom_id, body, url=CHAT, **others):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body} | others


def write(path, lines):
    """Write lines; those that are texts as they are. Returns the path."""
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))
    return path


def read(path):
    """The lines of an output by the number in their ids, each of which occurs once."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert all([*each] == ["id", "custom_id", "response", "error"] for each in lines)
    numbered = {int(re.fullmatch(r"batch_req_(\d+)", each["id"])[1]): each for each in lines}
    assert len(numbered) == len(lines)
    return numbered


def run(model, source, output, *options):
    return batch.main([str(model), "-i", str(source), "-o", str(output), *OPTION_LINE, *options])


def contents(reply):
    """A reply without what differs from call to call."""
    return re.sub(r'"\w*(id|created|_at|fingerprint|cached_tokens)": ("\w[\w.-]*"|[\d.]+)', "", json.dumps(reply))


def test_replies_are_those_of_the_server_and_a_bad_line_hurts_no_other(model, llm, tmp_path, capsys):
    schema = {"type": "object", "properties": {"x": {"enum": ["yes", "no"]}}, "required": ["x"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    good = [
        line("chat", HELLO | {"seed": 3, "max_tokens": 8, "n": 2}),
        line("json", HELLO | {"response_format": form, "max_tokens": 30, "temperature": 0}),
        line("text", {"prompt": ["one two", "three"], "max_tokens": 5, "seed": 3, "user": "me"}, TEXT),
        line("response", {"input": "Hello", "max_output_tokens": 5, "temperature": 0}, RESPONSES),
    ]
    refused = [  # by the server
        line("unknown field", HELLO | {"max_tokenz": 5}),
        line("too long", {"prompt": [5] * 200}, TEXT),
        line("other model", HELLO | {"model": "gpt-4o"}),
        line("embedding", {"input": "x"}, "/v1/embeddings"),
        line("no object", [1, 2]),
    ]
    bad = [
        (line("chat", HELLO), "duplicate_custom_id", "chat"),
        (line("get", HELLO, method="GET"), "invalid_method", "get"),
        (line("path", HELLO, "/v1/models"), "invalid_url", "path"),
        (line("stream", HELLO | {"stream": True}), "invalid_body", "stream"),
        (line("extra", HELLO, more=1), "invalid_line", "extra"),
        (line(7, HELLO), "invalid_line", None),
        ({"custom_id": "no body", "method": "POST", "url": CHAT}, "invalid_line", "no body"),
        ('{"custom_id": "half', "invalid_line", None),
        ("[]", "invalid_line", None),
        ('"\\ud800"', "invalid_line", None),
        ("[" * 100_000, "invalid_line", None),
    ]
    lines = [*good, *refused, "", *(each for each, _, _ in bad)]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert run(model, source, output) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert f"4 lines answered, {len(refused) + len(bad)} with errors;" in shown and "stopped" not in shown
    answered = read(output)
    assert len(answered) == len(lines) - 1
    app = create_app(ServerState([model.name], llm=llm, strict_fields=True))
    for number, request in enumerate([*good, *refused], 1):
        found = answered[number]
        expected = asyncio.run(call(app, "POST", request["url"], request["body"]))
        assert (found["custom_id"], found["error"]) == (request["custom_id"], None)
        assert found["response"]["status_code"] == expected.status == (200 if request in good else expected.status)
        assert len(found["response"]["request_id"]) == 32
        assert contents(found["response"]["body"]) == contents(expected.json)
    statuses = [answered[number]["response"]["status_code"] for number in range(5, 10)]
    assert statuses == [400, 400, 404, 404, 400]
    for number, (_, code, custom_id) in enumerate(bad, len(good) + len(refused) + 2):
        found = answered[number]
        assert (found["custom_id"], found["response"], found["error"]["code"]) == (custom_id, None, code)
        assert found["error"]["message"]

    # The output loses its end, within a line: only what is missing is done.
    text = output.read_bytes()
    lost = text.splitlines(keepends=True)[-4:]
    output.write_bytes(text[: -sum(map(len, lost)) + 20])
    assert run(model, source, output) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert f", {len(answered) - 4} by earlier runs" in shown and "stopped" not in shown
    assert output.read_bytes().startswith(text[: -sum(map(len, lost))])
    again = read(output)
    assert {number: each["error"] for number, each in again.items()} == {n: a["error"] for n, a in answered.items()}
    assert {n: a["custom_id"] for n, a in again.items()} == {n: a["custom_id"] for n, a in answered.items()}


def test_a_run_that_is_stopped_goes_on(model, tmp_path):
    lines = [line(str(n), {"prompt": [n % 200 + 5] * 4, "max_tokens": 30, "ignore_eos": True}, TEXT) for n in range(60)]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    env = os.environ | {"OMP_NUM_THREADS": "1"}

    def start(name, **streams):
        options = ["run-batch", model, "-i", name, "-o", output, *OPTION_LINE, "--max-num-seqs", 4]
        command = [sys.executable, "-m", "nanopage", *map(str, options)]
        return subprocess.Popen(
            command, preexec_fn=forked("nanopage", *options, env=env), cwd=ROOT, stderr=subprocess.PIPE, **streams
        )

    def wait_for(count):
        deadline = time.monotonic() + 120
        while not output.exists() or output.read_bytes().count(b"\n") < count:
            assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
            time.sleep(0.02)

    process = start("-", stdin=subprocess.PIPE)
    process.stdin.write(b"".join(source.read_bytes().splitlines(keepends=True)[:5]))
    process.stdin.flush()
    wait_for(5)  # although the input has not ended
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert b"5 lines answered" in (said := process.stderr.read()) and b"stopped: the same command" in said
    process = start(source)
    wait_for(15)
    with pytest.raises(ValueError, match="another process writes to"):
        OutputFile(str(output))
    process.kill()
    process.wait(60)
    with output.open("ab") as file:
        file.write(b'{"id":"batch_re')
    assert len(read(write(tmp_path / "copy", output.read_text().splitlines()[:-1]))) < len(lines)
    assert run(model, source, output) == 0
    assert sorted(read(output)) == [*range(1, len(lines) + 1)]
    assert {each["custom_id"] for each in read(output).values()} == {each["custom_id"] for each in lines}
    process = start(source, stdout=subprocess.PIPE)  # nothing is left to do
    assert process.wait(60) == 0 and b"0 lines answered, 0 with errors, 60 by earlier runs" in process.stderr.read()


def test_embeddings(tmp_path):
    directory = tiny_encoder(tmp_path / "bert")
    source = write(tmp_path / "in", [line("a", {"input": ["one", "two"]}, "/v1/embeddings"), line("b", HELLO)])
    assert batch.main([str(directory), "-i", str(source), "-o", str(tmp_path / "out"), "--device", "cpu"]) == 1
    found = read(tmp_path / "out")
    assert [len(each["embedding"]) > 1 for each in found[1]["response"]["body"]["data"]] == [True, True]
    assert found[2]["response"]["status_code"] == 404


class Engine:
    """What BatchRun needs of an AsyncLLM. It dies after so many calls."""

    def __init__(self, calls):
        self.engine = SimpleNamespace(config=SimpleNamespace(max_num_seqs=3))
        self.calls, self.active, self.most, self.dead_error = calls, [], [], None

    async def app(self, scope, receive, send):
        self.active.append(len((await receive())["body"]))
        self.most.append((len(self.active), sum(self.active)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.active.pop()
        self.calls -= 1
        if not self.calls:
            self.dead_error = RuntimeError("it is dead")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def test_few_lines_are_in_flight_and_a_dead_engine_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(batch, "MAX_HELD", 4000)
    lines = [line(str(n), {"x": "y" * (1000 if 30 < n < 50 else 5000 if n == 60 else 1)}) for n in range(100)]
    source = write(tmp_path / "in", lines)
    engine = Engine(90)
    with batch_files.open_input(str(source)) as file:
        work = batch.BatchRun(engine.app, engine, file, OutputFile(str(tmp_path / "out")))
        with pytest.raises(RuntimeError, match="it is dead"):
            asyncio.run(work.all())
    assert max(count for count, _ in engine.most) == 6  # twice max_num_seqs
    assert max(size for count, size in engine.most if count > 1) <= 4000 < max(size for _, size in engine.most)
    assert (
        80 <= len(read(tmp_path / "out")) == work.num_answered < 90
    )  # the others have no line: they are for the next run


def test_files_that_do_not_belong_together_are_refused(tmp_path, monkeypatch):
    source = write(tmp_path / "in", [line("a", HELLO), line("b", HELLO)])
    before = source.read_bytes()
    for text in (before, before[:-1], b'{"id": "x", "custom_id": null, "response": null}\n'):
        source.write_bytes(text)
        with pytest.raises(ValueError, match="line 1 was not written by run-batch"):
            OutputFile(str(source))
        assert source.read_bytes() == text
    source.write_bytes(before)
    answer = '{"id":"batch_req_%d","custom_id":"%s","response":null,"error":null}'
    for number, custom_id in ((2, "a"), (3, "c")):
        output = OutputFile(str(write(tmp_path / "out", [answer % (number, custom_id)])))
        engine = Engine(100)
        with pytest.raises(ValueError, match=f"an answer to another line {number}"), open(source, "rb") as file:
            asyncio.run(batch.BatchRun(engine.app, engine, file, output).all())
        output.close()


def test_long_lines_are_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_files, "MAX_LINE", 20)
    monkeypatch.setattr(batch_files, "PIECE", 7)
    path = tmp_path / "in"
    path.write_bytes(b"a" * 20 + b"\n \n" + b"b" * 100 + b"\nc\r\n" + b"d" * 21)
    with batch_files.open_input(str(path)) as file:
        found = [(number, text[:3], len(text)) for number, text in batch_files.read_lines(file)]
    assert found == [(1, b"aaa", 21), (3, b"bbb", 21), (4, b"c\r\n", 3), (5, b"ddd", 21)]
    with pytest.raises(batch_files.LineError, match="longer than"):
        batch_files.read_line(b"d" * 21)
