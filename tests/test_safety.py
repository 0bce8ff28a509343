"""Safe by construction: no code from data, no sockets but the server's, nothing left behind."""

import ast
import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
from helpers import tiny_model

ROOT = Path(__file__).parent.parent
FORBIDDEN_MODULES = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "socket", "socketserver", "zmq"}
LISTENER = ROOT / "nanopage" / "server" / "listener.py"
CLIENTS = (ROOT / "nanopage" / "terminal" / "calls.py", ROOT / "nanopage" / "files" / "local_servers.py")
LISTENING = {"create_server", "start_server", "start_unix_server"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {("torch", "load"), ("torch", "save"), ("numpy", "load"), ("np", "load")}


def test_no_source_file_can_run_code_from_data():
    for file in [*ROOT.glob("nanopage/**/*.py"), *ROOT.glob("*.py")]:
        allowed = {"socket"} if file in (LISTENER, *CLIENTS) else set()
        nodes = [*ast.walk(ast.parse(file.read_text()))]
        assert not [f"{file}:{node.lineno}" for node in nodes if runs_code_from_data(node, allowed)]
        listens = [node.attr for node in nodes if isinstance(node, ast.Attribute) and node.attr in LISTENING]
        assert not listens or file == LISTENER


def runs_code_from_data(node, allowed):
    """Whether a node of Python's syntax could. Args: modules that are forbidden elsewhere."""
    forbidden = FORBIDDEN_MODULES - allowed
    match node:
        case ast.Import(names=names):
            return bool({name.name.split(".")[0] for name in names} & forbidden)
        case ast.ImportFrom(module=module):
            return (module or "").split(".")[0] in forbidden
        case ast.Call(func=ast.Name(id=name)):
            return name in FORBIDDEN_CALLS
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            return (module, name) in FORBIDDEN_ATTRIBUTES
        case ast.keyword(arg=name):
            return name == "trust_remote_code"
    return False


SCRIPT = """
import sys
import psutil
from nanopage import LLM, SamplingParams

llm = LLM(sys.argv[1], device="cpu", max_model_len=64, num_gpu_blocks_override=16, enforce_eager=True)
print(len(llm.generate("the cat", SamplingParams(max_tokens=5, ignore_eos=True))[0].outputs[0].token_ids))
process = psutil.Process()
print(len(process.net_connections("inet")), len(process.children()))
"""


def test_an_engine_opens_no_socket_and_leaves_nothing_behind(tmp_path):
    model = tiny_model(tmp_path / "model")
    scratch, cache, cwd = (tmp_path / name for name in ("scratch", "cache", "cwd"))
    for folder in (scratch, cache, cwd):
        folder.mkdir()
    before = {file: file.stat().st_mtime_ns for file in model.iterdir()}
    env = os.environ | {"TMPDIR": str(scratch), "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model)], cwd=cwd, env=env, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.split() == ["5", "0", "0"]
    assert [list(folder.rglob("*")) for folder in (scratch, cache, cwd)] == [[], [], []]
    assert {file: file.stat().st_mtime_ns for file in model.iterdir()} == before
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # another test's, which has ended
            assert str(model) not in " ".join(child.cmdline())
