"""The examples run."""

import runpy
import sys
from pathlib import Path

import pytest
from helpers import LONG, tiny_model

from nanopage.cpu import aot
from nanopage.weights import hub

ROOT = Path(__file__).parent.parent
EXPECTED = {  # a part of what each example prints
    "completions": "beam 2: ",
    "offline": "Paris",
    "prefix_sharing": "prompt tokens were cached",
    "sampling": "digits only: ",
    "streaming": "\n",
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """What is the default model to most examples, without NANOPAGE_LONG_TESTS=1."""
    return tiny_model(tmp_path_factory.mktemp("small"), max_position_embeddings=4096)


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_runs(example, small, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(example)])
    if example.stem != "offline" and not LONG:
        monkeypatch.setattr(hub, "default_model", lambda: small)
    monkeypatch.setattr(aot.Compiled, "start", lambda self: None)  # compiling in the background is not what is tested
    runpy.run_path(str(example), run_name="__main__")
    assert EXPECTED[example.stem] in capsys.readouterr().out
