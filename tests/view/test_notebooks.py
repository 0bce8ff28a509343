"""The notebooks of docs/notebooks run, and show what their outputs say."""

import copy
import json
import runpy
from pathlib import Path

import pytest
from helpers import tiny_model

from nanopage.weights import hub

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=512)


@pytest.mark.parametrize("name", ["paging", "batching"])
def test_a_notebook_shows_what_it_prints_and_draws(name, model, monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "default_model", lambda: model)  # no output depends on the tokens
    monkeypatch.chdir(tmp_path)
    kept = json.loads((FOLDER / f"{name}.ipynb").read_text())
    run = copy.deepcopy(kept)
    runpy.run_path(str(FOLDER / "run.py"))["run"](run)
    assert any(cell["cell_type"] == "code" for cell in kept["cells"])
    for cell, cell_of_run in zip(kept["cells"], run["cells"], strict=True):
        assert cell == cell_of_run, "python docs/notebooks/run.py"
    assert {file.stem for file in FOLDER.glob("*.ipynb")} == {"paging", "batching"}
