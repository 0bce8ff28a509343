"""The live view: what its endpoints answer, who may use them, and what a pause does to the engine."""

import argparse
import asyncio
import contextlib
import json
from collections import deque
from types import SimpleNamespace

import pytest
from asgi import call, get, post
from encoders import tiny_encoder, write_modules
from fake_executor import FakeExecutor, fake_engine, tokens

from nanopage import LLM, AsyncLLM, PoolingParams
from nanopage.aio.async_llm import EngineDeadError
from nanopage.audio import WHISPER
from nanopage.server.app import create_app
from nanopage.server.live_view import LEASE_SECONDS, MAX_BEHIND, MAX_WATCHERS, LiveView, Watcher
from nanopage.server.running import Server
from nanopage.server.serve import main, parser, why_no_view
from nanopage.server.state import ServerState
from nanopage.view.explain import make_sentences
from nanopage.view.frames import Frames
from nanopage.view.invariants import check_blocks
from nanopage.view.picture import Picture

PROMPT = {"prompt_token_ids": [10] * 9}


@contextlib.contextmanager
def served(keys=(), **options):
    """(application, AsyncLLM, state) of an engine without a model."""
    llm = AsyncLLM(fake_engine(**options))
    state = ServerState(["fake"], view=LiveView(), llm=llm)
    try:
        yield create_app(state, list(keys)), llm, state
    finally:
        llm.shutdown()


def frames(reply) -> list[dict]:
    return [json.loads(line[6:]) for line in reply.body.decode().split("\n\n") if line.startswith("data: ")]


async def control(app, action, **more):
    return await call(app, "POST", "/view/control", {"action": action, **more})


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


class Got(list):
    """The frames that a watcher has got so far. `ended` is set when the server has ended the stream."""

    def __init__(self):
        super().__init__()
        self.ended = asyncio.Event()


@contextlib.asynccontextmanager
async def watching(app):
    """A client of /view/events."""
    got, leave = Got(), asyncio.Event()

    def leaves(reply) -> bool:
        got[:] = frames(reply)
        return leave.is_set()

    async def watch():
        got[:] = frames(await call(app, "GET", "/view/events", leave_when=leaves))
        got.ended.set()

    task = asyncio.create_task(watch())
    try:
        await until(lambda: got)
        yield got
    finally:
        leave.set()
        await task


async def generate(llm, name, max_tokens=5):
    async for output in llm.generate(PROMPT, tokens(max_tokens), name):
        last = output
    return last


# Who may use it


def arguments(*options) -> argparse.Namespace:
    return parser().parse_args(options)


def test_it_is_off_where_others_could_reach_it_unless_asked_for():
    assert why_no_view(arguments(), False) == ""
    assert "has a key" in why_no_view(arguments(), True)
    assert "--insecure" in why_no_view(arguments("--insecure"), False)
    assert why_no_view(arguments("--view"), True) == why_no_view(arguments("--view", "--insecure"), False) == ""
    assert "several" in why_no_view(arguments("--replicas", "2"), False)
    with pytest.raises(ValueError, match="--view does not work with --replicas"):
        main(["--view", "--replicas", "2"])


def test_where_it_is_off_every_path_says_why():
    app = create_app(ServerState(["fake"], no_view="start the server with --view"))
    for path in ("/view", "/view/events", "/view/control", "/view/runs/beams"):
        reply = get(app, path)
        assert (reply.status, reply.error["code"]) == (404, "not_served")
        assert reply.error["message"].endswith("is not served: start the server with --view")


def test_the_pages_link_to_each_other_where_both_are_served():
    with served() as (app, _, _):
        page, view = (get(app, path).body for path in ("/", "/view"))
        assert b'<a href="view" target="_blank" rel="opener">' in page and b'<a href="./" ' in view
    alone = get(create_app(ServerState(["fake"])), "/").body
    assert b'<a href="view" target="_blank" rel="opener" hidden>' in alone


CHATS, TRANSCRIPTIONS = "/v1/chat/completions", "/v1/audio/transcriptions"


@pytest.mark.parametrize(
    ("uds", "view", "config", "pages", "path"),
    [
        (None, LiveView(), {}, " http://x:1/ is a page to chat, http://x:1/view shows the engine at work.", CHATS),
        (None, None, {}, " http://x:1/ is a page to chat.", CHATS),
        (None, LiveView(), {"architecture": WHISPER}, " http://x:1/view shows the engine at work.", TRANSCRIPTIONS),
        (None, None, {"pooling": SimpleNamespace(task="embed")}, "", "/v1/embeddings"),
        (None, None, {"pooling": SimpleNamespace(task="classify")}, "", "/v1/score"),
        ("/socket", LiveView(), {}, "", CHATS),
    ],
)
def test_the_ready_line_names_the_pages_that_a_browser_can_open_and_a_call(uds, view, config, pages, path):
    config = SimpleNamespace(**{"architecture": "LlamaForCausalLM", "pooling": None} | config)
    llm = SimpleNamespace(engine=SimpleNamespace(model_config=config))
    listening = [SimpleNamespace(sockets=[SimpleNamespace(getsockname=lambda: ("x", 1))])]
    server = SimpleNamespace(state=ServerState(["fake"], view=view, llm=llm), servers=listening)
    server.config = SimpleNamespace(host="x", uds=uds, ssl_certfile=None)
    line = Server._ready_line(server)
    assert f"/v1 serves fake.{pages} Try: curl" in line and f"{path} -" in line


def test_with_a_key_only_the_empty_page_is_open():
    with served(["secret"]) as (app, _, _):
        for path, method in (("/view/events", "GET"), ("/view/control", "POST"), ("/view/runs/beams", "GET")):
            assert asyncio.run(call(app, method, path, {"action": "pause"})).status == 401
        page = get(app, "/view")
        assert page.status == 200 and b"fake" not in page.body
        reply = get(app, "/view/runs/beams", headers={"authorization": "Bearer secret"})
        assert reply.status == 200 and reply.headers["content-encoding"] == "gzip"


def test_another_site_cannot_pause_the_engine():
    with served() as (app, _, _):
        body = b'{"action": "pause"}'
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            reply = post(app, "/view/control", body, headers={"content-type": kind})
            assert reply.status in (400, 415, 422)
        guarded = create_app(ServerState(["fake"], view=LiveView()), hosts=["localhost"])
        assert get(guarded, "/view", headers={"host": "evil.example"}).status == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),  # another port of this machine
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "same-origin", "origin": "https://name-of-a-proxy"}, 503),
        ({"sec-fetch-site": "none"}, 503),
        ({"origin": "http://localhost"}, 503),
        ({}, 503),
    ],
)
def test_another_site_can_neither_watch_nor_pause(headers, status):
    app = create_app(ServerState(["fake"], view=LiveView()))  # it would answer 503, because it has no engine
    headers = {"host": "localhost"} | headers
    assert get(app, "/view/events", headers=headers).status == status
    as_json = headers | {"content-type": "application/json"}
    assert post(app, "/view/control", b'{"action": "pause"}', headers=as_json).status == status


@pytest.mark.parametrize(
    "body", [{}, {"action": "stop"}, {"action": "step", "steps": 0}, {"action": "step", "steps": 9999}]
)
def test_bad_controls_are_refused(body):
    with served() as (app, _, _):
        assert post(app, "/view/control", body).status == 400


@pytest.mark.parametrize("name", ["nothing", "..%2f..%2fview", "../view.py", "beams.jsonl.gz"])
def test_recordings_are_only_those_that_come_with_it(name):
    with served() as (app, _, _):
        assert get(app, f"/view/runs/{name}").status == 404


def test_before_the_model_is_loaded_there_is_nothing_to_see():
    app = create_app(ServerState(["fake"], view=LiveView()))
    assert get(app, "/view").status == 200
    assert get(app, "/view/events").status == 503


def test_the_requests_of_an_encoder_are_shown_without_blocks(tmp_path):
    llm = LLM(str(write_modules(tiny_encoder(tmp_path / "bert"))), device="cpu")
    frames, picture = Frames(llm.engine, "bert"), Picture()
    picture.apply(frames.key())
    assert frames.key()["num_blocks"] == 0
    for i in range(3):
        llm.engine.add_request(str(i), [4] * (2 + i), PoolingParams())
    llm.engine.plan()
    picture.apply(frames.plan())
    assert sum(map(len, picture.queues)) == 3
    llm.engine.step()
    picture.apply(frames.step(llm.engine.last_step))
    assert not any(picture.queues) and not any(blocks for _, blocks in picture.tables.values())
    assert {sentence.kind for sentence in make_sentences(llm.engine)} >= {"admit", "run", "finish"}


# What is sent


async def test_a_watcher_gets_every_step_and_no_text_or_id_of_a_request():
    with served() as (app, llm, _):
        assert not any("view" in repr(listener) for listener in llm.engine.listeners)
        num_listeners = len(llm.engine.listeners)
        async with watching(app) as got:
            assert len(llm.engine.listeners) == num_listeners + 1
            await asyncio.gather(*(generate(llm, f"a secret {i}", 6) for i in range(4)))
            await until(lambda: len(got) > 1 and got[-1].get("queues") == [[], [], []])
            assert [frame["step"] for frame in got] == [*range(len(got))]
            assert sum(frame["tokens"][2] for frame in got[1:]) == 24
            assert "secret" not in json.dumps(got)
        await until(lambda: len(llm.engine.listeners) == num_listeners)


async def test_a_second_watcher_disturbs_no_first_one_and_a_ninth_is_refused():
    with served() as (app, llm, state):
        async with contextlib.AsyncExitStack() as stack:
            watchers = [await stack.enter_async_context(watching(app)) for _ in range(MAX_WATCHERS)]
            reply = await call(app, "GET", "/view/events")
            assert (reply.status, reply.error["code"]) == (429, "too_many_watchers")
            await generate(llm, "a")
            for got in watchers:
                await until(lambda got=got: len(got) > 1 and got[-1].get("queues") == [[], [], []])
            assert state.view.num_watching == MAX_WATCHERS
        await until(lambda: state.view.num_watching == 0)


async def test_a_slow_watcher_loses_frames_but_not_the_state():
    with served() as (_, llm, state):
        watcher, view = Watcher(), state.view
        await llm.between_steps(lambda: view._attach(llm, "fake", watcher))
        for i in range(MAX_BEHIND // 20 + 5):
            await generate(llm, f"{i}", 20)
        events = [json.loads(event[6:]) for event in watcher.events]
        assert len(events) < MAX_BEHIND
        assert events[0]["frame"] == "key" and events[0]["behind"]
        assert [event["step"] for event in events] == [*range(events[0]["step"], events[-1]["step"] + 1)]


async def test_events_that_are_dropped_while_they_are_taken():
    class Dropped(deque):
        """Events that the engine's thread drops between the first and the second."""

        def popleft(self):
            first = super().popleft()
            self.clear()
            return first

    watcher = Watcher()
    watcher.events = Dropped([b"1", b"2", b"3"])
    assert watcher.take() == b"1" and watcher.take() == b""
    watcher.events = deque([b"-"] * MAX_BEHIND)
    watcher.put(b"lost")
    watcher.put(b"too")  # after what was lost, it would mean nothing
    assert watcher.behind and watcher.take() == b""
    watcher.restart(b"whole")
    watcher.put(b"next")
    assert watcher.take() == b"wholenext"


async def test_an_error_of_the_view_is_none_of_the_engine(caplog):
    with served() as (app, llm, state):
        async with watching(app) as got:
            state.view._frames._tables = None
            assert (await generate(llm, "a")).finished
            await until(lambda: len(got) > 1)
            assert got[1]["frame"] == "key"
    assert "the live view has failed" in caplog.text


# Pauses


async def test_step_by_step_each_step_is_announced_before_it_runs():
    with served() as (app, llm, _):
        async with watching(app) as got:
            assert (await control(app, "pause")).json == {"paused": True}
            task = asyncio.create_task(generate(llm, "a", 3))
            for step in range(3):
                await until(lambda: got[-1]["frame"] == "plan" and got[-1]["why"])
                planned = [text for _, _, text in got[-1]["why"]]
                assert got[-1]["step"] == step
                await control(app, "step")
                await until(lambda step=step: any(f["frame"] == "step" and f["step"] == step + 1 for f in got))
                done = next(frame for frame in got if frame["frame"] == "step" and frame["step"] == step + 1)
                assert [text for _, _, text in done["why"]][: len(planned)] == planned
            assert len((await task).outputs[0].token_ids) == 3


async def test_requests_wait_in_a_pause_and_can_be_aborted_and_health_stays_good():
    with served() as (app, llm, state):
        state.stall_seconds = 0.01
        async with watching(app) as got:
            await control(app, "pause")
            tasks = [asyncio.create_task(generate(llm, name, 4)) for name in "abc"]
            await until(lambda: len(got[-1].get("queues", [[]])[0]) + len(got[-1].get("queues", [[], []])[1]) == 3)
            await asyncio.sleep(0.05)
            assert not any(task.done() for task in tasks) and not any(frame["frame"] == "step" for frame in got)
            assert (await call(app, "GET", "/health")).status == 200
            await llm.abort("b")
            assert (await tasks[1]).outputs[0].finish_reason == "abort"
            await control(app, "step", steps=2)
            await until(lambda: got[-1]["frame"] == "plan" and got[-1]["step"] == 2)
            assert not tasks[0].done()
            assert (await control(app, "resume")).json == {"paused": False}
            assert [len((await task).outputs[0].token_ids) for task in (tasks[0], tasks[2])] == [4, 4]
            check_blocks(llm.engine.scheduler.block_manager)


async def test_the_engine_goes_on_when_the_last_watcher_leaves():
    with served() as (app, llm, _):
        assert (await control(app, "pause")).error["code"] == "nobody_watches"
        async with watching(app):
            await control(app, "pause")
            task = asyncio.create_task(generate(llm, "a"))
            await asyncio.sleep(0.02)
            assert not task.done()
        assert (await asyncio.wait_for(task, 60)).finished


async def test_a_pause_that_no_page_renews_ends(monkeypatch):
    with served() as (app, llm, state):
        async with watching(app) as got:  # a page that is frozen and closes nothing
            await control(app, "pause")
            lease = state.view._lease
            await until(lambda: asyncio.get_running_loop().time() > lease.when() - LEASE_SECONDS + 0.01)
            assert (await control(app, "renew")).json == {"paused": True}
            assert lease.cancelled() and state.view._lease.when() > lease.when()
            monkeypatch.setattr("nanopage.server.live_view.LEASE_SECONDS", 0.05)
            await control(app, "step")
            assert (await asyncio.wait_for(generate(llm, "a"), 60)).finished
            await until(lambda: any(frame.get("paused") is False for frame in got[1:]))
            assert (await control(app, "renew")).json == {"paused": False}  # which begins no pause
            assert state.view._lease is None


async def test_shutdown_works_in_a_pause():
    with served() as (app, llm, _):
        async with watching(app) as got:
            await control(app, "pause")
            task = asyncio.create_task(generate(llm, "a"))
            await until(lambda: got[-1]["frame"] == "plan" and got[-1]["why"])
            assert await asyncio.to_thread(llm.shutdown, 60)
            with pytest.raises(EngineDeadError):
                await task
            await asyncio.wait_for(got.ended.wait(), 60)
        assert got[-1]["frame"] == "end"


async def test_a_pause_lasts_through_a_step_that_fails():
    with served() as (app, llm, _):
        async with watching(app) as got:
            await control(app, "pause")
            task = asyncio.create_task(generate(llm, "a", 2))
            await until(lambda: got[-1]["frame"] == "plan" and got[-1]["why"])
            executor: FakeExecutor = llm.engine.executor
            executor.error = RuntimeError("a fault")
            await control(app, "step")
            await until(lambda: got[-1]["frame"] == "plan" and got[-1]["step"] == 1)
            assert not task.done()
            await control(app, "resume")
            assert len((await task).outputs[0].token_ids) == 2
