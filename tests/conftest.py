import atexit
import gc
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
from functools import partial

# Programs of the tests find no server of this machine's users, and servers of the tests are found by no other program.
os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="nanopage-tests-")
os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported: no test asks the hub
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["NANOPAGE_COMPILE"] = "never"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # programs that tests start need not compile nanopage again
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # for the tests share the cores with processes that they start
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # of Ray: its handlers write to stderr in every fork (programs.py)
os.environ["RAY_AUTH_MODE"] = "token"  # as Ray reads it, once in a process; its ports are open to others here
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
if "PYTEST_XDIST_WORKER" in os.environ:  # several processes run tests: a thread each is enough
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The last function at exit, in this process and in none of its forks: to free all that is imported takes seconds.
    this_process = os.getpid()
    atexit.register(lambda: os.getpid() == this_process and os._exit(0))

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background job of a shell: some tests send Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as with nohup: programs that tests start would inherit it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

sys.dont_write_bytecode = False  # the next run need not compile the tests again
gc.disable()  # until all tests are collected: nothing that is imported becomes garbage

COMPILES = {"test_aot", "test_aot_products", "test_tile_linear", "test_default_model"}
# The files that take longest run first, so that no process is still busy with one when the others have finished. So do
# those that start programs, and files that import Ray after them: programs.py says why.
FIRST = {
    *("test_aot", "test_structured", "test_fuzz", "test_triton", "test_cuda_graphs", "test_compare", "test_models"),
    *("test_jit", "test_parallel", "test_chat", "test_bench", "test_tools", "test_process_executor", "test_course"),
    *("test_hub", "test_page", "test_view_page", "test_clients", "test_other_clients", "test_output", "test_attacks"),
    *("test_console", "test_serve_http", "test_vision_server", "test_loader", "test_piecewise_graphs"),
    *("test_several_models", "test_chat_servers", "test_build"),
}
RAY = {"test_replicas", "test_ray_link", "test_documents"}


def pytest_configure(config):
    if hasattr(config.option, "loadscopereorder"):  # pytest-xdist's order: the files with most tests first
        config.option.loadscopereorder = False
    if getattr(config.option, "dist", "no") == "no":  # this process runs tests, and does not only hand them out
        import torch  # takes a second

        if not torch.cuda.is_available():
            os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: its kernels then run on the CPU


def pytest_unconfigure():
    shutil.rmtree(os.environ["XDG_RUNTIME_DIR"], ignore_errors=True)


@pytest.fixture(scope="session")
def default_model():
    """The directory of the real default model, SmolLM2-135M-Instruct (fetched on first use)."""
    from nanopage.weights import hub

    return hub.default_model()


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The directory of a tiny model, for tests that write nothing into it."""
    from helpers import tiny_model  # takes seconds to import

    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", autouse=True)
def _may_compile(request):
    """Only the tests of compiled code start processes that compile, beside the tests and after their end."""
    with pytest.MonkeyPatch.context() as patch:
        if request.module.__name__ in COMPILES:
            patch.delenv("NANOPAGE_COMPILE")
        yield


@pytest.fixture(scope="module")
def one_thread():
    """Tiny models are no faster on two threads, and on a busy machine far slower."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _own_log():
    """Programs that run in the process of a test replace the handlers of the engine's log."""
    logger = logging.getLogger("nanopage")
    handlers = logger.handlers
    yield
    logger.handlers = handlers


@pytest.fixture(autouse=True)
def _seeded():
    """Random tensors are the same in every run, so that no test fails now and then by a rare rounding."""
    import torch

    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # manual_seed would keep the traceback of each call for every kind of accelerator
        torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _one_template_process():
    """Renders the templates of all tokenizers of this process: to start one takes longer than most tests."""
    from nanopage.text import chat_template, tokenizer

    renderer = chat_template.TemplateRenderer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "TemplateRenderer", lambda: renderer)
        yield


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter():
    """At each call of a function in a kernel, Triton's interpreter replaces the whole language anew: once is enough."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime import interpreter

    replaced = set()

    def call(function, *arguments, **options):
        if function.fn not in replaced:
            replaced.add(function.fn)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        yield


@pytest.fixture
def quick_collections():
    """Garbage collections look only at what the test makes."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def compiled_graphs(monkeypatch):
    """The graphs that torch.compile makes from now on. A backend counts them and runs them as they are."""
    import torch

    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counting))
    return graphs


def pytest_collection_finish():
    gc.freeze()  # no collection during the tests, nor in a process that is forked, visits all that has been imported
    gc.enable()


def pytest_sessionfinish():
    atexit.register(gc.unfreeze)  # extensions complain at exit about objects that are left


def pytest_collection_modifyitems(items):
    import torch

    items.sort(key=lambda item: 0 if (name := item.module.__name__) in FIRST else 1 if name in RAY else 2)
    if torch.cuda.is_available():  # Triton then compiles its kernels, which do not take tensors on the CPU
        marker, reason = "interpreter", "needs Triton's interpreter: CUDA_VISIBLE_DEVICES= pytest -m interpreter"
    else:
        marker, reason = "gpu", "needs a CUDA device, and torch sees none"
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))
