"""What the sources of bench.py and benchmarks/ may do: they watch engines and change nothing of them."""

import ast
import graphlib
import importlib
import inspect
from pathlib import Path

import pytest

from nanopage import LLM, LLMEngine
from nanopage.engine.block_manager import BlockManager
from nanopage.engine.scheduler import Scheduler
from nanopage.worker.model_runner import ModelRunner

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "bench.py", *sorted((ROOT / "benchmarks").rglob("*.py"))]
MODULES = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in FILES}
METHODS = {
    name
    for kind in (LLM, LLMEngine, Scheduler, BlockManager, ModelRunner)
    for name, _ in inspect.getmembers(kind, inspect.isfunction)
}


def interferences(source: str) -> list[str]:
    """The lines that assign to a method of an engine's parts, or use a private attribute of another object."""
    found = []
    nodes = list(ast.walk(ast.parse(source)))
    imports = {alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
            patched = not (of_self or isinstance(node.ctx, ast.Load)) and node.attr in METHODS
            private = node.attr.startswith("_") and not node.attr.startswith("__")
            root: ast.AST = node
            while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
                root = root.func if isinstance(root, ast.Call) else root.value
            ours = isinstance(root, ast.Name) and root.id in {"self", "cls"} | imports
            if patched or (private and not ours):
                found.append(ast.unparse(node))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            if node.func.id in ("setattr", "delattr") and METHODS & set(names):
                found.append(ast.unparse(node))
            if node.func.id == "getattr" and any(str(name).startswith("_") for name in names):
                found.append(ast.unparse(node))
    return found


def test_no_benchmark_patches_an_engine_or_reads_its_private_attributes():
    assert not {name: found for name, file in MODULES.items() if (found := interferences(file.read_text()))}


@pytest.mark.parametrize(
    "line",
    [
        "engine.step = timed",
        "llm.engine.runner.launch, before = timed, llm.engine.runner.launch",
        "self.engine.scheduler.schedule: object = timed",
        "del engines[0].step",
        "for engine.step in steps: pass",
        "setattr(engine, 'step', timed)",
        "engine._requests.clear()",
        "make()._outputs",
        "getattr(engine, '_requests')",
    ],
)
def test_a_benchmark_that_did_would_be_found(line):
    assert len(interferences(line)) == 1


def imported(file: Path) -> set[str]:
    """The modules among MODULES that `file` imports, at its top or in a function."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names & MODULES.keys()


def test_the_modules_do_not_import_each_other_in_a_circle():
    graph = {name: imported(file) for name, file in MODULES.items()}
    assert "benchmarks.report" in graph["benchmarks.serve"] and "benchmarks.serve" in graph["bench"]
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_every_module_can_be_imported():
    """Also those that no other test runs. What a peer needs is imported when it is used."""
    for module in MODULES:
        importlib.import_module(module)
