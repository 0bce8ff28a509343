import pytest
from server_process import OPTIONS, serving

from nanopage import LLM, AsyncLLM, EngineArgs


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
