"""Which part of nanopage may import which: read from the sources, and seen in a process of its own."""

import ast
import functools
import graphlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAMS = ("nanopage.__main__", "chat", "bench", "benchmarks")
PARTS_OF_PROGRAMS = ("nanopage.terminal", "nanopage.server")

# The core runs a decoder from safetensors on one device. Wings attach to it; build.py attaches them.
CORE = (
    *("llm.py", "params.py", "outputs.py", "inputs.py", "step.py", "device.py"),
    *("config", "engine", "state", "worker", "sampling", "models", "layers", "kernels"),
)
WINGS = (
    *("server", "terminal", "view", "cpu", "quantization", "distributed", "adapters", "speculation", "grammar"),
    *("aio", "beams", "pooling", "experts", "recurrent", "transformers_impl", "items", "audio", "vision", "processors"),
    *("standby", "grading"),
)
MAX_LINES, CORE_LINES = 400, 10_000  # of a file, of the core
# Of the core's functions: lines, and arguments. The tables have those that are still longer; they only shrink.
MAX_FUNCTION, MAX_ARGUMENTS = 50, 7
LONG_FUNCTIONS = {
    # Kernels: each is one formula over the same two dozen values, which a part of it would have to take and return.
    *("kernels/floors.py: floor_kernel", "kernels/rotate_and_write.py: rotate_kernel"),
    *("kernels/attention_kernels.py: attend", "kernels/attention_kernels.py: decode_kernel"),
    "kernels/attention_kernels.py: prefill_kernel",
}
MANY_ARGUMENTS = {
    *("llm.py: chat", "llm.py: generate"),  # vLLM's
    "kernels/rotate_and_write.py: rotate_and_write",
    "kernels/paged_attention.py: choose_prompt_splits",
}

# What the files of a folder, or a file, may never import, at their top or in a function.
RULES = {
    "nanopage/engine": (
        "torch",
        "nanopage.worker",
        "nanopage.build",
        "nanopage.models",
        "nanopage.layers",
        "nanopage.kernels",
        "nanopage.vllm",
    ),
    "nanopage/worker": (
        "nanopage.engine",
        "nanopage.llm",
        "nanopage.build",
        "nanopage.startup",
        "nanopage.text",
        "nanopage.weights",
    ),
    "nanopage/step.py": ("torch", "nanopage"),
    "nanopage/state/layer_kinds.py": ("torch", "nanopage"),
    "nanopage/params.py": ("torch", "nanopage.engine", "nanopage.worker"),
    "nanopage/outputs.py": ("torch", "nanopage.engine", "nanopage.worker"),
    "nanopage/text": ("torch", "nanopage.engine", "nanopage.worker", "nanopage.quantization"),
    "nanopage/grammar": ("torch", "nanopage.engine", "nanopage.worker"),
    "nanopage/grammar/matcher.py": ("torch", "nanopage"),
    "nanopage/grammar/schema.py": ("torch", "nanopage"),
    "nanopage/files/limited_process.py": ("torch", "nanopage"),
    "nanopage/sampling": ("nanopage.engine", "nanopage.models", "nanopage.layers", "nanopage.kernels"),
    "nanopage/models": ("nanopage.engine", "nanopage.worker", "nanopage.weights"),
    "nanopage/families": ("nanopage.engine", "nanopage.worker", "nanopage.weights"),
    "nanopage/layers": ("nanopage.engine", "nanopage.worker", "nanopage.weights", "nanopage.models"),
    "nanopage/kernels": (
        "nanopage.engine",
        "nanopage.worker",
        "nanopage.weights",
        "nanopage.models",
        "nanopage.layers",
    ),
    # Features plug in elsewhere.
    "nanopage/adapters/files.py": ("torch", "nanopage.engine", "nanopage.worker"),
    "nanopage/adapters/slots.py": ("nanopage.adapters.files",),
    "nanopage/state/sequence_table.py": ("nanopage.adapters.files", "nanopage.adapters.layers"),
    "nanopage/worker/model_runner.py": (
        "nanopage.adapters.files",
        "nanopage.adapters.layers",
        "nanopage.cpu.tiled",
        "nanopage.cpu.aot",
        "nanopage.worker.cuda_graphs",
    ),
    "nanopage/worker/eager.py": ("nanopage.cpu.tiled", "nanopage.cpu.aot", "nanopage.worker.cuda_graphs"),
}


@functools.cache
def imported_modules(file) -> list[str]:
    """Every module that `file` imports, at its top or in a function, and every name that could be one."""
    package, names = ".".join(file.relative_to(ROOT).parent.parts), []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return names


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


# What a start does not need, and takes long to import.
SLOW = ("gguf", "yaml", "einops", "transformers", "triton", "torch._dynamo", "torch._inductor", "llguidance", "ray")


def test_a_start_imports_no_program_and_nothing_slow():
    """All names of the package, as programs import them. Garbage is collected again afterwards."""
    script = """
import gc, sys
from nanopage.startup.imports import quick_imports
with quick_imports():
    from nanopage import *
with quick_imports():
    assert gc.isenabled() and gc.get_freeze_count() > 100_000
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    modules = done.stdout.split()
    assert {"torch", "nanopage.build"} < {*modules}, done.stderr
    assert not [module for module in modules if is_within(module, [*PROGRAMS, *PARTS_OF_PROGRAMS, *SLOW])]


def runtime_imports(file):
    """Those of `imported_modules` that are not only for type checkers."""
    tree = ast.parse(file.read_text())
    typing_only = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield from (node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names))


def test_only_one_file_imports_torch_distributed():
    importing = {
        str(file.relative_to(ROOT))
        for file in ROOT.glob("nanopage/**/*.py")
        if any(is_within(module, ["torch.distributed"]) for module in imported_modules(file))
    }
    assert importing == {"nanopage/distributed/parallel.py"}


@pytest.mark.parametrize("place", RULES)
def test_no_part_imports_what_it_must_not_know(place):
    path = ROOT / place
    files = [path] if path.suffix == ".py" else [*path.rglob("*.py")]
    assert files and all(file.is_file() for file in files)
    for file in files:
        found = [module for module in runtime_imports(file) if is_within(module, RULES[place])]
        assert not found, f"{file.relative_to(ROOT)} imports {found}"


def test_the_rules_would_find_an_import(tmp_path):
    file = tmp_path / "x.py"
    file.write_text("def f():\n    from torch import nn\nif TYPE_CHECKING:\n    import nanopage.worker.worker\n")
    found = [*runtime_imports(file)]
    assert is_within(found[0], ["torch"]) and not any(is_within(module, ["nanopage"]) for module in found)


def test_the_engine_and_the_server_are_imported_where_torch_cannot_be():
    script = """
import sys
sys.modules["torch"] = None  # an import of it raises ImportError
import nanopage.engine.engine, nanopage.step, nanopage.params, nanopage.outputs, nanopage.text.chat_template
import nanopage.server.serve  # in front of several models, it needs none
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("given", "then"),
    [({}, "30000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "active"}, "None")],
    ids=["neither", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"],
)
def test_how_long_threads_spin_is_set_unless_the_user_does(given, then):
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    code = "import nanopage, os; print(os.environ.get('GOMP_SPINCOUNT'))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment | given, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == then


def is_core(name):
    """Whether a file is of the core, or of a room that was."""
    return name in (*CORE, "build.py", "weights/loader.py") or name.split("/")[0] in (*CORE, "aio", "beams", "checks")


def places(paths):
    return {path: "/".join(path.relative_to(ROOT / "nanopage").parts) for path in paths}


def test_the_core_imports_no_wing():
    tied = {}
    for file, name in places(ROOT.glob("nanopage/**/*.py")).items():
        if name in CORE or name.split("/")[0] in CORE:
            modules = [module.split(".")[1] for module in runtime_imports(file) if module.startswith("nanopage.")]
            if wings := {*modules} & {*WINGS}:
                tied[name] = wings
    assert not tied


def test_modules_of_transformers_are_imported_only_when_they_run():
    """Importing them takes seconds: in a function, or within their own folder."""
    for file, name in places(ROOT.glob("nanopage/**/*.py")).items():
        at_the_top = [
            node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        modules = {getattr(node, "module", None) or node.names[0].name for node in at_the_top}
        own = name.startswith("transformers_impl/")
        assert own or not any(is_within(module, ["transformers", "nanopage.transformers_impl"]) for module in modules)


def test_no_files_import_each_other():
    """Imports for type checkers count, too."""
    modules = {}
    for file, name in places(ROOT.glob("nanopage/**/*.py")).items():
        modules["nanopage." + name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")] = file
    left = {
        name: {module for module in imported_modules(file) if module in modules and module != name}
        for name, file in modules.items()
        if file.name != "__init__.py"
    }
    left = {name: {module for module in imports if module in left} for name, imports in left.items()}
    while leaves := [name for name, imports in left.items() if not imports & left.keys()]:
        for name in leaves:
            del left[name]
    assert not left, "these import each other, or what does"


def test_folders_import_each_other_in_one_direction():
    """A folder counts as one part, a file at the top as another. What only type checkers import does not count."""
    imports = {}
    for file, name in places(ROOT.glob("nanopage/*/**/*.py")).items():
        modules = {module.split(".")[1] for module in runtime_imports(file) if module.startswith("nanopage.")}
        imports.setdefault(name.split("/")[0], set()).update(modules)
    for file, name in places(ROOT.glob("nanopage/[!_]*.py")).items():
        modules = {module.split(".")[1] for module in runtime_imports(file) if module.startswith("nanopage.")}
        imports[name.removesuffix(".py")] = modules
    graph = {part: modules & imports.keys() - {part} for part, modules in imports.items()}
    assert [*graphlib.TopologicalSorter(graph).static_order()]  # raises CycleError


def test_files_are_short_and_few_are_at_the_top():
    lengths = {name: len(file.read_text().splitlines()) for file, name in places(ROOT.glob("nanopage/**/*.py")).items()}
    assert not [name for name, length in lengths.items() if length > MAX_LINES]
    assert sum("/" not in name for name in lengths) <= 12


def test_one_person_can_hold_the_core_in_the_head():
    lengths = {name: len(file.read_text().splitlines()) for file, name in places(ROOT.glob("nanopage/**/*.py")).items()}
    core = {name: length for name, length in lengths.items() if name in CORE or name.split("/")[0] in CORE}
    assert len(core) > 50 and sum(core.values()) <= CORE_LINES


def functions_of(file):
    """(function, whether Triton compiles it): those of a file, nested ones too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def test_functions_of_the_core_are_short():
    found = {
        f"{name}: {node.name}"
        for file, name in places(ROOT.glob("nanopage/**/*.py")).items()
        if is_core(name)
        for node, _ in functions_of(file)
        if node.end_lineno - node.lineno + 1 > MAX_FUNCTION
    }
    assert found == LONG_FUNCTIONS


def test_functions_take_few_arguments():
    """Without `self`. Kernels take their pointers, strides and constants one by one."""
    found = set()
    for file, name in places(ROOT.glob("nanopage/**/*.py")).items():
        if is_core(name) or name.split("/")[0] in ("weights", "distributed", "startup"):
            for node, is_kernel in functions_of(file):
                arguments = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                if len({*arguments} - {"self"}) > MAX_ARGUMENTS and not is_kernel:
                    found.add(f"{name}: {node.name}")
    assert found == MANY_ARGUMENTS


def test_the_loop_over_the_layers_of_a_decoder_is_written_once():
    """A loop over layers, each of which gets what the layer before it has made. (cpu/aot_chain.cpp has one in C++.)"""
    found = []
    for file, name in places(ROOT.glob("nanopage/**/*.py")).items():
        for loop in [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.For)]:
            steps = [node for node in loop.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
            layer = ast.unparse(loop.target).strip("()").split(", ")[-1]
            if any(ast.unparse(step.value) == f"{layer}(x, step)" for step in steps):
                found.append((name, ast.unparse(loop.iter)))
    assert found == [("models/decoder.py", "enumerate(self.layers)")]
