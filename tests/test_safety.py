"""Safe by construction: no code from data, no sockets, nothing left behind."""

import ast
import contextlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from helpers import tiny_model

ROOT = Path(__file__).parent.parent
FORBIDDEN_MODULES = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "socket", "socketserver", "zmq"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {("torch", "load"), ("torch", "save"), ("numpy", "load"), ("np", "load")}

PROGRAMS = ("nanopage.__main__", "chat", "bench", "benchmarks")
PARTS_OF_PROGRAMS = ("nanopage.terminal",)


@pytest.mark.parametrize(
    "file",
    sorted([*ROOT.glob("nanopage/**/*.py"), *ROOT.glob("*.py")]),
    ids=lambda f: f.name,
)
def test_no_source_file_can_run_code_from_data(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & FORBIDDEN_MODULES
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in FORBIDDEN_MODULES
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in FORBIDDEN_CALLS
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in FORBIDDEN_ATTRIBUTES
        if isinstance(node, ast.keyword):
            assert node.arg != "trust_remote_code"


def imported_modules(file):
    """Every module that `file` imports, at its top or in a function, and every name that could be one."""
    package = ".".join(file.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (module, *(f"{module}.{alias.name}" for alias in node.names))


def is_within(module, packages):
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def test_only_programs_import_programs():
    for file in ROOT.glob("nanopage/**/*.py"):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        allowed = PARTS_OF_PROGRAMS if is_within(name, [*PROGRAMS, *PARTS_OF_PROGRAMS]) else []
        forbidden = {*PROGRAMS, *PARTS_OF_PROGRAMS}.difference(allowed)
        assert not [module for module in imported_modules(file) if is_within(module, forbidden)], name
    main = {*imported_modules(ROOT / "nanopage" / "__main__.py")}
    assert "nanopage.terminal.chat" in main  # what is looked for can be found


def test_importing_the_package_and_all_of_its_names_imports_no_program():
    script = "import sys, nanopage; from nanopage import *; print('torch' in sys.modules, *sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    torch, *modules = done.stdout.split()
    assert torch == "True"
    assert not [module for module in modules if is_within(module, [*PROGRAMS, *PARTS_OF_PROGRAMS])]


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
