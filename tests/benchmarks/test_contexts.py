"""`python -m benchmarks.contexts`: what it measures, on a tiny model."""

import json

from helpers import tiny_model
from typer.testing import CliRunner

from benchmarks import contexts


def test_a_long_context_costs_what_its_windows_cost(tmp_path, monkeypatch):
    model = tiny_model(tmp_path / "windows", "gemma3_text", num_hidden_layers=4, sliding_window_pattern=2)
    monkeypatch.setattr(contexts, "CONTEXTS", (40, 400))
    monkeypatch.setattr(contexts, "NUM_STEPS", 4)
    command = [str(model), "--eager", "--dtype", "float32", "--chunk", "32", "--json", str(tmp_path / "j")]
    result = CliRunner().invoke(contexts.app, command, catch_exceptions=False)
    assert result.exit_code == 0 and "all layers attend" in result.output
    rows = json.loads((tmp_path / "j").read_text())["rows"]
    blocks = {(row["name"].split(",")[-1], row["context"]): row["blocks"] for row in rows}
    # 2 of 4 layers have a window of 7 tokens, of which the next token sees 6: one block or two of 16.
    everywhere = " all layers attend to everything"
    assert blocks == {("windows", 40): 3 + 1, ("windows", 400): 26 + 2, (everywhere, 40): 3, (everywhere, 400): 26}
    short, long = (row["mib"] for row in rows[2:])
    assert rows[0]["mib"] / short == 4 / 6 and rows[1]["mib"] / long == 28 / 52
    assert all(row["decode_ms"] > 0 and row["most_mib"] >= row["mib"] for row in rows)
