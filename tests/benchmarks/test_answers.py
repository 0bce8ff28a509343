"""`python -m benchmarks.answers`: what it counts, on a tiny model that loops."""

import json
import re

from helpers import tiny_model
from typer.testing import CliRunner

from benchmarks import answers


def test_right_and_degenerate_replies_are_counted(tmp_path, monkeypatch):
    model = tiny_model(tmp_path / "model")
    monkeypatch.setattr("nanopage.terminal.guard.WINDOW", 8)
    monkeypatch.setattr("nanopage.terminal.guard.LONGEST_UNIT", 4)
    questions, file, results = tmp_path / "questions", tmp_path / "mt_bench", tmp_path / "results.json"
    asked = [{"question": "a?", "pattern": "."}, {"question": "b?", "pattern": "(?!)"}]
    questions.write_text("".join(json.dumps(entry) + "\n" for entry in asked))
    file.write_text("".join(json.dumps({"turns": [word, "more"]}) + "\n" for word in ("cat", "dog")))
    monkeypatch.setattr(answers, "QUESTIONS", questions)
    loop = {"temperature": 0, "allowed_token_ids": [66], "ignore_eos": True}
    settings = json.dumps({"loop": loop, "hot": {"temperature": 2.0, "ignore_eos": True}})
    command = ["--mt-bench", file, "--model", model, "--settings", settings, "--seeds", 2, "--max-tokens", 96]
    app = answers.typer.Typer()
    app.command()(answers.main)
    done = CliRunner().invoke(app, [*map(str, command), "--json", str(results)])
    assert done.exit_code == 0, done.output
    found = json.loads(results.read_text())["settings"]
    assert [(found[name]["right"], found[name]["of"]) for name in ("loop", "hot")] == [(1, 2), (2, 4)]
    assert found["loop"]["right_at_once"] == 1
    assert found["loop"]["mt_bench"] == {"degenerate": 2, "ended": 0, "cut": 0}
    assert found["hot"]["mt_bench"] == {"degenerate": 0, "ended": 0, "cut": 2}
    assert len(found["hot"]["replies"]) == 6


def test_the_questions_have_patterns_that_are_no_part_of_them():
    entries = [json.loads(line) for line in answers.QUESTIONS.read_text().splitlines()]
    assert len({entry["question"] for entry in entries}) == 50
    assert not [entry for entry in entries if re.search(entry["pattern"], entry["question"], re.IGNORECASE)]
