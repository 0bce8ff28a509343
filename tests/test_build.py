"""The build-up track: its tests fail for the empty package, and pass for the reference, which answers as nanopage."""

import ast
import os
import random
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from helpers import VOCAB_SIZE, tiny_model
from programs import forked
from test_docs import names_in

from nanopage import LLM, SamplingParams
from nanopage.text.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "docs" / "build"
PAGES = sorted(BUILD.glob("[0-9][0-9]-*.md"))


@pytest.fixture
def build(monkeypatch):
    """docs/build in Python's path."""
    monkeypatch.syspath_prepend(BUILD)


def outcomes(package: str) -> Counter[tuple[str, str]]:
    """(milestone, outcome) of the tests of docs/build, run with a package."""
    options = ["-rA", "--tb=line", "-o", "addopts=", "-p", "no:cacheprovider"]
    program = forked("pytest", *options, BUILD, env=os.environ | {"OMP_NUM_THREADS": "1", "MINI": package})
    output = subprocess.run(["pytest"], preexec_fn=program, cwd=ROOT, capture_output=True, text=True).stdout
    found = re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED) .*/test_(m\d+)_", output, re.MULTILINE)
    assert found, output
    return Counter((milestone, outcome) for outcome, milestone in found)


@pytest.mark.interpreter
def test_every_milestone_fails_before_it_is_built_and_passes_after():
    milestones = {f"m{number}" for number in range(1, 13)}
    built = outcomes("mini_ref")
    assert built.keys() == {(milestone, "PASSED") for milestone in milestones}
    empty = outcomes("mini")
    assert {milestone for milestone, _ in empty} == milestones
    assert not [milestone for milestone, outcome in empty if outcome == "PASSED"]


@pytest.mark.parametrize("seed", range(4))
def test_the_reference_gives_the_answers_of_nanopage(build, tmp_path, seed):
    from mini_ref.engine import Engine

    rng = random.Random(seed)
    fields = {"tie_word_embeddings": seed % 2 == 0, "num_key_value_heads": 1 + seed % 2}
    model = tiny_model(tmp_path, dtype="float64", **fields)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 30))] for _ in range(6)]
    engine = Engine(
        model,
        num_blocks=rng.randint(20, 24),
        block_size=rng.choice([2, 3]),
        max_num_seqs=rng.choice([3, 8]),
        max_num_batched_tokens=rng.choice([5, 16]),
    )
    stop_ids = (*engine.model.end_ids, *Tokenizer(model).end_ids())
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, max_tokens=10, stop_ids=stop_ids)
    if seed > 1:
        engine.capture()
    answers: list[list[int]] = [[] for _ in prompts]
    while engine.has_unfinished():
        for (number, _), tokens in engine.step().items():
            answers[int(number)] += tokens
    assert engine.scheduler.num_preemptions > 0 and not engine.blocks.ref_counts
    llm = LLM(str(model), dtype="float64", device="cpu", enforce_eager=True, max_model_len=64)
    whole = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=10), use_tqdm=False)
    assert answers == [output.outputs[0].token_ids for output in whole]


def test_the_reference_is_short_and_needs_no_nanopage():
    texts = [file.read_text() for file in (BUILD / "mini_ref").glob("*.py")]
    assert sum(len(text.splitlines()) for text in texts) <= 800
    assert not [text for text in texts if "import nanopage" in text or "from nanopage" in text]


def test_the_empty_package_is_the_reference_without_the_answers(build):
    from empty import emptied

    files = {file.name: emptied(file) for file in (BUILD / "mini_ref").glob("*.py")}
    assert files == {file.name: file.read_text() for file in (BUILD / "mini").glob("*.py")}, (
        "python docs/build/empty.py"
    )


def test_every_page_has_a_task_a_command_and_something_to_look_at():
    readme = (BUILD / "README.md").read_text()
    assert len(PAGES) == 12
    for number, page in enumerate(PAGES, 1):
        text = page.read_text()
        assert page.name.startswith(f"{number:02}-") and f"({page.name})" in readme
        assert 60 <= len(text.splitlines()) <= 110, page.name
        assert f"```sh\npytest docs/build -k m{number}\n```" in text
        headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
        assert headings[-3:] == ["Your task", "Check", "Look at it"], page.name
        for name, file in re.findall(r"\[`([\w.]+)`\]\(mini/(\w+\.py)\)", text):
            assert name in names_in(BUILD / "mini_ref" / file), f"{page.name}: {name}"


def functions_in(file: Path) -> list[tuple[str, str]]:
    """(name, name of the file) of the functions and methods in it, but those of Python's own."""
    tree = ast.parse(file.read_text())
    owners = [("", tree), *((f"{node.name}.", node) for node in tree.body if isinstance(node, ast.ClassDef))]
    found = [(owner + each.name, each) for owner, node in owners for each in node.body if hasattr(each, "args")]
    return [(name, file.name) for name, each in found if not each.name.startswith("__")]


def test_the_map_has_every_function_of_the_reference_and_the_core_has_what_it_names():
    text = (BUILD / "map.md").read_text()
    listed = re.findall(r"^\| \[`([\w.]+)`\]\(mini_ref/(\w+\.py)\) \| .* \|$", text, re.MULTILINE)
    assert sorted(listed) == sorted(each for file in (BUILD / "mini_ref").glob("*.py") for each in functions_in(file))
    links = re.findall(r"\[`([\w.]+)`\]\(\.\./\.\./(nanopage/[\w/]+\.py)\)", text)
    missing = [
        f"{name} in {file}" for name, file in links if not name.endswith(".py") and name not in names_in(ROOT / file)
    ]
    assert len(links) > 60 and missing == []
