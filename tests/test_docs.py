"""What README and docs say can be checked, and is: names, files and options exist, figures are counted. Code runs in
test_documents.py."""

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
from fake_executor import fake_engine
from helpers import Paged, assert_all_close, bench_command, random_tokens, reference_logits, tiny_hf_model
from test_imports import CORE
from typer.main import get_command

from nanopage import models
from nanopage.__main__ import app as program
from nanopage.server import batch, serve
from nanopage.server.app import create_app
from nanopage.server.fields import REFUSED
from nanopage.server.option_sources import options_of, variable_of
from nanopage.server.state import ServerState
from nanopage.step import EncoderCache
from nanopage.vllm.metrics import Metrics
from nanopage.weights import loader

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
SOURCES = (".py", ".cpp", ".h", ".html", ".toml")
# In the documents, but not in our sources; of vLLM, what nanopage does not have.
NAMES_OF_OTHERS = {
    "prompt_logprob_token_ids", "prompt_logprob_start", "stream_interval",
    "repetition_detection", "routed_experts_prompt_start", "trace_decode_token_ids", "skip_clone",
    "collective_rpc", "apply_model", "set_tokenizer", "reset_mm_cache", "init_weight_transfer_engine", "argparse_utils",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
    "MistralModel", "CUDA_LAUNCH_BLOCKING", "docker", "oneOf", "cl", "mat",
}  # fmt: skip
OPTIONS_OF_OTHERS = {  # pip, pytest, Ray, Docker, kubectl, systemctl
    "--index-url", "--no-deps", "--dist", "--solutions", "--address", "--disable-usage-stats", "--generate", "--head",
    "--include-dashboard", "--max-worker-port", "--min-worker-port", "--node-ip-address", "--node-manager-port",
    "--num-cpus", "--object-manager-port", "--network", "--build-arg", "--gpus", "--profile", "--from-literal", "--now",
}  # fmt: skip


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
    """Every class and function, and every name in a class: `name` and `Class.name`."""
    names = set()
    folders = ("nanopage", "benchmarks", "docs/build/mini_ref")
    for file in (file for folder in folders for file in ROOT.glob(f"{folder}/**/*.py")):
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


@functools.cache
def all_files() -> list[Path]:
    """The files of the repository, not those of a virtual environment in it."""
    folders = ("nanopage", "benchmarks", "examples", "tests", "docs")
    return [*ROOT.glob("*.*"), *(file for folder in folders for file in ROOT.glob(f"{folder}/**/*.*"))]


@functools.cache
def all_words() -> set[str]:
    """Every word of the sources."""
    files = [*(file for file in all_files() if file.suffix in SOURCES), *ROOT.glob("deploy/*")]
    words = set().union(*(re.findall(r"\w+", file.read_text()) for file in files))
    variables = {variable_of(name) for name in options_of(serve.parser())}
    return words | {file.stem for file in files} | variables | NAMES_OF_OTHERS


@functools.cache
def all_options() -> set[str]:
    """The options of all programs."""
    options, left = set(), [get_command(program), bench_command()]
    for parser in (serve.parser(), batch.parser()):
        options.update(parser._option_string_actions)
    for command in left:
        left += getattr(command, "commands", {}).values()
        options.update(option for each in command.params for option in (*each.opts, *each.secondary_opts))
    return options | OPTIONS_OF_OTHERS


def anchors_of(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_document_refers_to_exists(document):
    text = document.read_text()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", prose):
        if not target.startswith("http"):
            file = document.parent / target if target else document
            assert file.exists() and (not anchor or anchor in anchors_of(file.read_text())), f"{target}#{anchor}"
    names = defined_names()
    for code in (code for part in re.split(r"\n\s*\n", prose) for code in re.findall(r"`([^`]+)`", part)):
        for file in re.findall(r"^(?:nanopage|tests|benchmarks|docs|examples)/[\w/.-]+\.(?:py|md|json)$", code):
            assert (ROOT / file).exists() or file == "nanopage/families/arcee.py", file
        for file in re.findall(r"^[\w/]+\.(?:py|cpp|h)$", code):
            exists = any(path.as_posix().endswith(f"/{file}") for path in all_files())
            assert exists or file in ("sums.py", "arcee.py", "nanopage/families/arcee.py"), file
        for name in re.findall(r"(?<![\w./~-])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?![\w/~-])", code):
            assert not (gone := set(name.split(".")) - all_words()), f"{gone} in `{code}`"
        if re.fullmatch(r"[A-Z]\w+\.\w+", name := code.partition("(")[0]) and name.partition(".")[0] in names:
            assert name in names, name
    options = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", re.sub(r"<!--", "", text)))
    assert options <= all_options(), options - all_options()


def test_the_files_that_docstrings_name_exist():
    known = {file.name for file in all_files()} | {"llama.cpp", "whisper.cpp"}
    for file in (*ROOT.glob("nanopage/**/*.py"), *ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("*.py")):
        for docstring in re.findall(r'"""(.*?)"""', file.read_text(), re.DOTALL):
            named = re.findall(r"(?<![\w/*-])(?:\w+/)*(\w+\.(?:py|cpp))\b", docstring)
            assert set(named) <= known, f"{file.name}: {set(named) - known}"


def test_the_readme_is_short_and_its_counts_are_right():
    readme, listing = (ROOT / "README.md").read_text(), (ROOT / "docs" / "map.md").read_text()
    assert len(readme.splitlines()) <= 130
    begin = readme.index("The main path from")
    path = [ROOT / target for target in re.findall(r"\]\((nanopage/[^)]*)\)", readme[begin:])]
    begin = listing.index("most important helpers are")
    helpers = re.findall(r"`([\w/]+\.py)`", listing[begin : listing.index("The package is")])
    helpers = [ROOT / "nanopage" / name for name in helpers]
    core = [*(ROOT / "nanopage").glob("build.py")]
    for place in CORE:
        core += [ROOT / "nanopage" / place] if place.endswith(".py") else (ROOT / "nanopage" / place).glob("**/*.py")
    for files, claim, text in (
        (path, r"is (?P<files>\d+) files and about (?P<lines>[\d,]+) lines", readme),
        (
            [ROOT / "nanopage" / name for name in helpers],
            r"another (?P<files>\d+) files and about (?P<lines>[\d,]+)",
            listing,
        ),
        (core, r"A core of (?P<lines>[\d,]+) lines", readme),
    ):
        found = re.search(claim, text).groupdict()
        assert len(set(files)) == int(found.get("files", len(files)))
        lines = sum(len(file.read_text().splitlines()) for file in files)
        assert lines == pytest.approx(int(found["lines"].replace(",", "")), rel=0.02)
    assert not set(path) & set(helpers)
    assert sum(len(file.read_text().splitlines()) for file in path) <= 2500


def test_the_map_lists_every_file():
    text = (ROOT / "docs" / "map.md").read_text()
    missing = [
        file.relative_to(ROOT)
        for folder in ("nanopage", "benchmarks", "examples")
        for file in ROOT.glob(f"{folder}/**/*.py")
        if file.name != "__init__.py" and f"{file.name}`" not in text
    ]
    assert missing == []


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
    anchors = anchors_of(text.partition("\n")[2])
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) == anchors, "the list at the top has every question"


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


def test_contributing_lists_every_variable_of_the_tests():
    used = {
        name
        for file in ROOT.glob("tests/**/*.py")
        for name in re.findall(r"environ.*?\b(NANOPAGE_[A-Z_]+)", file.read_text())
    }
    named = set(re.findall(r"NANOPAGE_[A-Z_]+", (ROOT / "CONTRIBUTING.md").read_text()))
    assert used - named == set() and "NANOPAGE_FUZZ_WORLDS" in used


def test_environment_md_lists_every_variable_that_is_read():
    text = (ROOT / "docs" / "environment.md").read_text()
    read = {
        name
        for file in ROOT.glob("nanopage/**/*.py")
        for name in re.findall(r'environ\.get\("(\w+)"', file.read_text())
    } - {"PYTHONPATH"}  # which the compiling process inherits, with more
    assert "NANOPAGE_COMPILE" in read and not {name for name in read if f"`{name}`" not in text}


def test_vllm_md_lists_every_metric():
    text = (ROOT / "docs" / "vllm.md").read_text()
    table = text[text.index("| `vllm:` | |") :].split("\n\n")[0]
    engine = fake_engine(speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    metrics = Metrics(engine)
    metrics.encoder_cache = EncoderCache()  # as with an encoder
    names = {metric.name.removeprefix("vllm:") for metric in metrics.snapshot()}
    assert set(re.findall(r"`([\w:]+\w)`", table)) - {"finished_reason"} == names


def test_every_test_of_the_conformance_table_exists():
    text = (ROOT / "docs" / "conformance.md").read_text()
    names = re.findall(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`", text)
    assert len(names) > 60
    for file, name in names:
        files = [ROOT / file] if file else [*ROOT.glob("tests/server/test_*.py")]
        assert any(re.search(rf"^def {name}\(", each.read_text(), re.MULTILINE) for each in files), name
