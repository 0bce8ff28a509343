"""The course: its commands print what the chapters show, its references are right, its figures are what the code makes,
and the tests of its exercises fail until they are solved."""

import ast
import functools
import os
import re
import runpy
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers import LONG
from programs import forked

from nanopage.cpu import aot

ROOT = Path(__file__).parent.parent
COURSE = ROOT / "docs" / "course"
CHAPTERS = sorted(COURSE.glob("[0-9]*-*.md"), key=lambda file: int(file.name.partition("-")[0]))
EXERCISES = sorted(file.stem for file in (COURSE / "solutions").glob("*.py"))
MEASURED = ("memory_bound", "launches")  # print what depends on the machine or on torch: only the words are compared
SHORTER = {"memory_bound": ["1", "2"]}  # arguments that make an experiment short, without NANOPAGE_LONG_TESTS=1


@pytest.fixture
def course_path(monkeypatch):
    """What Python's path has when a file of docs/ is run as a program."""
    for folder in (ROOT / "docs", COURSE / "experiments"):
        monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(aot.Compiled, "start", lambda self: None)  # compiling in the background is not what is tested


def blocks(document: Path) -> list[tuple[str, str]]:
    """(language, text) of each block of code."""
    return re.findall(r"^```(\w+)\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)


def commands() -> list[tuple[str, str]]:
    """(command, what the chapter says it prints) of each command that runs a program."""
    found = []
    for chapter in CHAPTERS:
        all_blocks = [*blocks(chapter), ("", "")]
        for (language, text), (next_language, shown) in pairwise(all_blocks):
            if language == "sh" and text.startswith("python "):
                assert next_language == "text", f"{chapter.name} shows what {text.strip()} prints"
                found.append((text.strip(), shown))
    return found


@pytest.mark.parametrize(
    ("command", "shown"), commands(), ids=lambda text: text.split()[1] if text[:7] == "python " else ""
)
def test_a_command_prints_what_its_chapter_shows(command, shown, capsys, monkeypatch, course_path):
    program, *arguments = re.findall(r'"[^"]*"|\S+', command)[1:]
    name = Path(program).stem
    arguments += [] if LONG else SHORTER.get(name, [])
    monkeypatch.setattr(sys, "argv", [program, *(argument.strip('"') for argument in arguments)])
    runpy.run_path(str(ROOT / program), run_name="__main__")
    printed = capsys.readouterr().out
    if name in MEASURED:
        words = (re.sub(r"[\d.,]+", "#", re.sub(r" +", " ", text)).splitlines() for text in (printed, shown))
        assert set(next(words)) == set(next(words))
        return
    lines = printed.splitlines()
    for part in re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE):  # what is left out
        wanted = part.splitlines()
        starts = [start for start in range(len(lines)) if lines[start : start + len(wanted)] == wanted]
        assert starts, f"not printed:\n{part}\nbut:\n{printed}"
        del lines[: starts[0] + len(wanted)]


def test_a_contest_says_what_it_lacks(monkeypatch, course_path):
    for arguments, message in (([], r"exercises/eviction\.py is not solved yet"), (["x"], "takes no arguments")):
        monkeypatch.setattr(sys, "argv", ["contest_eviction.py", *arguments])
        with pytest.raises(SystemExit, match=message):
            runpy.run_path(str(COURSE / "experiments" / "contest_eviction.py"), run_name="__main__")


def test_every_chapter_has_a_figure_an_experiment_an_exercise_and_what_to_read_next():
    assert len(CHAPTERS) == 12
    links = (COURSE / "README.md").read_text()
    experiments, figures, exercises = set(), set(), set()
    for chapter in CHAPTERS:
        text = chapter.read_text()
        assert f"({chapter.name})" in links
        assert len(text.splitlines()) <= 200, chapter.name
        for heading in ("## Exercise: ", "## What to read next in the code"):
            assert heading in text, f"{chapter.name}: {heading}"
        figures |= (found := set(re.findall(r"!\[[^]]+\]\(figures/([\w-]+)\.svg\)", text)))
        assert found, f"{chapter.name}: no figure"
        experiments |= (found := set(re.findall(r"^python docs/course/experiments/(\w+)\.py", text, re.MULTILINE)))
        assert found, f"{chapter.name}: no experiment"
        (exercise,) = re.findall(r"^pytest -x docs/course/exercises/test_(\w+)\.py$", text, re.MULTILINE)
        assert f"(exercises/{exercise}.py)" in text
        exercises.add(exercise)
    assert (
        exercises
        == set(EXERCISES)
        == {
            file.stem for file in (COURSE / "exercises").glob("*.py") if not file.stem.startswith(("test_", "conftest"))
        }
    )
    assert figures == {file.stem for file in (COURSE / "figures").iterdir()}
    assert experiments == {file.stem for file in (COURSE / "experiments").glob("*.py")} - {"dry", "contest"}


def test_an_experiment_finds_benchmarks_which_are_not_installed():
    for file in (COURSE / "experiments").glob("*.py"):
        text = file.read_text()
        assert ("from benchmarks" in text) == ("sys.path.insert(0, str(Path(__file__).parents[3]))\n" in text), (
            file.name
        )


@functools.cache
def names_in(file: Path) -> set[str]:
    """Functions, classes and constants as `name`, methods and attributes as `Class.name` and `name`."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            for each in ast.walk(node):
                if isinstance(each, ast.FunctionDef):
                    names.add(f"{node.name}.{each.name}")
                if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                    names.add(f"{node.name}.{each.attr}")
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                    names.add(f"{node.name}.{each.id}")
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@pytest.mark.parametrize("document", [COURSE / "README.md", *CHAPTERS], ids=lambda path: path.name)
def test_the_names_of_a_chapter_are_in_the_files_it_links_to(document):
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    for label, target in re.findall(r"\[`([A-Za-z_.]+)`\]\(([^)#]*\.py)\)", text):
        if not label.endswith(".py"):
            assert label in names_in((document.parent / target).resolve()), f"{label} in {target}"
    _, _, reading = text.partition("## What to read next in the code")  # its names belong to the files it links to
    files = re.findall(r"\]\((\.\./\.\./[\w/]+\.py)\)", reading)
    known = set().union(
        *({name.rpartition(".")[2] for name in names_in((document.parent / file).resolve())} for file in files)
    )
    for name in re.findall(r"`(\w+)`", reading):
        assert name in known, f"{name} in {files}"


def test_the_figures_are_what_the_code_makes(course_path):
    import figures

    assert {file.stem for file in figures.FIGURES.iterdir()} == figures.ALL.keys()
    for name, make in figures.ALL.items():
        picture = make().svg()
        assert (figures.FIGURES / f"{name}.svg").read_text() == picture, f"python docs/figures.py {name}"
        assert len(picture) < 60_000
        for shape in ElementTree.fromstring(picture).iter():  # nothing from outside, nothing beyond the edge
            assert "href" not in "".join(shape.attrib)


@pytest.mark.interpreter
def test_the_tests_of_the_exercises_fail_until_they_are_solved():
    options = ["-q", "-rA", "--tb=no", "-o", "addopts=", "-p", "no:cacheprovider", "--both"]
    program = forked("pytest", *options, COURSE / "exercises", env=os.environ | {"OMP_NUM_THREADS": "1"})
    output = subprocess.run(["pytest"], preexec_fn=program, cwd=ROOT, capture_output=True, text=True).stdout
    lines = re.findall(r"^(?:PASSED|FAILED|ERROR|SKIPPED) .*$", output, re.MULTILINE)
    found = [
        (result[1].lower(), result[2], result[3])
        for line in lines
        if (result := re.match(r"(\w+) .*/test_(\w+)\.py::\w+\[(exercises|solutions)", line))
    ]
    assert len(found) == len(lines) and {name for _, name, _ in found} == set(EXERCISES), output
    results = Counter(found)
    for name in EXERCISES:
        passed, failed = (results[outcome, name, "exercises"] for outcome in ("passed", "failed"))
        assert failed > passed, f"{name}: most tests fail before it is solved"
        assert results["passed", name, "solutions"] == passed + failed, f"{name}: all tests pass when it is solved"
    assert {outcome for outcome, _, _ in found} == {"passed", "failed"}, "nothing is skipped"


def test_an_exercise_is_its_solution_without_the_answer():
    """What an exercise gives, such as names and arguments, is the same in its solution."""
    for name in EXERCISES:
        exercise, solution = (names_in(COURSE / folder / f"{name}.py") for folder in ("exercises", "solutions"))
        missing = {each for each in exercise if each[0].isupper() or "." not in each} - solution
        assert not missing, f"{name}: {missing}"
