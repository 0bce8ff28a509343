"""A server with several models: stand-ins for their processes (model_standin.py), and in the last test real ones."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import openai
import psutil
import pytest
from asgi import call
from encoders import tiny_encoder
from programs import forked
from server_process import serving

from nanopage.server import model_process, models, residents, streaming
from nanopage.server.app import create_app
from nanopage.server.models import Models
from nanopage.server.options import named_models
from nanopage.server.serve import main, parser
from nanopage.server.state import ServerState

CHAT = "/v1/chat/completions"
NEEDED = models.PROCESS_BYTES  # of a stand-in, which has no weights


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch):
    monkeypatch.setattr(models, "COMMAND", [sys.executable, "-ESs", str(Path(__file__).with_name("model_standin.py"))])
    monkeypatch.setattr(model_process, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(residents, "FAILURE_SECONDS", 0.3)


class Served:
    """Models behind its Gate, and what can be asked of both. Each model is a directory in `root`."""

    def __init__(self, root, app, models):
        self.root, self.app, self.models = root, app, models

    def states(self):
        return {name: model.state for name, model in self.models.models.items()}

    def mark(self, name, file, text=""):
        (self.root / name / file).write_text(text)

    def unmark(self, name, file):
        (self.root / name / file).unlink()

    async def post(self, name, path=CHAT, leave_when=None, headers=None, **fields):
        body = {"model": name, "messages": []} | fields
        return await call(self.app, "POST", path, body, headers, leave_when)

    async def get(self, path):
        return (await call(self.app, "GET", path)).json

    async def until(self, condition):
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, self.states()
            await asyncio.sleep(0.01)

    async def hold(self, name):
        """Start a stream, which runs until its model's `hold` is removed. Returns it when it has begun."""
        self.mark(name, "hold")
        seen = []
        stream = asyncio.create_task(self.post(name, leave_when=seen.append, stream=True, hold=True))
        await self.until(lambda: seen and seen[-1].body)
        return stream


@contextlib.asynccontextmanager
async def several(root, names="abc", room=2, keep_alive=-1.0, keys=(), measures=False, **state):
    """A server with these models, `room` of which fit into memory. `measures`: what they really take counts."""
    for name in names:
        (root / name).mkdir()
        (root / name / "config.json").write_text("{}")
    memory = {"models_memory": int((room + 0.5) * NEEDED), "keep_alive": keep_alive, "device": "cpu"}
    options = vars(parser().parse_args([])) | memory | {"api_key": list(keys) or None}
    shared = ServerState([*names], **state)
    front = Models(shared, {name: str(root / name) for name in names}, options, [*keys])
    await asyncio.to_thread(front.load, asyncio.get_running_loop())
    front.residents.measures = measures
    app = create_app(shared, keys, ["localhost"], routes=front.routes, app=front)
    try:
        yield Served(root, app, front)
    finally:
        await front.stop()
        front.close()
        assert not front.residents.processes


async def test_models_are_loaded_when_they_are_wanted_and_unloaded_when_others_need_the_memory(tmp_path):
    async with several(tmp_path) as served:
        assert set(served.states().values()) == {"unloaded"}
        cards = await served.get("/v1/models")
        assert [card["id"] for card in cards["data"]] == ["a", "b", "c"] and cards["last_id"] == "c"
        assert cards["data"][0]["max_model_len"] is None
        pids = [(await served.post(name)).json["pid"] for name in "aba"]
        assert pids[0] == pids[2] != pids[1]
        assert (await served.post("c")).json["model"] == "c"  # b was used before a
        assert served.states() == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        with pytest.raises(ProcessLookupError):
            os.kill(pids[1], 0)
        card = await served.get("/v1/models/b")
        assert (card["state"], card["max_model_len"], card["error"]) == ("unloaded", 77, None)
        assert (await served.post("b")).json["pid"] not in pids
        assert await served.get("/health") == {"loaded": 2, "loading": 0, "unloaded": 1}
        page = (await call(served.app, "GET", "/metrics")).body.decode()
        for line in (
            'nanopage:model_loads_total{model_name="b"} 2.0',
            'nanopage:model_unloads_total{model_name="a"} 1.0',
            'nanopage:model_loaded{model_name="c"} 1.0',
            'nanopage:model_load_failures_total{model_name="c"} 0.0',
            'nanopage:model_memory_bytes{model_name="c"} 5.36870912e+08',
            'vllm:num_requests_running{engine="0",model_name="c"} 1.0',
        ):
            assert line in page, page
        assert 'model_name="directory"' not in page
        processes = [*served.models.residents.processes]
    for process in processes:
        assert process._process.returncode is not None


async def test_memory_is_measured_while_another_model_is_about_to_start(tmp_path):
    async with several(tmp_path, room=1, measures=True) as served:
        assert (await served.post("c")).status == 200
        replies = await asyncio.gather(served.post("a"), served.post("b"))
        assert [reply.status for reply in replies] == [200, 200]


async def test_a_page_of_another_site_loads_no_model(tmp_path):
    async with several(tmp_path) as served:
        reply = await served.post("a", headers={"sec-fetch-site": "cross-site", "origin": "https://evil.example"})
        assert (reply.status, reply.error["code"]) == (403, "foreign_site")
        assert served.states()["a"] == "unloaded"


async def test_a_call_and_its_reply_pass_as_they_are(tmp_path):
    async with several(tmp_path, keys=["one", "two"], max_queue_tokens=9) as served:
        headers = {"x-api-key": "two", "traceparent": "00-1", "x-request-id": "mine", "cookie": "x=1"}
        reply = await served.post("a", headers=headers, zzz=1)
        assert reply.status == 200
        assert (reply.headers["x-ignored-fields"], reply.headers["x-request-id"]) == ("zzz", "mine")
        sent = reply.json["headers"]
        assert (sent["x-api-key"], sent["traceparent"]) == ("two", "00-1")
        assert not {"authorization", "cookie"} & sent.keys()
        assert reply.json["fields"] == {"model": "a", "messages": [], "zzz": 1}
        headers = {"authorization": "Bearer one"}
        stream = await served.post("a", headers=headers, stream=True)
        assert stream.events[0]["headers"]["authorization"] == "Bearer one" and stream.events[1] == {}
        wrong = await served.post("a", headers=headers, stream=True, wrong=True)
        assert (wrong.status, wrong.error["param"]) == (400, "wrong")
        assert (await served.post("a", headers={"authorization": "Bearer x"})).status == 401
        for path in ("/v1/embeddings", "/v1/rerank", "/tokenize", "/v1/messages", "/v1/responses"):
            assert (await served.post("b", path, headers=headers)).json["target"] == path
        assert (await call(served.app, "GET", "/tokenizer_info?x", headers=headers)).status == 404
        form = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nb\r\n--x\r\ncontent-disposition: '
        form += b'form-data; name="file"; filename="f"\r\n\r\nsound\r\n--x--\r\n'
        headers["content-type"] = "multipart/form-data; boundary=x"
        heard = await call(served.app, "POST", "/v1/audio/transcriptions", form, headers)
        assert (heard.json["model"], heard.json["headers"]["content-length"]) == ("b", str(len(form)))
        assert served.states()["c"] == "unloaded" and served.models.state.num_disconnects == 0


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"model": "z"}, 404, "'z' does not exist. This server has a, b, c."),
        ({}, 400, "model is missing: this server has a, b, c"),
        ({"model": 3}, 400, "model: must be a string"),
        ([1], 400, "must be a JSON object"),
        (b"{", 400, "not valid JSON"),
        (b"[" * 100_000, 400, "nested"),
        ({"model": "a", "x": "x" * (33 << 20)}, 413, "larger than 32 MiB"),
    ],
    ids=range(7),
)
async def test_a_body_without_a_model_of_this_server_is_refused(tmp_path, body, status, message):
    async with several(tmp_path) as served:
        reply = await call(served.app, "POST", CHAT, body)
        assert reply.status == status and message in reply.error["message"]
        assert set(served.states().values()) == {"unloaded"}
        missing = await call(served.app, "GET", "/tokenizer_info")
        assert (missing.status, missing.error["param"]) == (400, "model")
        assert (await call(served.app, "GET", "/v1/models/z")).status == 404
        assert (await call(served.app, "GET", "/view")).status == 404


async def test_two_models_wanted_at_once_take_turns(tmp_path, monkeypatch):
    """In memory for one. A model that is busy all the time takes no new requests once another has waited."""
    monkeypatch.setattr(residents, "TURN_SECONDS", 0.2)
    async with several(tmp_path, room=1) as served:
        replies = await asyncio.gather(*(served.post(name) for name in "abab"))
        assert [reply.json["model"] for reply in replies] == [*"abab"]
        loads = [model.num_loads for model in served.models.models.values()]
        assert loads == [1, 1, 0]
        stream = await served.hold("a")
        other = asyncio.create_task(served.post("b"))
        await served.until(lambda: served.models.models["a"].closing)
        later = asyncio.create_task(served.post("a"))
        await asyncio.sleep(0.1)
        assert not (stream.done() or other.done() or later.done())
        served.unmark("a", "hold")
        pids = [(await each).json["pid"] for each in (other, later)]
        assert (await stream).events[0]["pid"] not in pids
        assert served.states() == {"a": "loaded", "b": "unloaded", "c": "unloaded"}


async def test_nobody_unloads_a_model_for_a_client_that_has_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(residents, "TURN_SECONDS", 0.1)
    async with several(tmp_path, room=1) as served:
        stream, closing = await served.hold("a"), served.models.models["a"]
        await served.post("b", leave_when=lambda _: closing.closing)
        await served.until(lambda: not closing.closing)
        assert served.models.state.num_disconnects == 1
        pid = (await served.post("a")).json["pid"]
        served.unmark("a", "hold")
        assert (await stream).events[0]["pid"] == pid
        served.mark("b", "slow")
        await served.post("b", leave_when=lambda _: served.models.models["b"].process)
        assert served.states()["b"] == "loading"  # for the next request; but others may have its memory
        assert (await served.post("c")).status == 200
        assert served.states() == {"a": "unloaded", "b": "unloaded", "c": "loaded"}


async def test_streams_get_comments_while_their_model_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "KEEP_ALIVE_SECONDS", 0.05)
    async with several(tmp_path) as served:
        for name in "ab":
            served.mark(name, "slow")
        calls = [served.post("a", stream=True), served.post("a", stream=True, wrong=True), served.post("a")]
        calls += [served.post("b", "/v1/messages", stream=True, wrong=True)]
        tasks = [asyncio.create_task(each) for each in calls]
        await asyncio.sleep(0.3)
        for name in "ab":
            served.unmark(name, "slow")
        stream, wrong, whole, message = await asyncio.gather(*tasks)
        assert stream.body.startswith(b": loading\n\n" * 2) and stream.events[0]["model"] == "a"
        assert (wrong.status, wrong.events[-1]["error"]["param"]) == (200, "wrong")
        assert whole.json["model"] == "a"
        assert message.body.startswith(streaming.PING) and b"event: error\n" in message.body


async def test_a_model_that_cannot_be_loaded_hurts_nobody_and_is_tried_again(tmp_path):
    async with several(tmp_path) as served:
        served.mark("a", "broken", "first\nits weights are missing")
        failed = await asyncio.gather(*(served.post("a", stream=stream) for stream in (False, True)))
        for reply in (*failed, await served.post("a")):
            assert (reply.status, reply.error["code"]) == (503, "load_failed")
            message = "'a' could not be loaded: its process ended (1): its weights are missing"
            assert message in reply.error["message"]
        assert served.models.models["a"].num_failures == 1
        assert (await served.post("b")).status == 200
        assert "weights are missing" in (await served.get("/v1/models/a"))["error"]
        served.unmark("a", "broken")
        await asyncio.sleep(residents.FAILURE_SECONDS)
        assert (await served.post("a")).status == 200
        assert (await served.get("/v1/models/a"))["error"] is None
        (tmp_path / "c" / "config.json").unlink()
        assert "has no config.json" in (await served.post("c")).error["message"]


@pytest.mark.parametrize("how", ["killed", "its engine is dead", "not healthy"])
async def test_the_death_of_a_process_ends_its_streams_and_the_next_request_loads_the_model(tmp_path, monkeypatch, how):
    monkeypatch.setattr(model_process, "HEALTH_SECONDS", 0.5)
    async with several(tmp_path) as served:
        stream, model = await served.hold("a"), served.models.models["a"]
        pid = model.process._process.pid
        if how == "killed":
            os.kill(pid, signal.SIGKILL)
        elif how == "not healthy":
            served.mark("a", "sick")
        else:
            reply = await served.post("a", dead=True)
            assert (reply.status, reply.error["code"]) == (503, "engine_dead")
        assert (await stream).events[-1]["error"]["code"] == "model_died"
        for file in served.root.glob("a/[hs]*"):
            file.unlink()
        await served.until(lambda: model.state == "unloaded")
        reply = await served.post("a")
        assert reply.json["pid"] != pid and model.num_loads == 2


async def test_a_model_that_is_too_large_alone_is_refused(tmp_path):
    async with several(tmp_path, room=1) as served:
        with open(tmp_path / "a" / "model.safetensors", "wb") as file:
            file.truncate(2 * NEEDED)
        reply = await served.post("a")
        assert (reply.status, reply.error["code"]) == (503, "model_too_large")
        assert "1.50 GiB" in reply.error["message"] and "0.75 GiB (--models-memory)" in reply.error["message"]
        served.models.residents.measures = True  # a stand-in takes far less than it was taken to
        served.models.residents.budget = NEEDED + 1
        assert [(await served.post(name)).status for name in "bc"] == [200, 200]
        assert served.models.residents.num_used < NEEDED
        served.models.residents.budget = 1000
        await served.models.residents._shrink()
        await served.until(lambda: not served.models.residents.processes)


@pytest.mark.parametrize("keep_alive", [0, 0.2])
async def test_an_idle_model_is_unloaded(tmp_path, keep_alive):
    async with several(tmp_path, keep_alive=keep_alive) as served:
        assert (await served.post("a")).status == 200
        await served.until(lambda: served.states()["a"] == "unloaded")
        await served.until(lambda: not served.models.residents.processes)
        stream = await served.hold("a")
        await asyncio.sleep(keep_alive + 0.1)
        assert served.states()["a"] == "loaded"
        served.unmark("a", "hold")
        assert (await stream).status == 200


async def test_the_queue_of_a_model_that_loads_is_limited(tmp_path):
    async with several(tmp_path, max_queue=2) as served:
        served.mark("a", "slow")
        first = [asyncio.create_task(served.post("a")) for _ in range(2)]
        await served.until(lambda: served.models.models["a"].num_waiting == 2)
        refused = await served.post("a")
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        served.unmark("a", "slow")
        assert [(await each).status for each in first] == [200, 200]


async def test_shutting_down_ends_what_waits_and_lets_what_runs_end(tmp_path):
    async with several(tmp_path) as served:
        stream = await served.hold("a")
        served.mark("b", "slow")
        waits = asyncio.create_task(served.post("b"))
        await served.until(lambda: served.models.models["b"].process)
        served.models.state.draining = True
        served.models.begin_draining()
        assert (await waits).error["code"] == "shutting_down"
        assert (await served.post("a")).error["code"] == "shutting_down"
        assert (await call(served.app, "GET", "/health")).status == 503
        served.unmark("a", "hold")
        assert (await stream).events[-1] == {}
        served.mark("a", "hold")
        served.models.state.draining = served.models.residents.draining = False
        stream = await served.hold("a")
        await served.models.stop()
        assert (await stream).events[-1]["error"]["code"] == "shutting_down"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "a=ROOT/a", "--model", "ROOT/a"], "ROOT/a: with several models, each needs a name"),
        (["--model", "a=ROOT/a", "--model", "a=ROOT/b"], "a occurs twice"),
        (["--model", "a=ROOT/z"], "no model at 'ROOT/z'"),
        (["--model", "a=ROOT"], "has no config.json"),
        (["--model", "a=ROOT/a", "ROOT/b"], "MODEL does not work with several models"),
        (["--model", "a=ROOT/a", "--served-model-name", "x"], "--served-model-name does not work with several models"),
        (["--model", "a=ROOT/a", "--lora-modules", "x=y"], "--lora-modules does not work with several models"),
        (["--model", "a=ROOT/a", "--replicas", "2"], "--replicas does not work with several models"),
        (["--model", "a=ROOT/a", "--allow-sleep"], "--allow-sleep does not work with several models"),
        (["--model", "a=ROOT/a", "--view"], "--view does not work with several models"),
        (["--model", "a=ROOT/a", "--max-num-seqs", "0"], "max_num_seqs"),
        (["--model", "a=ROOT/a", "--distributed-executor-backend", "ray"], "--distributed-executor-backend ray"),
        (["--model", "a=ROOT/a", "--models-memory", "8"], "8 is not a size such as 8GiB"),
        (["--model", "a=ROOT/a", "--keep-alive", "soon"], "soon is not a time such as 30s"),
        (["ROOT/a", "--keep-alive", "5m"], "--keep-alive needs several models"),
        (["--models-dir", "ROOT/z"], "--models-dir ROOT/z: No such file"),
        (["--models-dir", "ROOT/a"], "there is no model in it"),
        (["--models-dir", "ROOT", "--model", "b=ROOT/a"], "there is a --model b=ROOT/a as well"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_options_that_do_not_fit_are_refused(tmp_path, capsys, arguments, message):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    with pytest.raises((ValueError, FileNotFoundError, SystemExit)) as raised:
        main([argument.replace("ROOT", str(tmp_path)) for argument in arguments])
    assert message.replace("ROOT", str(tmp_path)) in f"{raised.value} {capsys.readouterr().err}"


def test_which_models_there_are(tmp_path, caplog):
    for name in ("a", "x=y", ".hidden", "empty"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "empty" / "config.json").unlink()
    (tmp_path / "small.gguf").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("")

    def found(*arguments):
        return named_models(parser().parse_args([*map(str, arguments)]))

    assert found("--model", tmp_path / "x=y") == {}  # a path of one model, as ever
    assert found("--model", "hub=owner/name") == {"hub": "owner/name"}
    expected = {"a": tmp_path / "a", "small": tmp_path / "small.gguf", "x=y": tmp_path / "x=y"}
    assert found("--models-dir", tmp_path) == {name: str(path) for name, path in expected.items()}
    assert f"{tmp_path / 'empty'} is skipped" in caplog.text
    args = parser().parse_args(["--models-dir", "d", "--models-memory", "1.5GiB", "--keep-alive", "-1"])
    assert (args.models_memory, args.keep_alive) == (3 << 29, -1)
    args = parser().parse_args(["--models-dir", "d", "--models-memory", "500MB", "--keep-alive", "5m"])
    assert (args.models_memory, args.keep_alive) == (500_000_000, 300)


def test_models_of_different_kinds_side_by_side(model, tmp_path, monkeypatch):
    """With the real program, which is told to end while a stream runs."""
    monkeypatch.undo()  # no stand-ins
    encoder = tiny_encoder(tmp_path / "encoder", max_position_embeddings=160)
    options = ["--model", f"text={model}", "--model", f"vectors={encoder}"]
    options += ["--dtype", "float32", "--api-key", "secret", "--models-memory", "8GiB", "--shutdown-timeout", 20]
    with serving(*options, log=tmp_path / "log") as server:
        url = server.wait_until_ready()
        with openai.OpenAI(base_url=url, api_key="secret", max_retries=0, timeout=100) as client:
            assert [card.state for card in client.models.list()] == ["unloaded", "unloaded"]
            (vector,) = client.embeddings.create(model="vectors", input="the cat").data
            assert len(vector.embedding) > 1
            with pytest.raises(openai.NotFoundError, match="makes no embeddings"):
                client.embeddings.create(model="text", input="the cat")
            greedy = {"model": "text", "prompt": "the cat", "temperature": 0, "max_tokens": 110}
            greedy |= {"extra_body": {"ignore_eos": True}}
            whole = client.completions.create(**greedy).choices[0].text
            stream = client.completions.create(stream=True, **greedy)
            begin = next(stream).choices[0].text
            children = psutil.Process(server.process.pid).children(recursive=True)
            assert sum("one_model" in " ".join(child.cmdline()) for child in children) == 2
            server.process.terminate()
            assert begin + "".join(chunk.choices[0].text for chunk in stream) == whole
        assert server.process.wait(60) == 0, server.log.read_text()
        assert not psutil.wait_procs(children, timeout=20)[1]
        assert "text: " in server.log.read_text() and "ready: http://localhost" not in server.log.read_text()


def test_the_process_of_a_model_ends_with_the_server_that_has_started_it(model, tmp_path):
    options = vars(parser().parse_args([])) | {"model_tag": str(model), "served_model_name": ["a"], "device": "cpu"}
    options |= {"uds": str(tmp_path / "socket"), "max_model_len": 128, "enforce_eager": True}
    program, pipes = forked("nanopage.server.one_model", "a"), {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["one_model"], preexec_fn=program, text=True, **pipes) as process:
        process.stdin.write(json.dumps(options) + "\n")
        process.stdin.flush()
        assert process.stdout.readline().startswith("ready: ")
        process.stdin.close()
        assert process.wait(20) == 0
