import pytest
from server_process import serving


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    options = ("--dtype", "float32", "--api-key", "secret", "--served-model-name", "tiny", "alias")
    with serving(model, *options, log=log) as server:
        server.url = server.wait_until_ready()
        yield server
