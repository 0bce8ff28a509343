"""What README and docs say can be checked, and is: code runs, names and files exist, figures are counted."""

import ast
import contextlib
import functools
import io
import json
import pdb
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from helpers import Paged, assert_all_close, random_tokens, reference_logits, tiny_hf_model

from nanopage import models
from nanopage.metrics import Metrics
from nanopage.server.app import ServerState, create_app
from nanopage.server.protocol import REFUSED
from nanopage.weights import loader

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def code_blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL)


def run_code(code: str) -> str:
    """Run a block of a document. Returns what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "a document", "exec"), {})
    return printed.getvalue()


@functools.cache
def defined_names() -> set[str]:
    """Every class and function of the package and of benchmarks, and every name in a class: `name` and `Class.name`."""
    names = set()
    for file in (*ROOT.glob("nanopage/**/*.py"), *ROOT.glob("benchmarks/**/*.py")):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                members = {
                    each.name for each in ast.walk(node) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
                }
                members |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
                for each in ast.walk(node):
                    if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                        members.add(each.attr)
                names |= {node.name} | {f"{node.name}.{member}" for member in members}
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
    return names


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_refers_to_exists(document):
    text = document.read_text()
    for target in re.findall(r"\]\(([^)#]*)(?:#[^)]*)?\)", text):
        if target and not target.startswith("http"):
            assert (document.parent / target).exists(), target
    for file in re.findall(r"`((?:nanopage|tests|benchmarks|docs|examples)/[\w/.-]+\.(?:py|md|json))`", text):
        assert (ROOT / file).exists() or file == "nanopage/models/arcee.py", file
    for file in re.findall(r"`(test_\w+\.py)`", text):
        assert list(ROOT.glob(f"tests/**/{file}")), file
    names = defined_names()
    for name in re.findall(r"`([A-Z]\w+\.\w+)[`(]", text):
        if name.partition(".")[0] in names:
            assert name in names, name


def test_the_readme_is_short_and_counts_the_reading_path_and_its_helpers():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 200
    begin, middle = text.index("| file | what it does |"), text.index("Their most important helpers are")
    helpers = text[middle : text.index("[docs/map.md](docs/map.md) lists every module")]
    path = [ROOT / target for target in re.findall(r"\]\((nanopage/[^)]*)\)", text[begin:middle])]
    more = [ROOT / "nanopage" / name for name in re.findall(r"`([\w/]+\.py)`", helpers)]
    assert not set(path) & set(more)
    for files, claim in (
        (path, r"is (\d+) files and about ([\d,]+) lines"),
        (more, r"(\d+) files and about ([\d,]+) lines:"),
    ):
        num_files, num_lines = re.search(claim, text).groups()
        assert len(set(files)) == int(num_files)
        lines = sum(len(file.read_text().splitlines()) for file in files)
        assert lines == pytest.approx(int(num_lines.replace(",", "")), rel=0.02)


def test_the_map_lists_every_file():
    text = (ROOT / "docs" / "map.md").read_text()
    missing = [
        file.relative_to(ROOT)
        for folder in ("nanopage", "benchmarks", "examples")
        for file in ROOT.glob(f"{folder}/**/*.py")
        if file.name != "__init__.py" and f"{file.name}`" not in text
    ]
    assert missing == []


@pytest.mark.parametrize("code", code_blocks("docs/debugging.md", "python"))
def test_the_code_of_debugging_runs(code):
    assert "Paris" in run_code(code)


def test_the_debugger_shows_what_debugging_says(monkeypatch):
    text = (ROOT / "docs" / "debugging.md").read_text()
    (code,), (names, tables) = code_blocks("docs/debugging.md", "python"), code_blocks("docs/debugging.md", "text")
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| ", text, re.MULTILINE)[1:]
    assert len(rows) == 7
    commands = [*names.splitlines(), *(f"tbreak {where}" for where, _ in rows)]
    for _, what in rows:
        commands += ["c", f"p {what}"]
    commands += ["c", *tables.splitlines(), "c"]
    screen = io.StringIO()
    debugger = pdb.Pdb(stdin=io.StringIO("\n".join(commands) + "\n"), stdout=screen, nosigint=True, readrc=False)
    stops = iter(range(2))  # before the first step, and before the second

    def stop() -> None:
        if next(stops, None) is not None:
            debugger.set_trace(sys._getframe(1))

    monkeypatch.setattr(sys, "breakpointhook", stop)
    assert "Paris" in run_code(code.replace("# breakpoint()", "breakpoint()"))
    shown = screen.getvalue()
    assert "***" not in shown, "an error in pdb"
    assert shown.count("Deleted breakpoint") == len(rows), "pdb stopped in each of the functions"
    assert "{0: [0]}" in shown and "tensor([[" in shown, "both block tables"


def names_in(file: Path) -> set[str]:
    """What a file defines: functions and classes as `name`, methods and annotated fields as `Class.name`. Of C++, only
    functions."""
    if file.suffix == ".cpp":
        return set(re.findall(r"^\w[^;=]*?(\w+)\(", file.read_text(), re.MULTILINE))
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        for member in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(f"{node.name}.{member.name}")
            elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                names.add(f"{node.name}.{member.target.id}")
    return names


def test_the_functions_that_questions_link_to_are_in_the_linked_files():
    text = (ROOT / "docs" / "questions.md").read_text()
    links = [link for link in re.findall(r"\[`([\w.]+)`\]\(\.\./([^)]+)\)", text) if not link[0].endswith(".py")]
    assert len(links) == len(re.findall(r"\]\(\.\./", text)) - 1, "every link to a file but one names a function"
    missing = [f"{name} in {file}" for name, file in links if name not in names_in(ROOT / file)]
    assert missing == []
    titles = re.findall(r"^##+ (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) == anchors, "the list at the top has every question"


def test_the_tour_prints_what_it_shows():
    blocks, outputs = code_blocks("docs/tour.md", "python"), code_blocks("docs/tour.md", "text")
    assert run_code("".join(blocks)).splitlines() == "".join(outputs).splitlines()


def test_the_session_of_view_is_what_the_engine_says():
    (code,), text = code_blocks("docs/view.md", "python"), code_blocks("docs/view.md", "text")[-1]
    assert run_code(code).splitlines() == text.splitlines()


@pytest.mark.parametrize("fields", [{}, {"attention_bias": True, "num_key_value_heads": 4}], ids=str)
def test_the_family_of_adding_a_model_equals_transformers(monkeypatch, tmp_path, fields):
    """As a family of a package that is installed, with the entry point that the page shows."""
    (code,) = code_blocks("docs/adding-a-model.md", "python")
    (entry,) = code_blocks("docs/adding-a-model.md", "toml")
    (group, entries), *_ = tomllib.loads(entry)["project"]["entry-points"].items()
    package, _, module = entries["arcee"].partition(".")
    for folder in (package, "families-1.0.dist-info"):
        (tmp_path / folder).mkdir()
    (tmp_path / package / f"{module}.py").write_text(code)
    (tmp_path / "families-1.0.dist-info" / "METADATA").write_text("Name: families\nVersion: 1.0\n")
    (tmp_path / "families-1.0.dist-info" / "entry_points.txt").write_text(f"[{group}]\narcee = {package}.{module}\n")
    hf_model = tiny_hf_model("arcee", torch.float32, **fields)
    hf_model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"ArceeForCausalLM.* is not supported"):
        loader.read_config(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert models.find_family("ArceeForCausalLM").__name__ == entries["arcee"]
    sequences = random_tokens([13, 1, 30])
    paged = Paged(tmp_path, sequences)
    for _ in range(10):
        left = {index: min(7, len(tokens) - paged.done(index)) for index, tokens in enumerate(sequences)}
        if step := {index: count for index, count in left.items() if count}:
            paged.step(dict(sorted(step.items(), key=lambda item: item[1])))
    assert_all_close(paged.logits, reference_logits(hf_model, sequences))


def test_the_server_page_lists_the_refused_fields():
    rows = [
        f"| `{name}` | {why} | {', '.join(f'`{json.dumps(value)}`' for value in neutral) or '-'} |"
        for name, (neutral, why) in REFUSED.items()
    ]
    assert "\n".join(rows) in (ROOT / "docs" / "server.md").read_text()


def test_the_server_page_names_every_path(model):
    text = (ROOT / "docs" / "server.md").read_text()
    app = create_app(ServerState(["tiny"])).app
    paths = {route.path.split("{")[0] for route in app.routes if getattr(route, "include_in_schema", False)}
    assert {"/v1/chat/completions", "/metrics"} <= paths
    assert not [path for path in paths if path not in text]


def test_async_llm_as_the_server_page_uses_it(model):
    chat_client, program = code_blocks("docs/server.md", "python")
    assert "openai" in chat_client
    printed = run_code(program.replace("EngineArgs()", f"EngineArgs(model={str(model)!r}, enforce_eager=True)"))
    assert printed


def test_contributing_lists_every_variable_of_the_tests():
    used = {
        name
        for file in ROOT.glob("tests/**/*.py")
        for name in re.findall(r"environ.*?\b(NANOPAGE_[A-Z_]+)", file.read_text())
    }
    named = set(re.findall(r"NANOPAGE_[A-Z_]+", (ROOT / "CONTRIBUTING.md").read_text()))
    assert used - named == set() and "NANOPAGE_FUZZ_WORLDS" in used


def test_vllm_md_lists_every_metric():
    text = (ROOT / "docs" / "vllm.md").read_text()
    table = text[text.index("| `vllm:` | |") :].split("\n\n")[0]
    metrics = Metrics("model", {"block_size": 16}, num_speculative_tokens=3)
    snapshot = metrics.snapshot(num_running=0, num_waiting=0)
    assert set(re.findall(r"`(\w+)`", table)) - {"finished_reason"} == {m.name.removeprefix("vllm:") for m in snapshot}


def test_every_test_of_the_conformance_table_exists():
    text = (ROOT / "docs" / "conformance.md").read_text()
    names = re.findall(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`", text)
    assert len(names) > 60
    for file, name in names:
        files = [ROOT / file] if file else [*ROOT.glob("tests/server/test_*.py")]
        assert any(re.search(rf"^def {name}\(", each.read_text(), re.MULTILINE) for each in files), name
