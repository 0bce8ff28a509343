"""`nanopage serve --replicas`: one server with two replicas for all tests. The last ones kill a replica and end it."""

import asyncio
import contextlib
import json
import os
import re
import signal
import time

import openai
import psutil
import pytest
from asgi import call
from helpers import LONG
from server_process import serving

from nanopage import LLM, SamplingParams
from nanopage.distributed import ray_cluster
from nanopage.server.app import create_app
from nanopage.server.errors import ApiError
from nanopage.server.relay import STOP, Reply
from nanopage.server.routing import Router
from nanopage.server.serve import main
from nanopage.server.state import ServerState
from nanopage.server.streaming import DONE, PING

HELLO = [{"role": "user", "content": "Hello there"}]
GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}
MANY = 900  # tokens: a stream that is still running when a test has done something to it


class Cluster:
    """A server with two replicas that run one sequence at a time, and what can be asked of it."""

    def __init__(self, server):
        self.server, self.url, self.request = server, server.wait_until_ready(), server.request
        self.processes = psutil.Process(server.process.pid).children(recursive=True)

    def replicas(self):
        found = []
        for child in psutil.Process(self.server.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                if "ServeReplica" in " ".join(child.cmdline()):
                    found.append(child.pid)
        return found

    def metric(self, name, **labels):
        """The sum over the replicas."""
        text = self.request("GET", "/metrics").body.decode()
        lines = [line for line in text.splitlines() if re.match(rf"{name}(\{{| )", line)]
        return sum(
            float(line.split()[-1])
            for line in lines
            if all(f'{label}="{value}"' in line for label, value in labels.items())
        )

    def wait_for(self, value, name, **labels):
        deadline = time.monotonic() + 180
        while self.metric(name, **labels) != value:
            assert time.monotonic() < deadline, (name, self.metric(name, **labels), self.server.log.read_text())
            time.sleep(0.05)

    def wait_until_idle(self):
        self.wait_for(0, "vllm:num_requests_running")
        self.wait_for(0, "vllm:num_requests_waiting")


@pytest.fixture(scope="module")
def cluster(model, tmp_path_factory):
    options = ("--dtype", "float64", "--max-model-len", 1024, "--max-num-seqs", 1, "--api-key", "secret")
    options += ("--served-model-name", "tiny", "--replicas", 2, "--shutdown-timeout", 20)
    options += ("--distributed-executor-backend", "mp") if LONG else ()
    with serving(model, *options, log=tmp_path_factory.mktemp("replicas") / "log") as server:
        cluster = Cluster(server)
        yield cluster
        server.process.terminate()
        with contextlib.suppress(Exception):
            server.process.wait(30)


@pytest.fixture(scope="module")
def client(cluster):
    with openai.OpenAI(base_url=cluster.url, api_key="secret", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(model):
    """A function: the text that the offline engine gives."""
    llm = LLM(str(model), dtype="float64", device="cpu", max_model_len=1024, enforce_eager=True)

    def text(prompt, num_tokens):
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text

    return text


def test_replies_are_those_of_one_engine(cluster, client, expected):
    prompts = ["the cat", "a dog in the house"]
    whole = client.completions.create(model="tiny", prompt=prompts, max_tokens=8, **GREEDY)
    assert [choice.text for choice in whole.choices] == [expected(prompt, 8) for prompt in prompts]
    for prompt in prompts:
        stream = client.completions.create(model="tiny", prompt=prompt, max_tokens=50, stream=True, **GREEDY)
        assert "".join(chunk.choices[0].text for chunk in stream) == expected(prompt, 50)
    options = {"model": "tiny", "input": "Hello there", "temperature": 0, "max_output_tokens": 8}
    whole = client.responses.create(**options)
    with client.responses.stream(**options) as stream:
        assert "".join(e.delta for e in stream if e.type == "response.output_text.delta") == whole.output_text != ""
    assert cluster.metric("nanopage:client_disconnects_total") == 0
    assert "cut off" not in cluster.server.log.read_text()


def test_what_is_not_text_and_errors_go_through_as_they_are(cluster, client):
    (model,) = client.models.list()
    assert model.id == "tiny" and model.max_model_len == 1024
    body = {"prompt": "the cat", "max_tokens": 1, "zzz": 1}
    reply = cluster.request("POST", "/v1/completions", body, **{"x-request-id": "mine"})
    assert (reply.status, reply.headers["x-ignored-fields"], reply.headers["x-request-id"]) == (200, "zzz", "mine")
    ids = cluster.request("POST", "/tokenize", {"prompt": "the cat"}).json["tokens"]
    assert len(ids) == reply.json["usage"]["prompt_tokens"]
    assert cluster.request("POST", "/detokenize", {"tokens": ids}).status == 200
    assert cluster.request("GET", "/tokenizer_info").status == 200
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="a", temperature=-1, stream=True)
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    with pytest.raises(openai.NotFoundError, match="makes no embeddings"):
        client.embeddings.create(model="tiny", input="a")
    assert cluster.request("POST", "/v1/completions", [1]).status == 400
    assert cluster.request("GET", "/v1/completions").status == 405
    assert cluster.request("POST", "/v1/completions", body, key="wrong").status == 401
    for path, text in (("/health", b""), ("/", b"<html"), ("/version", b"version"), ("/load", b"server_load")):
        reply = cluster.request("GET", path)
        assert reply.status == 200 and text in reply.body
    assert cluster.request("GET", "/health", key=None).status == 200


def test_requests_go_where_their_prefix_is_cached_and_others_to_the_idlest(cluster, client):
    def cached(prompt):
        usage = client.completions.create(model="tiny", prompt=prompt, max_tokens=1).usage
        return usage.prompt_tokens_details.cached_tokens

    prompts = [f"{i} " + "the cat and the dog " * 30 for i in range(4)]
    assert [cached(prompt) > 0 for prompt in prompts] == [False] * 4
    assert [cached(prompt + "in the house") > 0 for prompt in prompts] == [True] * 4
    before = [cluster.metric("vllm:request_success_total", engine=i) for i in range(2)]
    streams = [client.completions.create(model="tiny", prompt=p, max_tokens=MANY, stream=True) for p in ("a", "b")]
    for stream in streams:
        next(stream)  # both run at once, so they are on different replicas
        stream.close()
    cluster.wait_until_idle()
    assert [cluster.metric("vllm:request_success_total", engine=i) for i in range(2)] == [n + 1 for n in before]


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_goes_away_ends_its_request_at_the_replica(cluster, streams):
    async def leave():
        async with openai.AsyncOpenAI(base_url=cluster.url, api_key="secret", max_retries=0) as client:
            options = {"model": "tiny", "prompt": "the cat", "max_tokens": MANY, "stream": streams} | GREEDY
            task = asyncio.create_task(client.completions.create(**options))
            if streams:
                stream = await task
                await anext(aiter(stream))
                await stream.close()
            else:
                while cluster.metric("vllm:num_requests_running") == 0:
                    await asyncio.sleep(0.01)
                task.cancel()

    cluster.wait_until_idle()
    before = cluster.metric("vllm:request_success_total", finished_reason="abort")
    gone = cluster.metric("nanopage:client_disconnects_total")
    asyncio.run(leave())
    cluster.wait_until_idle()
    assert cluster.metric("vllm:request_success_total", finished_reason="abort") == before + 1
    assert cluster.metric("nanopage:client_disconnects_total") == gone + 1


@pytest.mark.parametrize("killed", ["replica", *(["worker"] if LONG else [])])
def test_a_death_costs_only_what_the_clients_had_begun_to_read(cluster, expected, killed):
    """Of a replica, or of the worker of its engine."""
    cluster.wait_until_idle()
    replica = cluster.replicas()[0]
    victim = replica if killed == "replica" else psutil.Process(replica).children()[0].pid
    losses, retries = (cluster.metric(f"nanopage:replica_{what}_total") for what in ("losses", "retries"))

    async def read(stream, texts):
        async for chunk in stream:
            texts.append(chunk.choices[0].text)
        return "".join(texts)

    async def crowd():
        async with openai.AsyncOpenAI(base_url=cluster.url, api_key="secret", max_retries=0) as client:
            create = client.completions.create
            long = {"model": "tiny", "max_tokens": MANY, "stream": True} | GREEDY
            short = {"model": "tiny", "max_tokens": 20} | GREEDY
            running = [await create(prompt=prompt, **long) for prompt in ("a", "b")]
            begun = [[(await anext(aiter(stream))).choices[0].text] for stream in running]
            # Each replica runs one sequence. So these wait, at both, and their clients have only a head.
            waiting = [await create(prompt=f"the cat {i}", stream=True, **short) for i in range(6)]
            whole = [asyncio.create_task(create(prompt=f"a dog {i}", **short)) for i in range(2)]
            while cluster.metric("vllm:num_requests_waiting") < 8:
                await asyncio.sleep(0.01)
            counts = [cluster.metric("vllm:num_requests_waiting", engine=i) for i in range(2)]
            os.kill(victim, signal.SIGKILL)
            texts = await asyncio.gather(*map(read, running, begun), return_exceptions=True)
            others = await asyncio.gather(*(read(stream, []) for stream in waiting))
            return counts, texts, others, [(await task).choices[0].text for task in whole]

    counts, texts, others, whole = asyncio.run(crowd())
    (lost,) = [text for text in texts if isinstance(text, Exception)]
    assert isinstance(lost, openai.APIError) and "has died" in str(lost)
    assert expected(["a", "b"][texts.index(lost) - 1], MANY) in texts
    assert others == [expected(f"the cat {i}", 20) for i in range(6)]
    assert whole == [expected(f"a dog {i}", 20) for i in range(2)]
    assert cluster.metric("nanopage:replica_losses_total") - losses == 1
    assert 0 not in counts and cluster.metric("nanopage:replica_retries_total") - retries in counts
    assert cluster.request("GET", "/health").status == 200
    deadline = time.monotonic() + 180
    while replica in cluster.replicas() and time.monotonic() < deadline:
        time.sleep(0.05)
    cluster.wait_for(2, "nanopage:replicas_running")
    assert len(cluster.replicas()) == 2 and replica not in cluster.replicas()
    assert cluster.request("POST", "/v1/completions", {"prompt": "the cat", "max_tokens": 2}).status == 200


def test_what_a_client_sends_is_not_taken_for_the_death_of_an_engine(cluster, front):
    before = cluster.metric("nanopage:replica_retries_total")
    body = {"input": "Hi", "metadata": {"code": "engine_dead"}, "max_output_tokens": 2}
    for stream in (False, True):
        assert cluster.request("POST", "/v1/responses", body | {"stream": stream}).status == 200
        message = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "stream": stream}
        reply = cluster.request("POST", "/v1/messages", message)
        assert reply.status == 200 and reply.body.endswith(STOP if stream else b"}")
    assert cluster.metric("nanopage:replica_retries_total") == before


@pytest.mark.parametrize("body", [b'{"prompt": "\xff"}', b"[" * 100_000], ids=["not UTF-8", "nested"])
def test_bodies_that_cannot_be_read_are_refused_by_the_replica(cluster, body):
    assert cluster.request("POST", "/v1/completions", body).status == 400


def test_sigterm_lets_streams_end_except_those_of_a_replica_that_hangs_and_leaves_no_process(cluster, client, expected):
    cluster.wait_until_idle()
    children = psutil.Process(cluster.server.process.pid).children(recursive=True)
    hangs = cluster.replicas()[0]
    options = {"model": "tiny", "max_tokens": 150, "stream": True} | GREEDY
    streams = [client.completions.create(prompt=prompt, **options) for prompt in ("a", "b")]
    texts = [next(stream).choices[0].text for stream in streams]
    os.kill(hangs, signal.SIGSTOP)
    cluster.server.process.send_signal(signal.SIGTERM)
    for i, stream in enumerate(streams):
        try:
            texts[i] += "".join(chunk.choices[0].text for chunk in stream)
        except openai.APIError as error:
            assert "shut down" in str(error)
            texts[i] = ""
    assert sorted(map(bool, texts)) == [False, True]
    assert "".join(texts) == expected("a" if texts[0] else "b", 150)
    assert cluster.server.process.wait(60) == 0
    assert not psutil.wait_procs([*children, *cluster.processes], timeout=60)[1]


# Without a cluster


@pytest.fixture(scope="module")
def front():
    """A module that imports Ray, which programs.py does not want in this process until it is needed."""
    from nanopage.server import front

    return front


@pytest.fixture(scope="module")
def routes():
    """A module that imports Ray."""
    from nanopage.server import route

    return route


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--max-replicas", 3], "--max-replicas needs --replicas"),
        (["--replicas", 2, "--max-replicas", 1], "--max-replicas 1 is less than --replicas 2"),
        (["--replicas", 2, "--target-ongoing-requests", 5], "--target-ongoing-requests needs --max-replicas"),
        (["--replicas", 0], "--replicas"),
        (["/no/such/model", "--replicas", 2], "/no/such/model"),
        (["--replicas", 2, "--max-num-seqs", 0], "max_num_seqs"),
        (["--replicas", 2, "--distributed-executor-backend", "ray"], "--distributed-executor-backend ray"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(monkeypatch, capsys, options, name):
    monkeypatch.setattr(ray_cluster, "connect", lambda *_: pytest.fail("a cluster has been started"))
    with pytest.raises((ValueError, FileNotFoundError, SystemExit)) as raised:
        main([str(option) for option in options])
    assert name in f"{raised.value} {capsys.readouterr().err}"


@pytest.fixture
def relay(front, routes, monkeypatch):
    """A function: what Front sends for a call whose every replica yields these items and then raises, and how it
    counts."""

    def relay(path, items, error):
        sent, server = [], front.Front(ServerState(["tiny"]), None, 1, None, 1, {}, 1)
        server.num_attempts = 0

        async def run(call):
            server.num_attempts += 1
            call.route.choose([f"{server.num_attempts}"])
            for item in items:
                yield item
            raise error

        async def send(message):
            sent.append(message)

        def running():
            return {f"{server.num_attempts + 1}"} if server.num_attempts < 20 else set()

        monkeypatch.setattr(server, "_send", run)
        monkeypatch.setattr(server, "_running", running)

        async def relay():
            call = front.Call("POST", path, [], b"", "", routes.Route(server.router, [], 0, server.dead))
            reply = Reply(path, send, send)
            await server.calls.run(server._relay(call, reply), reply, asyncio.Event().wait)

        try:
            asyncio.run(relay())
        except ApiError as raised:
            sent.append(raised)
        return sent, server

    return relay


HEAD = (200, [(b"content-type", b"text/event-stream")])


def test_a_request_is_not_run_for_ever_by_replicas_that_it_kills(front, relay):
    (error,), server = relay("/v1/completions", [], front.ReplicaGoneError("it has died"))
    assert (error.status, error.code) == (503, "replica_died")
    assert (server.num_attempts, server.num_retried, server.num_lost) == (front.MAX_ATTEMPTS, front.MAX_ATTEMPTS - 1, 1)


DEAD = b'data: {"error":{"message":"a worker has died","code":"engine_dead"}}\n\n'


@pytest.mark.parametrize("items", [[(503, [])], [HEAD, DEAD]], ids=["status", "event"])
def test_a_call_goes_on_elsewhere_if_an_engine_dies_before_its_answer_begins(front, relay, items):
    """As a dead replica, which Ray reports. With NANOPAGE_LONG_TESTS=1, a worker of a real one is killed."""
    _, server = relay("/v1/completions", items, ValueError("it is not read on"))
    attempts = front.MAX_ATTEMPTS
    assert (server.num_attempts, server.num_retried, server.num_lost) == (attempts, attempts - 1, 1)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_the_error_of_a_stream_is_an_event_of_its_kind(front, relay, path):
    events = b'event: x\ndata: {"text": "data: "}\n\nevent: x\ndata: {}\n\n'
    sent, server = relay(path, [HEAD, b": keep-alive\n\n", events], front.ReplicaGoneError("it has died"))
    event, done, end = sent[-1]["body"].split(b"\n\n")
    error = json.loads(event.partition(b"data: ")[2])
    assert (error["error"]["code"], done, end, server.num_attempts) == ("replica_died", b"data: [DONE]", b"", 1)
    if path == "/v1/responses":  # whose events have types and numbers
        assert event.startswith(b"event: error\n")
        assert (error["type"], error["code"], error["sequence_number"]) == ("error", "replica_died", 2)


def test_the_error_of_a_message_is_its_last_event(front, relay):
    gone = front.ReplicaGoneError("it has died")
    sent, server = relay("/v1/messages", [HEAD, PING, b"event: x\ndata: {}\n\n"], gone)
    event, end = sent[-1]["body"].split(b"\n\n")
    assert (event.partition(b"\ndata: ")[0], end, server.num_attempts) == (b"event: error", b"", 1)
    assert json.loads(event.partition(b"data: ")[2])["error"]["type"] == "overloaded_error"
    _, server = relay("/v1/messages", [HEAD, PING], gone)
    assert server.num_attempts == front.MAX_ATTEMPTS  # a ping is no part of the answer
    for last in (STOP, b'event: error\ndata: {"type":"error","error":{}}\n\n'):
        sent, _ = relay("/v1/messages", [HEAD, last, b""], gone)
        assert [message.get("body") for message in sent] == [None, last]


def test_nothing_follows_the_end_of_a_stream(front, relay):
    for error in (front.ReplicaGoneError("it has died"), ValueError("made up")):
        sent, _ = relay("/v1/responses", [HEAD, DONE, b"more"], error)
        assert [message.get("body") for message in sent] == [None, DONE]


def test_ray_client_is_refused(monkeypatch):
    monkeypatch.setattr(ray_cluster, "connect", lambda *_: pytest.fail("a cluster has been joined"))
    monkeypatch.setenv("RAY_ADDRESS", "ray://somewhere:10001")
    with pytest.raises(ValueError, match="RAY_ADDRESS=ray://somewhere:10001"):
        main(["--replicas", "2"])


def test_prompts_that_begin_alike_have_the_same_first_parts(routes):
    def parts_of(*texts, **fields):
        return routes.prompt_parts({"messages": [{"role": "user", "content": text} for text in texts]} | fields)[0]

    long = "the cat " * 200
    first, second = parts_of(long), parts_of(long, "and more " * 100)
    assert len(first) == len(long) // routes.PART and len(set(first)) == len(first)
    assert second[: len(first)] == first and len(second) > len(first)
    assert not set(parts_of("x" + long)) & set(first)
    assert not set(parts_of(long, cache_salt="mine")) & set(first)
    assert parts_of("short") == []
    prompt = {"prompt": list(range(1000))}
    assert routes.prompt_parts(prompt)[0] and not set(routes.prompt_parts(prompt, "key")[0]) & set(first)


def test_an_image_counts_as_a_whole_and_only_the_same_image_is_a_known_prefix(routes):
    def bodies(data):
        yield [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}]
        yield [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}]

    def parts_of(image, *texts):
        parts = [*image, *({"type": "text", "text": text} for text in texts)]
        return routes.prompt_parts({"messages": [{"role": "user", "content": parts}]})

    for small, same, other in zip(bodies("A" * 5000), bodies("A" * 5000), bodies("A" * 400_000 + "BB=="), strict=True):
        (first, tokens), (again, more), (parts, large) = parts_of(small), parts_of(same, "cat " * 500), parts_of(other)
        assert 1000 < tokens == large < 1100 < 1500 < more
        assert again[: len(first) - 1] == first[:-1] and not set(first) & set(parts)
        router = Router()
        router.add("a")
        router.add("b")
        chosen = [router.choose(each, routes.PART_TOKENS, tokens) for each in (first, parts, parts, first)]
        assert chosen == ["a", "b", "b", "a"]


@pytest.mark.parametrize(("answers", "sees"), [([True, True], True), ([False, False], False), ([OSError()], False)])
def test_bodies_may_be_large_if_the_replicas_see_images(front, monkeypatch, answers, sees):
    class Handle:
        def _init(self, **options): ...

        def broadcast(self, name):
            assert hasattr(front.Replica, name)
            return self

        async def results_async(self, **options):
            return answers

    async def send(call):
        for _ in ():
            yield

    monkeypatch.setattr(front.serve, "get_app_handle", lambda name: Handle())
    state = ServerState(["tiny"])
    server = front.Front(state, None, 1, None, 1, {}, 1)
    monkeypatch.setattr(server, "_send", send)
    asyncio.run(server._open())
    reply = asyncio.run(call(create_app(state, [], ["localhost"]), "POST", "/v1/chat/completions", b" " * (5 << 20)))
    assert (reply.status == 413) is not sees


def test_the_number_of_parts_is_limited(routes):
    assert len(routes.prompt_parts({"prompt": "x" * (1 << 20)})[0]) == routes.MAX_PARTS


def test_what_a_body_asks_for_is_estimated_whatever_it_has(routes):
    for body, tokens in (
        ({}, routes.OUTPUT_TOKENS),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 7, "n": 2}, 14),
        ({"max_output_tokens": 100_000}, routes.MAX_OUTPUT_TOKENS),
        ({"prompt": ["a", "b"], "max_tokens": 3}, 6),
        ({"prompt": [1, 2, 3], "max_tokens": 3}, 3),
        ({"max_tokens": "many", "n": "x", "prompt": []}, routes.OUTPUT_TOKENS),
        ({"max_tokens": -1}, 0),
    ):
        assert routes.num_output_tokens(body) == tokens


def test_a_route_counts_its_tokens_once_wherever_it_goes(routes):
    router, dead = Router(), set()
    route, other = routes.Route(router, [], 100, dead), routes.Route(router, [], 10, dead)
    assert {route.choose(["a", "b"]), other.choose(["a", "b"])} == {"a", "b"}
    first = route.replica
    route.advance(30)
    assert router.loads[first].outstanding == 70
    dead.add(first)
    assert route.choose(["a", "b"]) == other.replica
    assert first not in router.loads and router.loads[other.replica].outstanding == 110
    route.advance(1000)
    route.end()
    assert router.loads[other.replica].outstanding == 10 and route.replica is None
    other.exclude.add("b" if first == "a" else "a")
    assert other.choose(["a", "b"]) is None


def test_the_prompt_is_done_with_the_first_token_of_the_output(routes):
    router = Router()
    router.add("a")
    route = routes.Route(router, [], 110, set(), num_prompt_tokens=100)
    assert route.choose(["a"]) == "a"
    route.advance(0)
    assert router.loads["a"].outstanding == 110
    route.advance(1)
    assert router.loads["a"].outstanding == 9
    route.advance(2)
    assert router.loads["a"].outstanding == 7
    route.end()
    assert router.loads["a"].outstanding == 0


@pytest.mark.parametrize(
    ("device", "gpus", "most", "num_workers", "expected"),
    [
        ("auto", 0, 4, 1, {"num_cpus": 4}),  # two replicas on each node
        ("cpu", 8, 4, 2, {"num_cpus": 4}),
        ("auto", 0, 64, 2, {"num_cpus": 1}),
        ("auto", 8, 2, 1, {"num_cpus": 1, "num_gpus": 1}),
        ("cuda", 8, 2, 4, {"num_cpus": 1, "num_gpus": 4}),
    ],
)
def test_a_replica_gets_its_share_of_a_node_or_a_gpu_for_each_worker(
    front, monkeypatch, device, gpus, most, num_workers, expected
):
    node = {"Alive": True, "Resources": {"CPU": 8.0}}
    monkeypatch.setattr(front.ray, "nodes", lambda: [node, node, {"Alive": False, "Resources": {"CPU": 1.0}}])
    monkeypatch.setattr(front.ray, "cluster_resources", lambda: {"GPU": gpus})
    assert front.resources_of_replica(most, device, num_workers) == expected
