"""LoRA adapters in the server: each is a model of its own; loaded and unloaded while it serves."""

import asyncio
import itertools
import shutil

import pytest
from asgi import call
from server_process import OPTIONS
from test_lora import save_adapter

from nanopage import AsyncLLM, EngineArgs
from nanopage.server.adapters import parse_modules
from nanopage.server.app import create_app
from nanopage.server.options import check_adapters
from nanopage.server.serve import check_replicas, parser
from nanopage.server.state import ServerState

ASK = {"prompt": "the cat", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def paths(model, tmp_path_factory):
    made = tmp_path_factory.mktemp("adapters")
    return [save_adapter(made / str(i), model, seed=i) for i in range(3)]


@pytest.fixture(scope="module")
def llm(model):
    llm = AsyncLLM.from_engine_args(EngineArgs(model=str(model), **OPTIONS, enable_lora=True, max_loras=2))
    yield llm
    llm.shutdown()


@pytest.fixture
def state(llm, paths):
    state = ServerState(["tiny"], llm=llm, allow_runtime_lora_updating=True)
    state.adapters._ids = itertools.count(1 + max(llm.engine.input_processor.adapters._checked, default=0))
    state.adapters.requests = {"first": state.adapters.check(llm, "first", str(paths[0]))}
    return state


def ask(app, method, path, body=None):
    return asyncio.run(call(app, method, path, body))


def test_each_adapter_is_a_model(state, paths):
    app = create_app(state, hosts=["localhost"])
    models = {model["id"]: model for model in ask(app, "GET", "/v1/models").json["data"]}
    assert [*models] == ["tiny", "first"]
    assert (models["tiny"]["root"], models["tiny"]["parent"]) == ("tiny", None)
    assert (models["first"]["root"], models["first"]["parent"]) == (str(paths[0]), "tiny")
    assert ask(app, "GET", "/v1/models/first").json == models["first"]
    replies = {name: ask(app, "POST", "/v1/completions", ASK | {"model": name}).json for name in models}
    assert replies["first"]["model"] == "first"
    assert replies["first"]["choices"][0]["text"] != replies["tiny"]["choices"][0]["text"]
    messages = [{"role": "user", "content": "the cat"}]
    chats = [
        ask(app, "POST", "/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 8, "model": m})
        for m in ("tiny", "first")
    ]
    texts = [chat.json["choices"][0]["message"]["content"] for chat in chats]
    assert texts[0] != texts[1]
    answers = [
        ask(app, "POST", "/v1/responses", {"input": "the cat", "temperature": 0, "max_output_tokens": 8, "model": m})
        for m in ("tiny", "first")
    ]
    assert [answer.json["output"][0]["content"][0]["text"] for answer in answers] == texts


def test_loading_and_unloading(state, paths, tmp_path):
    app = create_app(state, hosts=["localhost"])
    path = shutil.copytree(paths[1], tmp_path / "adapter")
    assert ask(app, "POST", "/v1/completions", ASK | {"model": "second"}).status == 404
    loaded = ask(app, "POST", LOAD, {"lora_name": "second", "lora_path": str(path)})
    assert (loaded.status, loaded.body) == (200, b"Success: LoRA adapter 'second' added successfully.")
    before = ask(app, "POST", "/v1/completions", ASK | {"model": "second"}).json["choices"][0]["text"]
    for name in ("second", "tiny"):
        refused = ask(app, "POST", LOAD, {"lora_name": name, "lora_path": str(path)})
        assert (refused.status, refused.error["param"]) == (400, "lora_name")
    assert ask(app, "POST", UNLOAD, {"lora_name": "second"}).status == 200
    assert ask(app, "POST", UNLOAD, {"lora_name": "second"}).status == 404
    assert ask(app, "POST", "/v1/completions", ASK | {"model": "second"}).error["code"] == "model_not_found"
    # Other weights under the same name and path: neither the slot nor cached prefixes of the old ones are used.
    shutil.rmtree(path)
    shutil.copytree(paths[2], path)
    assert ask(app, "POST", LOAD, {"lora_name": "second", "lora_path": str(path)}).status == 200
    after = ask(app, "POST", "/v1/completions", ASK | {"model": "second"}).json["choices"][0]["text"]
    other = state.adapters.check(state.llm, "third", str(paths[2]))
    state.adapters.requests["third"] = other
    assert after == ask(app, "POST", "/v1/completions", ASK | {"model": "third"}).json["choices"][0]["text"] != before


def test_unloading_while_a_request_runs(state):
    app = create_app(state, hosts=["localhost"])

    async def both():
        running = asyncio.create_task(call(app, "POST", "/v1/completions", ASK | {"model": "first", "max_tokens": 40}))
        while not state.num_active:
            await asyncio.sleep(0.001)
        assert (await call(app, "POST", UNLOAD, {"lora_name": "first"})).status == 200
        assert (await call(app, "POST", "/v1/completions", ASK | {"model": "first"})).status == 404
        return await running

    reply = asyncio.run(both())
    assert reply.status == 200 and reply.json["usage"]["completion_tokens"] == 40


def test_what_is_refused(state, tmp_path, llm):
    app = create_app(state, hosts=["localhost"])
    for body, param in (
        ({"lora_name": "x", "lora_path": str(tmp_path)}, "lora_path"),
        ({"lora_name": "x", "lora_path": "/etc/passwd"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "a\0b"}, "lora_path"),
        ({"lora_name": "", "lora_path": str(tmp_path)}, "lora_name"),
        ({"lora_name": "a\nb", "lora_path": str(tmp_path)}, "lora_name"),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "y", "load_inplace": True}, "load_inplace"),
    ):
        reply = ask(app, "POST", LOAD, body)
        assert (reply.status, reply.error["param"]) == (400, param), body
    assert [*state.adapters.requests] == ["first"]
    closed = create_app(ServerState(["tiny"], llm=llm), hosts=["localhost"])
    reply = ask(closed, "POST", LOAD, {"lora_name": "x", "lora_path": str(tmp_path)})
    assert reply.status == 404 and "--allow-runtime-lora-updating" in reply.error["message"]
    keyed = create_app(state, ["secret"], ["localhost"])
    assert ask(keyed, "POST", UNLOAD, {"lora_name": "first"}).status == 401


def test_options():
    assert parse_modules("--x", ["a=/x", "b=y=z"]) == {"a": "/x", "b": "y=z"}
    for value in ("a", "=x", "a=", "a\n=x"):
        with pytest.raises(ValueError, match="not NAME=PATH"):
            parse_modules("--x", [value])
    with pytest.raises(ValueError, match="a occurs twice"):
        parse_modules("--x", ["a=x", "a=y"])
    for arguments, message in (
        (["--lora-modules", "a=x"], "--lora-modules needs --enable-lora"),
        (["--allow-runtime-lora-updating"], "--allow-runtime-lora-updating needs --enable-lora"),
        (["--enable-lora", "--lora-modules", "tiny=x"], "the name of the model: tiny"),
    ):
        args = parser().parse_args(arguments)
        with pytest.raises(ValueError, match=message):
            check_adapters(args, [*parse_modules("--lora-modules", args.lora_modules)], ["tiny"])
    for option in ("--enable-lora", "--enable-prompt-adapter"):
        with pytest.raises(ValueError, match=f"{option} does not work with --replicas"):
            check_replicas(parser().parse_args([option, "--replicas", "2"]))
