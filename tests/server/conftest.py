import asyncio
import inspect

import pytest
from browser import CHROMIUM, Browser
from server_process import OPTIONS, serving

from nanopage import LLM, AsyncLLM, EngineArgs
from nanopage.server.app import create_app
from nanopage.server.state import ServerState


def pytest_pyfunc_call(pyfuncitem):
    """Tests that are coroutines run in an event loop of their own."""
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), 120))
        return True
    return None


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    options = ("--dtype", "float32", "--api-key", "secret", "--served-model-name", "tiny", "alias")
    with serving(model, *options, log=log) as server:
        server.url = server.wait_until_ready()
        yield server


@pytest.fixture(scope="module")
def offline(model):
    return LLM(str(model), **OPTIONS)


@pytest.fixture(scope="module")
def llm(model):
    llm = AsyncLLM.from_engine_args(EngineArgs(model=str(model), **OPTIONS))
    yield llm
    llm.shutdown()


@pytest.fixture
def state(llm):
    return ServerState(["tiny"], llm=llm)


@pytest.fixture
def app(state):
    return create_app(state, hosts=["localhost"])


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture
def say(llm, monkeypatch):
    """Has the model write a text, and then end."""

    def say(text):
        todo = iter([*llm.engine.tokenizer.encode(text, add_special_tokens=False), 2])

        def result():
            found = original()
            found.token_ids = [next(todo) for _ in found.token_ids]
            return found

        monkeypatch.setattr(llm.engine.executor, "result", result)

    original = llm.engine.executor.result
    return say
